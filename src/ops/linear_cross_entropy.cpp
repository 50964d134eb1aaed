#include "ops/linear_cross_entropy.h"

#include <numeric>

#include "ops/cpu_math.h"
#include "ops/linear.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

// Elements that exist at a time. On a GPU 1.3 GB in bf16, 4,416 rows at V = 151,936: each chunk of rows adds to the
// weight's whole gradient, so that small ones cost time.
constexpr int64_t kGpuLogits = int64_t{5} << 27;
constexpr int64_t kCpuLogits = int64_t{1} << 22;
constexpr int64_t kCpuRows = 128;  // of a task: its logits stay in the cache

// -log p[target]; turns the row into scale · (p - onehot(target)) if with_gradient.
float cross_entropy_row(float* row, int64_t vocabulary, int64_t target, float scale, bool with_gradient) {
  const float top = max_of_row(row, vocabulary), target_logit = row[target];
  double sum = 0.0;  // of short fp32 sums: one long fp32 sum is off by 1e-4 at large vocabularies
  for (int64_t v = 0; v < vocabulary; v += 512) {
    sum += exp_row(row + v, std::min<int64_t>(512, vocabulary - v), top);
  }
  if (with_gradient) {
    const auto factor = static_cast<float>(scale / sum);
    for (int64_t v = 0; v < vocabulary; ++v) row[v] *= factor;
    row[target] -= scale;
  }
  return top + static_cast<float>(std::log(sum)) - target_logit;
}

LinearCrossEntropy run_cpu(const Tensor& x, const Parameter& weight, const Tensor& targets, double gradient_scale,
                           bool with_gradient) {
  const int64_t tokens = x.size(0), hidden = x.size(1), vocabulary = weight.value.size(0);
  const Tensor xf = x.to(at::kFloat), wf = weight.value.detach().to(at::kFloat);
  const float *xs = floats(xf), *w = floats(wf);
  const int32_t* target = ints(targets);
  const int32_t* bad = std::find_if(target, target + tokens, [&](int32_t t) { return t < -1 || t >= vocabulary; });
  MARROW_CHECK(bad == target + tokens, ExitCode::kBadInput,
               Fix("tokenize the corpus with the model's tokenizer, or raise vocab_size"),
               "target {} of token {} is outside the vocabulary of {}", *bad, bad - target, vocabulary);
  LinearCrossEntropy result{at::zeros({1}, xf.options()), {}};
  if (with_gradient) result.d_x = at::empty(xf.sizes(), xf.options());
  float *dx = floats(result.d_x), *dw = with_gradient ? floats(weight.grad) : nullptr;
  const float scale = static_cast<float>(gradient_scale);
  const int64_t chunk = cross_entropy_rows(tokens, vocabulary, true);
  const Tensor buffer = at::empty({chunk, vocabulary}, xf.options());
  float* logits = floats(buffer);
  std::vector<float> losses(tokens);

  const auto run_rows = [&](int64_t first, int64_t begin, int64_t end) {  // rows of the chunk
    float* rows = logits + begin * vocabulary;
    const int64_t count = end - begin;
    sgemm(false, true, count, vocabulary, hidden, xs + (first + begin) * hidden, hidden, w, hidden, 0.0f, rows,
          vocabulary);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t t = first + begin + r;
      if (target[t] >= 0) {
        losses[t] = cross_entropy_row(rows + r * vocabulary, vocabulary, target[t], scale, with_gradient);
      } else {
        std::fill_n(rows + r * vocabulary, vocabulary, 0.0f);
      }
    }
    if (!with_gradient) return;
    sgemm(false, false, count, hidden, vocabulary, rows, vocabulary, w, hidden, 0.0f, dx + (first + begin) * hidden,
          hidden);
  };
  for (int64_t first = 0; first < tokens; first += chunk) {
    const int64_t count = std::min(chunk, tokens - first);
    at::parallel_for(0, count, kCpuRows / 2, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r += kCpuRows) {
        run_rows(first, r, std::min(r + kCpuRows, end));
      }
    });
    if (!with_gradient) continue;
    at::parallel_for(0, vocabulary, 64, [&](int64_t begin, int64_t end) {
      sgemm(true, false, end - begin, hidden, count, logits + begin, vocabulary, xs + first * hidden, hidden, 1.0f,
            dw + begin * hidden, hidden);
    });
  }
  *floats(result.loss_sum) = static_cast<float>(std::accumulate(losses.begin(), losses.end(), 0.0));
  if (with_gradient) result.d_x = result.d_x.to(x.scalar_type());
  return result;
}

LinearCrossEntropy run_gpu(const Tensor& x, const Parameter& weight, const Tensor& targets, double gradient_scale,
                           bool with_gradient) {
  const int64_t tokens = x.size(0), vocabulary = weight.value.size(0);
  const Tensor w = weight.value.detach();
  LinearCrossEntropy result;
  if (with_gradient) result.d_x = at::empty(x.sizes(), x.options());
  const Tensor losses = at::empty({tokens}, x.options().dtype(at::kFloat));
  const int64_t chunk = cross_entropy_rows(tokens, vocabulary, false);
  const Tensor buffer = at::empty({chunk, vocabulary}, x.options());
  for (int64_t first = 0; first < tokens; first += chunk) {
    const int64_t count = std::min(chunk, tokens - first);
    const Tensor rows = x.detach().narrow(0, first, count);
    Tensor logits = buffer.narrow(0, 0, count);
    at::mm_out(logits, rows, w.t());
    MARROW_CUDA_CALL(cross_entropy_cuda(logits, targets.narrow(0, first, count), losses.narrow(0, first, count),
                                        static_cast<float>(gradient_scale), with_gradient));
    if (!with_gradient) continue;
    Tensor dx = result.d_x.narrow(0, first, count);
    at::mm_out(dx, logits, w);
    accumulate_weight_grad(weight.grad, logits, rows);
  }
  result.loss_sum = losses.sum({0}, /*keepdim=*/true, at::kDouble).to(at::kFloat);
  return result;
}

}  // namespace

int64_t cross_entropy_rows(int64_t tokens, int64_t vocabulary, bool on_cpu) {
  const int64_t most = std::max(kCpuRows / 2, (on_cpu ? kCpuLogits : kGpuLogits) / vocabulary);
  const int64_t chunks = std::max<int64_t>(1, (tokens + most - 1) / most);
  return on_cpu ? std::min(tokens, most) : (tokens + chunks - 1) / chunks;  // even chunks
}

LinearCrossEntropy linear_cross_entropy(const Tensor& x, const Parameter& weight, const Tensor& targets,
                                        double gradient_scale, bool with_gradient) {
  const at::NoGradGuard no_grad;
  check_tensor(weight.name + ": x", x, kWorkingDtype, {-1, -1});
  check_tensor(weight.name, weight.value, x.scalar_type(), {-1, x.size(1)});
  check_tensor(weight.name + ": targets", targets, at::kInt, {x.size(0)}, x.device());
  MARROW_CHECK(!with_gradient || weight.grad.defined(), ExitCode::kUsage,
               Fix("give the head's Parameter a gradient buffer, or pass with_gradient = false"),
               "{} has no gradient buffer", weight.name);
  return (x.is_cuda() ? run_gpu : run_cpu)(x, weight, targets, gradient_scale, with_gradient);
}

}  // namespace marrow
