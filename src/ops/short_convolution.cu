#include "ops/kernel_tools.cuh"

namespace marrow {
namespace {

using Args = ShortConvolutionArgs;

constexpr int kThreads = 128, kTaps = 4;  // fewer taps have zeros in front

// W channels of consecutive tokens: the weights, and the last rows of the segment, which a thread moves along.
template <typename T, int W>
struct Window {
  const Args& args;
  int64_t channel, segment, begin, end;  // of the current segment
  float weight[kTaps][W], rows[kTaps][W];

  __device__ Window(const Args& args, int64_t channel) : args(args), channel(channel), segment(-1), begin(0), end(0) {
    const T* from = static_cast<const T*>(args.weight);
    for (int j = 0; j < kTaps; ++j) {
      const int64_t tap = j - (kTaps - args.taps);
      for (int i = 0; i < W; ++i) {
        weight[j][i] = tap < 0 ? 0.0f : static_cast<float>(from[(channel + i) * args.taps + tap]);
      }
    }
  }
  // Which row of the halo `row` is, a row before the segment; negative: none.
  __device__ int64_t halo_row(int64_t row) const { return row - begin + args.taps - 1; }
  __device__ void load(int64_t row, float (&to)[W]) const {
    for (float& value : to) value = 0.0f;
    if (row >= begin) {
      load_pack<W>(static_cast<const T*>(args.x) + row * args.channels + channel, to);
    } else if (args.halo != nullptr && halo_row(row) >= 0) {
      const int64_t at = segment * (args.taps - 1) + halo_row(row);
      load_pack<W>(static_cast<const T*>(args.halo) + at * args.channels + channel, to);
    }
  }
  // To the segment of `token`, with the rows before it.
  __device__ void enter(int64_t token) {
    int64_t last = args.segments;
    segment = segment < 0 ? 0 : segment;
    while (last - segment > 1) {
      const int64_t middle = (segment + last) / 2;
      (args.starts[middle] <= token ? segment : last) = middle;
    }
    begin = args.starts[segment];
    end = args.starts[segment + 1];
    for (int j = 1; j < kTaps; ++j) load(token - kTaps + j, rows[j]);
  }
  // The sums of `token`, the next one; its row becomes the last.
  __device__ void next(int64_t token, float (&sums)[W]) {
    for (int i = 0; i < W; ++i) sums[i] = 0.0f;
    for (int j = 0; j + 1 < kTaps; ++j) {
      for (int i = 0; i < W; ++i) rows[j][i] = rows[j + 1][i];
    }
    load_pack<W>(static_cast<const T*>(args.x) + token * args.channels + channel, rows[kTaps - 1]);
    for (int j = 0; j < kTaps; ++j) {
      for (int i = 0; i < W; ++i) sums[i] += weight[j][i] * rows[j][i];
    }
  }
};

__device__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

template <typename T, int W>
__global__ void __launch_bounds__(kThreads) forward(const __grid_constant__ Args args, T* out) {
  const int64_t packs = args.channels / W, item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= packs * args.parts) return;
  Window<T, W> window(args, item % packs * W);
  const int64_t first = item / packs * args.part_tokens, stop = min(first + args.part_tokens, args.tokens);
  for (int64_t t = first; t < stop; ++t) {
    if (t >= window.end || t == first) window.enter(t);
    float sums[W];
    window.next(t, sums);
    for (float& sum : sums) sum *= sigmoid(sum);
    store_pack<W>(out + t * args.channels + window.channel, sums);
  }
}

// A thread owns the gradients of its part's rows and of the halos of the segments that begin there; for the last rows
// it goes on into the next part. partials [parts, C, taps].
template <typename T, int W>
__global__ void __launch_bounds__(kThreads)
    backward(const __grid_constant__ Args args, const T* d_out, T* dx, T* d_halo, float* partials) {
  const int64_t packs = args.channels / W, item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= packs * args.parts) return;
  Window<T, W> window(args, item % packs * W);
  const int64_t first = item / packs * args.part_tokens, stop = min(first + args.part_tokens, args.tokens);
  float d_weight[kTaps][W] = {}, d_rows[kTaps][W] = {};  // of the rows from t − 3 to t
  const auto write = [&](int64_t row, const float(&d)[W]) {
    if (row >= window.begin) {
      if (row >= first && row < stop) store_pack<W>(dx + row * args.channels + window.channel, d);
    } else if (d_halo != nullptr && window.halo_row(row) >= 0 && window.begin >= first && window.begin < stop) {
      const int64_t at = window.segment * (args.taps - 1) + window.halo_row(row);
      store_pack<W>(d_halo + at * args.channels + window.channel, d);
    }
  };
  for (int64_t t = first; first < stop && t < stop + kTaps - 1; ++t) {
    if (t == first || t == window.end) {  // the last segment ends with the tokens
      for (int j = 1; j < kTaps && t > first; ++j) write(t - kTaps + j, d_rows[j]);
      if (t >= stop) break;
      for (auto& row : d_rows) {
        for (float& value : row) value = 0.0f;
      }
      window.enter(t);
    }
    float sums[W], d[W];
    window.next(t, sums);
    load_pack<W>(d_out + t * args.channels + window.channel, d);
    for (int i = 0; i < W; ++i) {
      const float s = sigmoid(sums[i]);
      d[i] *= s * (1.0f + sums[i] * (1.0f - s));
    }
    for (int j = 0; j < kTaps; ++j) {
      for (int i = 0; i < W; ++i) {
        d_rows[j][i] = (j + 1 < kTaps ? d_rows[j + 1][i] : 0.0f) + window.weight[j][i] * d[i];
        if (t < stop) d_weight[j][i] += d[i] * window.rows[j][i];
      }
    }
    write(t - kTaps + 1, d_rows[0]);
  }
  float* to = partials + (item / packs * args.channels + window.channel) * args.taps;
  for (int j = 0; j < kTaps; ++j) {
    const int64_t tap = j - (kTaps - args.taps);
    for (int i = 0; i < W && tap >= 0; ++i) to[i * args.taps + tap] = d_weight[j][i];
  }
}

// Calls launch<T, W>() for packs of W channels.
template <typename Launch>
void launch_channels(const Args& args, bool is_bf16, const Launch& launch, std::initializer_list<const void*> rows) {
  bool packs = args.channels % 4 == 0;
  for (const void* pointer : rows) packs = packs && aligned_to(pointer, 16);
  launch_typed(is_bf16,
               [&]<typename T>() { packs ? launch.template operator()<T, 4>() : launch.template operator()<T, 1>(); });
}

unsigned blocks_of(const Args& args, int width) { return blocks_for(args.channels / width * args.parts, kThreads); }

}  // namespace

void short_convolution_forward_cuda(const ShortConvolutionArgs& args, View out) {
  launch_channels(
      args, out.bf16,
      [&]<typename T, int W>() { forward<T, W><<<blocks_of(args, W), kThreads, 0, current_stream()>>>(args, out); },
      {args.x, args.halo, out.data});
}

void short_convolution_backward_cuda(const ShortConvolutionArgs& args, View d_out, View dx, View d_halo, View partials,
                                     View weight_grad) {
  launch_channels(args, dx.bf16,
                  [&]<typename T, int W>() {
                    backward<T, W>
                        <<<blocks_of(args, W), kThreads, 0, current_stream()>>>(args, d_out, dx, d_halo, partials);
                  },
                  {args.x, args.halo, d_out.data, dx.data, d_halo.data});
  if (!weight_grad.defined()) return;
  const int64_t size = args.channels * args.taps;
  launch_add_column_sums(partials, args.parts, size, size, weight_grad);
}

}  // namespace marrow
