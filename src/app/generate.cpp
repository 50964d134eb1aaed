// marrow generate: continues a text, token by token, with a cache of keys and values.
#include <random>

#include "app/command_line.h"
#include "data/tokenizer.h"
#include "models/key_value_cache.h"
#include "ops/device.h"
#include "train/inference_model.h"

namespace marrow {
namespace {

MicroBatch cached_batch(std::span<const int32_t> tokens, KeyValueCache& cache, at::Device device) {
  const std::vector<int32_t> unused(tokens.size(), 0);
  MicroBatch batch = make_micro_batch(tokens, unused, unused, 1, static_cast<int64_t>(tokens.size()), false, device);
  batch.context.positions.add_(cache.length());
  batch.context.cache = &cache;
  return batch;
}

// logits [V] fp32; `temperature` 0: the likeliest token (ties: the lowest id).
int32_t choose_token(const at::Tensor& logits, double temperature, std::mt19937_64& random) {
  if (temperature <= 0.0) return static_cast<int32_t>(logits.argmax().item<int64_t>());
  const at::Tensor probabilities = at::softmax(logits.to(at::kDouble) / temperature, 0).cpu();
  const double* p = probabilities.data_ptr<double>();
  return std::discrete_distribution<int32_t>(p, p + probabilities.numel())(random);
}

int run_generate(const CommandLine& args) {
  set_cpu_threads(args.integer("threads", 0, 1024), 1);
  InferenceModel from(args.positional(), gpu_available() && !args.has("cpu"), args.logger());
  MARROW_CHECK(!tokenizer_hash(from.folder).empty(), ExitCode::kBadInput,
               Fix("copy tokenizer.json and tokenizer_config.json into the folder"), "{} holds no tokenizer",
               from.folder);
  const std::unique_ptr<Tokenizer> tokenizer = open_tokenizer(from.folder);
  const std::optional<int32_t> stop = tokenizer->end_of_document();
  std::vector<int32_t> fresh;  // not yet in the cache: at first the prompt
  tokenizer->encode(args.text("prompt"), fresh);
  if (fresh.empty() && stop) fresh = {*stop};

  const ModelShape& shape = from.model->shape();
  const int64_t prompt_size = std::ssize(fresh), room = shape.max_position - prompt_size;
  MARROW_CHECK(prompt_size > 0, ExitCode::kUsage, Fix("give a prompt of at least one token"),
               "the prompt has no tokens");
  MARROW_CHECK(room > 0, ExitCode::kUsage, Fix("shorten the prompt"),
               "the prompt's {} tokens fill the model's {} positions", prompt_size, shape.max_position);
  const int64_t wanted = std::min(args.integer("max-tokens", 0), room);
  const int64_t choices = std::min<int64_t>(tokenizer->vocab_size(), shape.vocab);  // the rest is padding
  const double temperature = args.real("temperature", 0.0, 100.0);
  std::mt19937_64 random(static_cast<uint64_t>(args.integer("seed", 0)));
  KeyValueCache cache(shape.layers, prompt_size + wanted);
  std::vector<int32_t> ids;
  while (std::ssize(ids) < wanted) {
    const at::Tensor hidden = from.executor->hidden_states(cached_batch(fresh, cache, from.device));
    cache.advance(std::ssize(fresh));
    const at::Tensor logits = from.executor->logits(hidden.narrow(0, hidden.size(0) - 1, 1)).select(0, 0);
    const int32_t token = choose_token(logits.narrow(0, 0, choices), temperature, random);
    if (token == stop) break;
    ids.push_back(token);
    fresh = {token};
  }
  const std::string text = tokenizer->decode(ids);
  args.print(args.text("prompt") + text, JsonWriter().field("text", text, "ids", ids));
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
