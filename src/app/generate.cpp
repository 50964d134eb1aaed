// marrow generate: continues a text.
#include "app/subcommands.h"
#include "ops/device.h"
#include "train/inference_model.h"
#include "train/text_generation.h"

namespace marrow {
namespace {

int run_generate(const CommandLine& args) {
  set_cpu_threads(args.integer("threads", 0, 1024), 1);
  InferenceModel model(args.positional(), gpu_available() && !args.flag("cpu"), args.logger());
  const std::unique_ptr<Tokenizer> tokenizer = model.open_own_tokenizer();
  std::vector<int32_t> prompt;
  tokenizer->encode(args.text("prompt"), prompt);
  if (prompt.empty() && tokenizer->end_of_document()) prompt = {*tokenizer->end_of_document()};

  GenerationOptions options;
  options.max_tokens = args.integer("max-tokens", 0);
  options.temperature = args.real("temperature", 0.0, 100.0);
  options.seed = args.integer("seed", 0);
  options.stop_token = tokenizer->end_of_document().value_or(-1);
  options.token_limit = tokenizer->vocab_size();
  const std::vector<int32_t> ids = generate_tokens(model.executor(), model.model(), model.device(), prompt, options);
  const std::string text = tokenizer->decode(ids);
  args.print(args.text("prompt") + text,
             JsonWriter().field("text", text, "ids", std::vector<int64_t>(ids.begin(), ids.end())));
  return 0;
}

}  // namespace

Subcommand generate_command() {
  return {.name = "generate",
          .summary = "continue a text",
          .positionals = {"CHECKPOINT|HF_DIR"},
          .options = {{"--prompt TEXT", "text to continue"},
                      {"[--max-tokens N]", "new tokens at most; ends early at the end of a document", "64"},
                      {"[--temperature T]", "0 = always the likeliest token", "0"},
                      {"[--seed N]", "of the draws where T > 0", "0"},
                      {"[--threads N]", "CPU threads; 0 = all cores", "0"},
                      {"[--cpu]", "even where there is a GPU"}},
          .example = "marrow generate runs/quickstart --prompt 'def main(' --max-tokens 100",
          .run = run_generate};
}

}  // namespace marrow
