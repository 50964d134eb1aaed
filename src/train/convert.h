// Between checkpoints and Hugging Face folders, on the CPU, in bounded memory.
#pragma once
#include "train/checkpoint.h"

namespace marrow {

// Writes the weights of a checkpoint, in kF32 or kBF16, as a folder that transformers loads.
// Returns the bytes of its weights.
int64_t export_checkpoint(const Checkpoint& checkpoint, const std::string& output,
                          TensorDtype dtype);

// Makes a Hugging Face folder a checkpoint (`output` is its folder) of step 0, without optimizer
// state. Returns the names of tensors left out under `allow_unknown`.
std::vector<std::string> import_hub_folder(const std::string& hub, const std::string& output,
                                           bool allow_unknown);

}  // namespace marrow
