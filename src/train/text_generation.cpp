#include "train/text_generation.h"

#include <random>

#include "models/key_value_cache.h"

namespace marrow {
namespace {

MicroBatch cached_batch(std::span<const int32_t> tokens, KeyValueCache& cache, at::Device device) {
  const std::vector<int32_t> unused(tokens.size(), 0);
  MicroBatch batch = make_micro_batch(tokens, unused, unused, 1, static_cast<int64_t>(tokens.size()), false, device);
  batch.context.positions.add_(cache.length());
  batch.context.cache = &cache;
  return batch;
}

// logits [V] fp32.
int32_t choose_token(at::Tensor logits, const GenerationOptions& options, std::mt19937_64& random) {
  if (options.token_limit > 0 && options.token_limit < logits.size(0)) {
    logits = logits.narrow(0, 0, options.token_limit);
  }
  if (options.temperature <= 0.0) return static_cast<int32_t>(logits.argmax().item<int64_t>());
  const at::Tensor probabilities = at::softmax(logits.to(at::kDouble) / options.temperature, 0).cpu();
  const double* p = probabilities.data_ptr<double>();
  std::discrete_distribution<int32_t> pick(p, p + probabilities.numel());
  return pick(random);
}

}  // namespace

std::vector<int32_t> generate_tokens(Executor& executor, const MoeModel& model, at::Device device,
                                     std::vector<int32_t> prompt, const GenerationOptions& options) {
  MARROW_CHECK(!prompt.empty(), ExitCode::kUsage, Fix("give a prompt of at least one token"),
               "the prompt has no tokens");
  const int64_t prompt_size = static_cast<int64_t>(prompt.size());
  const int64_t room = model.shape().max_position - prompt_size;
  MARROW_CHECK(room > 0, ExitCode::kUsage, Fix("shorten the prompt"),
               "the prompt's {} tokens fill the model's {} positions", prompt_size, model.shape().max_position);
  const int64_t wanted = std::min(options.max_tokens, room);
  KeyValueCache cache(model.shape().layers, prompt_size + wanted);
  std::mt19937_64 random(static_cast<uint64_t>(options.seed));
  std::vector<int32_t> generated, fresh = std::move(prompt);
  while (static_cast<int64_t>(generated.size()) < wanted) {
    const at::Tensor hidden = executor.hidden_states(cached_batch(fresh, cache, device));
    cache.advance(static_cast<int64_t>(fresh.size()));
    const at::Tensor last = hidden.narrow(0, hidden.size(0) - 1, 1);
    const int32_t token = choose_token(executor.logits(last).select(0, 0), options, random);
    if (token == options.stop_token) break;
    generated.push_back(token);
    fresh = {token};
  }
  return generated;
}

}  // namespace marrow
