// marrow inspect: what a corpus, checkpoint, Hugging Face folder or tokenizer holds.
#include <filesystem>

#include "app/command_line.h"
#include "data/indexed_corpus.h"
#include "data/tokenizer.h"
#include "train/checkpoint.h"

namespace marrow {
namespace {

namespace fs = std::filesystem;

void inspect_corpus(const std::string& prefix, JsonWriter& facts) {
  const IndexedCorpus corpus(prefix);
  facts.field("documents", corpus.documents(), "tokens", corpus.tokens(), "content_hash", corpus.content_hash());
  if (!corpus.info()) {
    facts.field("warning", corpus.warning());
    return;
  }
  const CorpusInfo& info = *corpus.info();
  facts.field("tokenizer", info.tokenizer, "tokenizer_hash", info.tokenizer_hash, "vocab_size", info.vocab_size,
              "end_of_document", info.end_of_document.value_or(-1));
}

// The weights of a checkpoint or Hugging Face folder: model*.safetensors. Opening a file checks it.
void inspect_weights(const std::string& folder, bool list_tensors, JsonWriter& facts) {
  const std::vector<std::string> paths = tensor_paths(folder, "model");
  const TensorFiles files(paths);
  int64_t parameters = 0, bytes = 0;
  JsonWriter list;
  for (const std::string& name : files.names()) {
    const StoredTensor& tensor = *files.find(name);
    parameters += tensor.elements();
    bytes += tensor.end - tensor.begin;
    list.field(name, fmt::format("{} {}", dtype_name(tensor.dtype), shape_text(tensor.shape)));
  }
  facts.field("files", paths.size(), "tensors", files.names().size(), "parameters", parameters, "bytes", bytes);
  if (list_tensors) facts.raw("tensor_list", list.text());
}

void inspect_tokenizer(const std::string& path, JsonWriter& facts) {
  const auto tokenizer = open_tokenizer(path);
  facts.field("name", tokenizer->name(), "vocab_size", tokenizer->vocab_size(), "end_of_document",
              tokenizer->end_of_document().value_or(-1), "hash", tokenizer->hash());
}

// "corpus", "checkpoint", "hf_dir" or "tokenizer". `path` loses the ending of a corpus file.
std::string kind_of(std::string& path) {
  if (path.ends_with(".idx") || path.ends_with(".bin")) path.resize(path.size() - 4);
  if (fs::exists(path + ".idx") || fs::exists(path + ".bin")) return "corpus";
  if (path == "bytes") return "tokenizer";
  constexpr std::string_view kWanted = "a corpus prefix, a checkpoint, a Hugging Face folder or a tokenizer.json";
  if (is_checkpoint_path(path, kWanted)) return "checkpoint";
  if (fs::exists(path + "/config.json")) return "hf_dir";
  if (!fs::is_directory(path) || fs::exists(path + "/tokenizer.json")) return "tokenizer";
  MARROW_THROW(ExitCode::kUsage, Fix("give {}", kWanted), "{} holds no checkpoint, config.json or tokenizer.json",
               path);
}

int run_inspect(const CommandLine& args) {
  std::string path = args.positional();
  const std::string kind = kind_of(path);
  JsonWriter facts;
  facts.field("kind", kind);
  if (kind == "corpus") {
    inspect_corpus(path, facts);
  } else if (kind == "tokenizer") {
    inspect_tokenizer(path, facts);
  } else {
    if (kind == "checkpoint") {
      const Checkpoint checkpoint = open_checkpoint(path, args.logger());
      path = checkpoint.folder();
      facts.field("folder", path).raw("state", to_json(checkpoint.state()));
    }
    facts.raw("config", Json::read_file(path + "/config.json", ExitCode::kUsage).dump());
    inspect_weights(path, args.has("tensors"), facts);
  }
  args.print(facts.lines(), facts);
  return 0;
}

}  // namespace

Subcommand inspect_command() {
  return {.name = "inspect",
          .summary = "what a corpus, checkpoint, Hugging Face folder or tokenizer holds",
          .positionals = {"CORPUS|CHECKPOINT|HF_DIR|TOKENIZER"},
          .options = {{"[--tensors]", "list every tensor with dtype and shape"}},
          .example = "marrow inspect data/corpus\nmarrow inspect runs/quickstart --tensors",
          .run = run_inspect};
}

}  // namespace marrow
