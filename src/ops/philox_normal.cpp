#include "ops/philox_normal.h"

#include "ops/op_tools.h"

// From here on products and sums are never fused: the values must be the GPU's.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include "ops/philox_normal_math.h"

namespace marrow {
namespace {

uint64_t fnv1a(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

void fill_cpu(float* out, int64_t n, const philox::Key& key, int64_t first, float std) {
  at::parallel_for(first / 4, (first + n + 3) / 4, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      float normals[4];
      philox::normals_of_block(key, static_cast<uint64_t>(block), normals);
      const int64_t last = std::min(block * 4 + 4, first + n);
      for (int64_t element = std::max(block * 4, first); element < last; ++element) {
        out[element - first] = philox::mul(normals[element - block * 4], std);
      }
    }
  });
}

}  // namespace

void philox_normal(at::Tensor out, int64_t seed, std::string_view name, int64_t first_element, double std) {
  MARROW_CHECK(first_element >= 0, ExitCode::kUsage, Fix("fill from an element index that is not negative"),
               "philox_normal: {} {} from element {}", name, c10::str(out.sizes()), first_element);
  if (out.numel() == 0) return;
  check_tensor(name, out, kWorkingDtype, out.sizes());
  const philox::Key key{static_cast<uint64_t>(seed), fnv1a(name)};
  const auto deviation = static_cast<float>(std);
  if (out.is_cuda()) {
    MARROW_CUDA_CALL(philox_normal_cuda(out, key, first_element, deviation));
    return;
  }
  const Tensor out32 = out.to(at::kFloat);
  fill_cpu(floats(out32), out.numel(), key, first_element, deviation);
  if (!out32.is_same(out)) out.copy_(out32);
}

void philox_log_uniform(at::Tensor out, int64_t seed, std::string_view name, int64_t first_element, double high) {
  check_tensor(name, out, kWorkingDtype, {-1});
  const philox::Key key{static_cast<uint64_t>(seed), fnv1a(name)};
  const auto log_high = static_cast<float>(std::log(high)), least = static_cast<float>(std::log(0.01));
  const Tensor values = at::empty(out.sizes(), at::kFloat);
  for (int64_t i = 0; i < out.numel(); ++i) {
    uint32_t words[4];
    philox::words_of_block(key, static_cast<uint64_t>(first_element + i), words);
    floats(values)[i] = std::max(least, philox::add(log_high, philox::log_of_word(words[0])));
  }
  out.copy_(values);
}

}  // namespace marrow
