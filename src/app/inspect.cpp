// marrow inspect: what a corpus, checkpoint, Hugging Face folder or tokenizer holds.
#include <filesystem>

#include "app/subcommands.h"
#include "base/log.h"
#include "base/safetensors.h"
#include "data/indexed_corpus.h"
#include "data/tokenizer.h"
#include "train/checkpoint.h"

namespace marrow {
namespace {

namespace fs = std::filesystem;

// Facts in order, as text lines and as JSON fields.
class Facts {
 public:
  explicit Facts(const std::string& kind) { add("kind", kind); }
  template <typename T>
  Facts& add(const std::string& name, const T& value) {
    text_ += fmt::format("{:<20} {}\n", name, value);
    json_.field(name, value);
    return *this;
  }
  void add_list(const std::string& name, const std::string& lines, const std::string& json) {
    text_ += lines;
    json_.raw(name, json);
  }
  void print(const CommandLine& args) const { args.print(text_, json_); }

 private:
  std::string text_;
  JsonWriter json_;
};

void inspect_corpus(const std::string& prefix, Facts& facts) {
  const IndexedCorpus corpus(prefix);
  facts.add("documents", corpus.documents())
      .add("tokens", corpus.tokens())
      .add("sequences", corpus.sequences())
      .add("dtype_code", static_cast<int64_t>(corpus.dtype_code()))
      .add("content_hash", corpus.content_hash());
  if (!corpus.info()) {
    facts.add("warning", corpus.warning());
    return;
  }
  facts.add("tokenizer", corpus.info()->tokenizer)
      .add("tokenizer_hash", corpus.info()->tokenizer_hash)
      .add("vocab_size", corpus.info()->vocab_size)
      .add("end_of_document", int64_t{corpus.info()->end_of_document.value_or(-1)});
}

void inspect_model(const Json& config, Facts& facts) {
  facts.add("model_type", config.string_or("model_type", "unknown"));
  for (const char* key : {"num_hidden_layers", "hidden_size", "num_experts", "num_local_experts",
                          "n_routed_experts", "num_experts_per_tok", "vocab_size"}) {
    if (config.has(key)) facts.add(key, config.int_or(key, -1));
  }
}

// The weights of a checkpoint or Hugging Face folder: model*.safetensors. Opening a file checks it.
void inspect_weights(const std::string& folder, bool list_tensors, Facts& facts) {
  std::vector<std::string> paths;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("model") && name.ends_with(".safetensors")) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  int64_t tensors = 0, parameters = 0, bytes = 0;
  std::string lines, json;
  for (const std::string& path : paths) {
    const SafetensorsFile file(path);
    for (const StoredTensor& tensor : file.tensors()) {
      ++tensors;
      parameters += tensor.elements();
      bytes += tensor.end - tensor.begin;
      if (!list_tensors) continue;
      lines += fmt::format("  {} {} {}\n", tensor.name, dtype_name(tensor.dtype),
                           shape_text(tensor.shape));
      json += (json.empty() ? "" : ", ") + JsonWriter()
                                               .field("name", tensor.name)
                                               .field("dtype", dtype_name(tensor.dtype))
                                               .field("shape", tensor.shape)
                                               .text();
    }
  }
  facts.add("files", static_cast<int64_t>(paths.size()))
      .add("tensors", tensors)
      .add("parameters", parameters)
      .add("bytes", bytes);
  if (list_tensors) facts.add_list("tensor_list", lines, "[" + json + "]");
}

void inspect_checkpoint(const std::string& path, bool list_tensors, Facts& facts) {
  Logger log;
  const Checkpoint checkpoint = open_checkpoint(path, log);
  const TrainerState& state = checkpoint.state();
  facts.add("folder", checkpoint.folder())
      .add("step", state.step)
      .add("consumed_sequences", state.consumed_sequences)
      .add("skipped_steps", state.skipped_steps)
      .add("seed", state.seed)
      .add("seq_len", state.seq_len)
      .add("optimizer", state.optimizer)
      .add("state_dtype", state.state_dtype)
      .add("tokenizer", state.tokenizer)
      .add("tokenizer_hash", state.tokenizer_hash)
      .add("corpus", state.corpus);
  inspect_model(checkpoint.config(), facts);
  inspect_weights(checkpoint.folder(), list_tensors, facts);
}

void inspect_tokenizer(const std::string& path, Facts& facts) {
  const auto tokenizer = open_tokenizer(path);
  facts.add("name", tokenizer->name())
      .add("vocab_size", tokenizer->vocab_size())
      .add("end_of_document", int64_t{tokenizer->end_of_document().value_or(-1)})
      .add("hash", tokenizer->hash());
}

// "corpus", "checkpoint", "hf_dir" or "tokenizer". `path` loses the ending of a corpus file.
std::string kind_of(std::string& path) {
  for (const char* ending : {".idx", ".bin"}) {
    if (path.ends_with(ending)) path.resize(path.size() - 4);
  }
  if (fs::exists(path + ".idx") || fs::exists(path + ".bin")) return "corpus";
  if (path == "bytes") return "tokenizer";
  MARROW_CHECK(fs::exists(path), ExitCode::kUsage,
               Fix("give a corpus prefix, a checkpoint, a Hugging Face folder or a tokenizer.json"),
               "{} does not exist", path);
  if (!fs::is_directory(path)) return "tokenizer";
  if (is_checkpoint_path(path)) return "checkpoint";
  if (fs::exists(path + "/config.json")) return "hf_dir";
  if (fs::exists(path + "/tokenizer.json")) return "tokenizer";
  MARROW_THROW(ExitCode::kBadInput,
               Fix("give a corpus prefix, a checkpoint, a Hugging Face folder or a tokenizer.json"),
               "{} holds no checkpoint, config.json or tokenizer.json", path);
}

int run_inspect(const CommandLine& args) {
  std::string path = args.positional();
  const std::string kind = kind_of(path);
  const bool list_tensors = args.flag("tensors");
  Facts facts(kind);
  if (kind == "corpus") {
    inspect_corpus(path, facts);
  } else if (kind == "checkpoint") {
    inspect_checkpoint(path, list_tensors, facts);
  } else if (kind == "hf_dir") {
    inspect_model(Json::read_file(path + "/config.json", ExitCode::kUsage), facts);
    inspect_weights(path, list_tensors, facts);
  } else {
    inspect_tokenizer(path, facts);
  }
  facts.print(args);
  return 0;
}

}  // namespace

Subcommand inspect_command() {
  return {.name = "inspect",
          .summary = "what a corpus, checkpoint, Hugging Face folder or tokenizer holds",
          .positionals = {"CORPUS|CHECKPOINT|HF_DIR|TOKENIZER"},
          .options = {{.name = "tensors", .help = "list every tensor with dtype and shape"}},
          .example = "marrow inspect data/corpus\nmarrow inspect runs/quickstart --tensors",
          .run = run_inspect};
}

}  // namespace marrow
