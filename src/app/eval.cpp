// marrow eval: loss and perplexity of a model over a corpus.
#include "app/command_line.h"
#include "ops/device.h"
#include "train/evaluation.h"
#include "train/inference_model.h"

namespace marrow {
namespace {

constexpr int64_t kDefaultSeqLen = 1024;

int run_eval(const CommandLine& args) {
  set_cpu_threads(args.integer("threads", 0, 1024), 1);
  InferenceModel model(args.positional(), gpu_available() && !args.has("cpu"), args.logger());
  const int64_t longest = model.model->shape().max_position;
  const int64_t trained = model.trained_seq_len > 0 ? model.trained_seq_len : kDefaultSeqLen;
  MARROW_CHECK(!args.has("seq-len") || args.integer("seq-len", 1) <= longest, ExitCode::kUsage,
               Fix("give --seq-len {} or less; without it, it is {}", longest, std::min(trained, longest)),
               "--seq-len {} exceeds the model's max_position_embeddings = {}", args.text("seq-len"), longest);
  BatchLoader::Options options;
  options.sources = {{args.text("data"), 1.0}};
  options.seq_len = args.has("seq-len") ? args.integer("seq-len", 1) : std::min(trained, longest);
  options.vocab_size = model.model->shape().vocab;
  options.mask_documents = args.has("mask-documents");
  options.shuffle = false;
  const BatchLoader loader(options);
  for (const std::string& warning : loader.warnings()) args.logger().warn(warning);
  const std::string trained_with = model.tokenizer_hash, given = loader.tokenizer_hash();
  MARROW_CHECK(trained_with.empty() || given.empty() || trained_with == given, ExitCode::kBadInput,
               Fix("tokenize the text with the tokenizer that the model was trained with"),
               "{} was tokenized with {} (hash {}), the model {} trained with {}", args.text("data"),
               IndexedCorpus(args.text("data")).info()->tokenizer, given, args.positional(), trained_with);
  const EvaluationResult result = evaluate_corpus(*model.executor, loader, model.device, loader.samples_per_epoch(),
                                                  args.integer("micro-batch", 1), args.logger());
  const double perplexity = std::exp(result.loss);
  args.print(fmt::format("loss {:.6f}, perplexity {:.4f}, {} tokens in windows of {}", result.loss, perplexity,
                         result.targets, options.seq_len),
             JsonWriter().field("loss", result.loss, "perplexity", perplexity, "tokens", result.targets, "seq_len",
                                options.seq_len));
  return 0;
}

}  // namespace

Subcommand eval_command() {
  return {.name = "eval",
          .summary = "loss and perplexity of a model over a corpus",
          .positionals = {"CHECKPOINT|HF_DIR"},
          .options = {{"--data PREFIX", "tokenized corpus; all its windows are read"},
                      {"[--seq-len N]", "tokens a window (default: the run's, else 1024)"},
                      {"[--micro-batch N]", "windows at once", "4"},
                      {"[--mask-documents]", "attention and positions restart at each document"},
                      {"[--threads N]", "CPU threads; 0 = all cores", "0"},
                      {"[--cpu]", "even where there is a GPU"}},
          .example = "marrow eval runs/quickstart --data data/heldout --json",
          .run = run_eval};
}

}  // namespace marrow
