// RUN.toml ($HERE: a folder with model.json and a corpus) and a line for each --set; what was accepted, written and
// read again; and its checks against a model and numbers of processes.
#include "fuzz/fuzz_target.h"
#include "train/pretrain_config.h"

namespace marrow {
namespace {

using namespace fuzz;  // NOLINT

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  for (; !text.empty(); text.remove_prefix(std::min(text.size(), lines.back().size() + 1))) {
    lines.emplace_back(text.substr(0, text.find('\n')));
  }
  return lines;
}

void read(const ScratchFolder& folder, std::string_view input) {
  const auto parts = parts_of(replaced(std::string(input), "$HERE", folder.path()), 2);
  const bool have_gpu = input.size() % 2 == 1;
  const std::string path = folder.write("run.toml", parts[0]);
  accepts([&] {
    const PretrainConfig config = read_pretrain_config(path, lines_of(parts[1]), have_gpu);
    const std::string text = to_toml(config);
    const PretrainConfig again = read_pretrain_config(folder.write("again.toml", text), {}, have_gpu);
    require(to_toml(again) == text, "a config reads back to the same values");
    const ModelShape shape{.layers = 4, .hidden = 64, .vocab = 512, .max_position = 4096, .experts = 12, .top_k = 2};
    for (const int64_t world : {1, 6, 8, 512}) {
      PretrainConfig checked = config;
      if (!accepts([&] { check_model_fits(checked, shape, world); })) continue;
      require(checked.mesh.world() == world, "a mesh has the number of ranks that there are");
    }
  });
}

}  // namespace
}  // namespace marrow

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const marrow::fuzz::ScratchFolder folder;
  static const bool made = [] {
    for (const char* name : {"model.json", "corpus.idx", "corpus.bin"}) folder.write(name, "");
    return true;
  }();
  if (made) marrow::read(folder, marrow::fuzz::text_of(data, size));
  return 0;
}
