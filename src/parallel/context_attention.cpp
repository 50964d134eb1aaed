#include "parallel/context_attention.h"

#include "ops/attention_kernels.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

// Where a rank's rows lie. Its local order is the global one, so a row sees a range of any rank's rows.
struct Zigzag {
  int64_t seq_len, chunk, cp;

  Zigzag(int64_t seq_len, int64_t cp) : seq_len(seq_len), chunk(seq_len / (2 * cp)), cp(cp) {}
  // Start within the sequence of the rank's first or second chunk.
  int64_t chunk_start(int64_t rank, int64_t half) const { return chunk * (half == 0 ? rank : 2 * cp - 1 - rank); }
  // The rank's rows before global token `token`.
  int64_t rows_before(int64_t token, int64_t rank) const {
    int64_t rows = token / seq_len * 2 * chunk;
    for (const int64_t half : {0, 1}) rows += std::clamp<int64_t>(token % seq_len - chunk_start(rank, half), 0, chunk);
    return rows;
  }
};

// Where c's rows attend among themselves: chunks, cut by documents. Offsets of its rows, none twice.
std::vector<int32_t> own_pieces(const AttentionLayout& layout, const Zigzag& zigzag, int64_t c) {
  std::vector<int32_t> pieces;
  for (int64_t i = 0; i <= 2 * layout.sequences; ++i) pieces.push_back(static_cast<int32_t>(i * zigzag.chunk));
  for (const int32_t offset : layout.document_offsets) {
    pieces.push_back(static_cast<int32_t>(zigzag.rows_before(offset, c)));
  }
  std::sort(pieces.begin(), pieces.end());
  pieces.erase(std::unique(pieces.begin(), pieces.end()), pieces.end());
  return pieces;
}

// What the chunk of queries from global token `query` sees of the earlier chunk of keys from `key`.
// Only the document that both are in counts; all its keys are in the past.
std::optional<RingBlock> band(const AttentionLayout& layout, int64_t chunk, int64_t query, int64_t key) {
  const int64_t window = layout.window;
  const std::vector<int64_t> documents = segments_of(layout);
  const auto end = std::upper_bound(documents.begin(), documents.end(), query);
  const int64_t k_end = key + chunk;
  const int64_t k_begin = std::max({key, *(end - 1), window > 0 ? query - window + 1 : 0});
  if (k_begin >= k_end) return {};
  const int64_t q_end = std::min({query + chunk, *end, window > 0 ? k_end + window - 1 : *end});
  RingBlock block;
  block.queries = q_end - query;
  block.k_first = k_begin - key;
  block.keys = k_end - k_begin;
  block.left = window > 0 ? window - 1 - (q_end - k_end) : -1;
  return block;
}

struct RingState {
  AttentionLayout layout;
  double scale = 1.0;
  bool deterministic = false;
  Communicator* ring = nullptr;
  Parameter sinks;

  // The owner of what arrives in step `step`.
  int64_t peer(int64_t step) const { return (ring->rank() - step + ring->size()) % ring->size(); }
  PendingTransfer pass_on(const Tensor& sent, const Tensor& received) const {
    return ring->exchange(sent, (ring->rank() + 1) % ring->size(), received, peer(1));
  }
  RowAttention rows(int64_t step) const { return ring_rows(layout, ring->size(), ring->rank(), peer(step), scale); }
  std::vector<RingBlock> blocks(int64_t step) const {
    return ring_blocks(layout, ring->size(), ring->rank(), peer(step));
  }
  // A block's rows of x [T / cp, …] as [B, S, …], a view.
  Tensor part(const Tensor& x, const RingBlock& block, int64_t first, int64_t rows) const {
    if (!block.pieces.empty()) return x.unsqueeze(0);
    return x.unflatten(0, {layout.sequences, -1}).narrow(0, block.sequence, block.sequences).narrow(1, first, rows);
  }
  Tensor queries(const Tensor& x, const RingBlock& block) const { return part(x, block, block.q_first, block.queries); }
  Tensor keys(const Tensor& x, const RingBlock& block) const { return part(x, block, block.k_first, block.keys); }

  GpuAttention kernel(const RingBlock& block, const Tensor& q, const Tensor& v) const {
    GpuAttention gpu;
    gpu.scale = scale;
    const bool masked = !layout.document_offsets.empty() || layout.window > 0;
    // cuDNN is not for single queries.
    gpu.flash = needs_flash(q, v, masked || layout.seq_len == 2 * ring->size(), deterministic);
    gpu.causal = block.causal;
    gpu.backward = true;  // also without gradients: the merge needs the log-sum-exp
    gpu.deterministic = deterministic;
    gpu.left = block.left;
    if (!block.pieces.empty()) gpu.set_pieces(block.pieces, q.device());
    return gpu;
  }
};

bool on_gpu_kernels(const Tensor& q) { return q.is_cuda() && q.scalar_type() != at::kFloat; }

// Keys and values (or their gradients) in one buffer, to travel as one message.
struct KeyValueBuffer {
  Tensor whole, k, v;

  KeyValueBuffer(const Tensor& like_k, const Tensor& like_v, at::ScalarType dtype)
      : whole(at::empty({like_k.numel() + like_v.numel()}, like_k.options().dtype(dtype))),
        k(whole.narrow(0, 0, like_k.numel()).view(like_k.sizes())),
        v(whole.narrow(0, like_k.numel(), like_v.numel()).view(like_v.sizes())) {}
};

// Calls compute(step, keys and values of peer(step)) for each step; the next ones are on their way meanwhile.
template <typename Compute>
void go_round(const RingState& state, const Tensor& k, const Tensor& v, const Compute& compute) {
  KeyValueBuffer held(k, v, k.scalar_type());
  held.k.copy_(k);
  held.v.copy_(v);
  for (int64_t step = 0; step < state.ring->size(); ++step) {
    PendingTransfer arriving;
    std::optional<KeyValueBuffer> next;
    if (step + 1 < state.ring->size()) {
      next.emplace(k, v, k.scalar_type());
      arriving = state.pass_on(held.whole, next->whole);
    }
    compute(step, held);
    arriving.wait();
    if (next) held = *next;
  }
}

// Adds attention over other keys: out [.., H, Dv] and lse [.., H] become those over all. The first
// addition finds lse = −∞; every row sees itself in it, so lse is finite from then on.
void merge(const Tensor& out, const Tensor& lse, const Tensor& more_out, const Tensor& more_lse) {
  // Flash says +∞ of a row that sees none of a block's keys.
  const Tensor more = more_lse.masked_fill(more_lse.eq(INFINITY), -INFINITY);
  const Tensor share = more.sub(lse).sigmoid_();
  out.lerp_(more_out.to(at::kFloat), share.unsqueeze(-1));
  lse.copy_(at::logaddexp(lse, more));
}

// {q, k, v, out, log-sum-exp, and what a GPU backward wants of a forward, any one's}.
variable_list ring_forward(const RingState& state, const Tensor& q, const Tensor& k, const Tensor& v) {
  const int64_t tokens = q.size(0), heads = q.size(1);
  const Tensor out = at::zeros({tokens, heads, v.size(2)}, q.options().dtype(at::kFloat));
  const Tensor lse = at::full({tokens, heads}, -INFINITY, out.options());
  variable_list kernel_state;
  go_round(state, k, v, [&](int64_t step, const KeyValueBuffer& held) {
    if (on_gpu_kernels(q)) {
      for (const RingBlock& block : state.blocks(step)) {
        const variable_list results = attention_gpu_forward(state.kernel(block, q, v), state.queries(q, block),
                                                            state.keys(held.k, block), state.keys(held.v, block));
        merge(state.queries(out, block), state.queries(lse, block), results[0], results[1].transpose(1, 2));
        kernel_state = {results[2], results[3]};
      }
      return;
    }
    const RowAttention rows = state.rows(step);
    if (rows.first_key == rows.end_key) return;
    const auto [more, more_lse] = attention_rows_forward(rows, q.to(at::kFloat), held.k, held.v);
    merge(out, lse, more, more_lse.transpose(0, 1).flatten(1));
  });
  if (state.sinks.value.defined()) merge_sinks(state.sinks.value, out, lse);
  variable_list kept{q, k, v, out.to(q.scalar_type()), lse};
  kept.insert(kept.end(), kernel_state.begin(), kernel_state.end());
  return kept;
}

// The flash backward of one step. With out and log-sum-exp of all keys, each step's part is exact.
void add_gradients(const RingState& state, int64_t step, const variable_list& saved, const Tensor& d_out,
                   const KeyValueBuffer& held, const Tensor& dq, const KeyValueBuffer& grads) {
  const Tensor &q = saved[0], &out = saved[3], &lse = saved[4];
  if (!on_gpu_kernels(q)) {
    const RowAttention rows = state.rows(step);
    if (rows.first_key == rows.end_key) return;
    const Tensor by_head = lse.unflatten(1, {held.k.size(1), -1}).transpose(0, 1).contiguous();
    const auto [more_dq, dk, dv] = attention_rows_backward(rows, q.to(at::kFloat), held.k, held.v, out, by_head, d_out);
    dq.add_(more_dq);
    grads.k.add_(dk);
    grads.v.add_(dv);
    return;
  }
  for (const RingBlock& block : state.blocks(step)) {
    // out and d_out dense: cuDNN wants their strides equal.
    const variable_list inputs{state.queries(q, block),
                               state.keys(held.k, block),
                               state.keys(held.v, block),
                               state.queries(out, block).contiguous(),
                               state.queries(lse, block).transpose(1, 2).contiguous(),
                               saved[5],
                               saved[6]};
    const auto [more_dq, dk, dv] =
        attention_gpu_backward(state.kernel(block, q, held.v), inputs, state.queries(d_out, block).contiguous());
    state.queries(dq, block).add_(more_dq);
    state.keys(grads.k, block).add_(dk);
    state.keys(grads.v, block).add_(dv);
  }
}

// Keys and values go round again, and a step behind them the gradients that the ranks add to them.
variable_list ring_backward(const RingState& state, const variable_list& saved, const Tensor& d_out) {
  const Tensor &q = saved[0], &k = saved[1], &v = saved[2];
  if (state.sinks.grad.defined()) add_sink_gradient(state.sinks.grad, state.sinks.value, saved[3], saved[4], d_out);
  const Tensor dq = at::zeros(q.sizes(), q.options().dtype(at::kFloat));
  KeyValueBuffer arriving(k, v, at::kFloat);
  PendingTransfer transfer;
  go_round(state, k, v, [&](int64_t step, const KeyValueBuffer& held) {
    KeyValueBuffer grads(k, v, at::kFloat);
    grads.whole.zero_();
    add_gradients(state, step, saved, d_out, held, dq, grads);
    transfer.wait();
    if (step > 0) grads.whole.add_(arriving.whole);
    arriving = KeyValueBuffer(k, v, at::kFloat);
    transfer = state.pass_on(grads.whole, arriving.whole);
  });
  transfer.wait();
  return {dq.to(q.scalar_type()), arriving.k.to(k.scalar_type()), arriving.v.to(v.scalar_type())};
}

}  // namespace

std::vector<int64_t> zigzag_positions(int64_t seq_len, int64_t cp, int64_t c) {
  MARROW_CHECK(cp > 0 && (cp == 1 || seq_len % (2 * cp) == 0) && c >= 0 && c < cp, ExitCode::kUsage,
               Fix("set data.seq_len to a multiple of 2 · mesh.cp"), "context rank {} of {}: sequences of {} tokens", c,
               cp, seq_len);
  std::vector<int64_t> positions;
  if (cp == 1) {  // whole sequences, of any length
    for (int64_t i = 0; i < seq_len; ++i) positions.push_back(i);
    return positions;
  }
  const Zigzag zigzag(seq_len, cp);
  for (const int64_t half : {0, 1}) {
    for (int64_t i = 0; i < zigzag.chunk; ++i) positions.push_back(zigzag.chunk_start(c, half) + i);
  }
  return positions;
}

RowAttention ring_rows(const AttentionLayout& layout, int64_t cp, int64_t c, int64_t peer, double scale) {
  const Zigzag zigzag(layout.seq_len, cp);
  const std::vector<int64_t> documents = segments_of(layout), positions = zigzag_positions(layout.seq_len, cp, c);
  RowAttention rows;
  rows.scale = scale;
  for (const int64_t offset : documents) rows.segments.push_back(zigzag.rows_before(offset, c));
  auto end = documents.begin();  // of the document that the token is in
  for (int64_t s = 0; s < layout.sequences; ++s) {
    for (const int64_t position : positions) {
      const int64_t token = s * layout.seq_len + position;
      while (*end <= token) ++end;
      const int64_t first = std::max(*(end - 1), layout.window > 0 ? token - layout.window + 1 : 0);
      rows.first_key.push_back(zigzag.rows_before(first, peer));
      rows.end_key.push_back(zigzag.rows_before(token + 1, peer));
    }
  }
  return rows;
}

std::vector<RingBlock> ring_blocks(const AttentionLayout& layout, int64_t cp, int64_t c, int64_t peer) {
  const Zigzag zigzag(layout.seq_len, cp);
  const int64_t all = layout.sequences, chunk = zigzag.chunk;
  if (layout.document_offsets.empty() && layout.window == 0) {
    if (peer == c) return {{0, all, 0, 2 * chunk, 0, 2 * chunk, true}};
    if (peer < c) return {{0, all, 0, 2 * chunk, 0, chunk}};
    return {{0, all, chunk, chunk, 0, 2 * chunk}};
  }
  std::vector<RingBlock> blocks;
  if (peer == c) {
    blocks.push_back({0, all, 0, 2 * chunk, 0, 2 * chunk, true, layout.window - 1, own_pieces(layout, zigzag, c)});
  }
  for (int64_t s = 0; s < all; ++s) {
    for (int64_t pair = 0; pair < 4; ++pair) {
      const int64_t q_half = pair / 2, k_half = pair % 2;
      const int64_t query = s * layout.seq_len + zigzag.chunk_start(c, q_half);
      const int64_t key = s * layout.seq_len + zigzag.chunk_start(peer, k_half);
      if (key >= query) continue;
      std::optional<RingBlock> block = band(layout, chunk, query, key);
      if (!block) continue;
      block->sequence = s;
      block->sequences = 1;
      block->q_first = q_half * chunk;
      block->k_first += k_half * chunk;
      // ATen's flash kernels are wrong where a window meets more queries than keys: as many at a time.
      const int64_t queries = block->queries, rows = block->left < 0 ? queries : std::min(queries, block->keys);
      for (int64_t first = 0; first < queries; first += rows) {
        RingBlock& part = blocks.emplace_back(*block);
        part.q_first += first;
        part.queries = std::min(rows, queries - first);
        if (part.left >= 0) part.left += queries - first - part.queries;
      }
    }
  }
  return blocks;
}

Tensor context_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionLayout& layout, double scale,
                         bool deterministic, Communicator* ring, const Parameter& sinks) {
  if (ring == nullptr || ring->size() == 1 || q.numel() == 0) {
    return attention(q, k, v, layout, scale, deterministic, sinks);
  }
  check_attention(q, k, v, layout, ring->size());
  MARROW_CHECK(layout.seq_len % (2 * ring->size()) == 0, ExitCode::kUsage,
               Fix("set data.seq_len to a multiple of 2 · mesh.cp"), "context attention: seq_len {} over {} ranks",
               layout.seq_len, ring->size());
  if (sinks.value.defined()) check_tensor(sinks.name, sinks.value, q.scalar_type(), {q.size(1)}, q.device());
  const RingState state{layout, scale, deterministic, ring, sinks};
  const Tensor dense = q.stride(-1) == 1 ? q.detach() : q.detach().contiguous();
  const variable_list saved = ring_forward(state, dense, k.detach(), v.detach());
  return differentiable({q, k, v}, {saved[3]}, [=](const variable_list& d_out) {
    return ring_backward(state, saved, d_out[0].contiguous());
  })[0];
}

}  // namespace marrow
