// A run's numbers: metrics.jsonl is the truth; the console line, TensorBoard and the report derive from it.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/files.h"
#include "base/json.h"

namespace marrow {

struct StepMetrics {
  int64_t step = 0;         // the first step of a run is 1
  double loss = 0;          // mean over all targets of the global batch
  double balance_loss = 0;  // mean over layers
  std::vector<double> balance_loss_per_layer;
  double grad_norm = 0;  // before clipping
  double lr = 0;
  int64_t tokens = 0;       // of this step
  double step_seconds = 0;  // on the device, from the end of the step or validation before: data and saving count
  double tokens_per_second = 0;
  double tflops_per_gpu = 0;
  double mfu = 0;  // NaN where the device's peak is unknown: null in the file
  int64_t peak_memory_bytes = 0;
  double expert_load_max_over_mean = 0;
  // ep > 1: rows of H that a token sends to other ranks in a layer's dispatch, and gets back in its combine. Without
  // deduplication it would be the pairs of other ranks' experts, k · (ep − 1) / ep of a balanced router.
  double dispatch_rows_per_token = 0;
};

// "step 12/200  loss 5.1234  balance 1.02  …  eta 3m10s"
std::string console_line(const StepMetrics& metrics, int64_t steps);

// One line of metrics.jsonl, without the newline. Numbers read back to the same bits.
std::string metrics_json(const StepMetrics& metrics);
// Visits the lines of a metrics.jsonl, as text with the newline and as JSON. Errors name file and line. A line without
// its newline was cut off by a kill, and is left out.
void read_metrics(const std::string& path, const std::function<void(const std::string&, const Json&)>& visit);

// Event files: TFRecord frames around protobuf messages, both written by hand.
class TensorboardWriter {
 public:
  // Creates a new event file in `dir`. Readers forget what older files hold after `resumed_step`.
  TensorboardWriter(const std::string& dir, int64_t resumed_step);
  void write(int64_t step, const std::vector<std::pair<std::string, double>>& scalars);  // tag, value

 private:
  void append_record(const std::string& event);
  OutputFile file_;
};

// CRC-32C (Castagnoli) of `bytes`, for tests of the framing.
uint32_t crc32c(std::string_view bytes);

// Appends to DIR/metrics.jsonl and DIR/tensorboard/; each line is on its way to the disk when the call returns.
class MetricsWriter {
 public:
  // The state after `resumed_step` is what the run goes on from (0: a new run): later lines, which
  // an earlier run left behind, are removed, and so is a last line that was cut off.
  MetricsWriter(const std::string& dir, int64_t resumed_step);

  void write(const StepMetrics& metrics);
  void write_validation(int64_t step, double loss);

 private:
  OutputFile file_;
  TensorboardWriter tensorboard_;
};

}  // namespace marrow
