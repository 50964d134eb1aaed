#include "parallel/context_delta_rule.h"

#include "ops/device.h"
#include "ops/gated_delta_rule.h"
#include "ops/op_tools.h"
#include "ops/short_convolution.h"

namespace marrow {
namespace {

// A rank's rows as segments: its chunks of each sequence, cut where a document begins.
struct Segments {
  // Two chunks of each sequence, the earlier first; with one rank, the whole sequence is one chunk.
  struct Chunk {
    int64_t token, document;  // where it and the document of its first row begin, among the tokens of all ranks
    int64_t first, last;      // its segments
  };
  int64_t seq_len, cp, per_sequence, chunk_size;
  std::vector<int32_t> starts;
  std::vector<Chunk> chunks;

  Segments(const AttentionLayout& layout, const Communicator* ring)
      : seq_len(layout.seq_len),
        cp(ring == nullptr ? 1 : ring->size()),
        per_sequence(cp == 1 ? 1 : 2),
        chunk_size(seq_len / (cp * per_sequence)) {
    MARROW_CHECK(seq_len % (cp * per_sequence) == 0, ExitCode::kUsage,
                 Fix("set data.seq_len to a multiple of 2 · mesh.cp"), "recurrent layers: seq_len {} over {} ranks",
                 seq_len, cp);
    for (int64_t i = 0; i < layout.sequences * per_sequence; ++i) {
      const int64_t place = i % per_sequence == 0 ? (ring == nullptr ? 0 : ring->rank()) : 2 * cp - 1 - ring->rank();
      add_chunk(layout, i / per_sequence * seq_len + place * chunk_size);
    }
    starts.push_back(static_cast<int32_t>(std::ssize(chunks) * chunk_size));
  }

  void add_chunk(const AttentionLayout& layout, int64_t token) {
    Chunk chunk{token, token / seq_len * seq_len, std::ssize(starts), 0};
    const int64_t row = std::ssize(chunks) * chunk_size;
    starts.push_back(static_cast<int32_t>(row));
    for (const int32_t document : layout.document_offsets) {
      if (document <= token) chunk.document = std::max<int64_t>(chunk.document, document);
      if (document <= token || document >= token + chunk_size) continue;
      const auto start = static_cast<int32_t>(row + document - token);
      if (start != starts.back()) starts.push_back(start);
    }
    chunk.last = std::ssize(starts) - 1;
    chunks.push_back(chunk);
  }

  int64_t count() const { return std::ssize(starts) - 1; }
  static bool continues(const Chunk& chunk) { return chunk.document < chunk.token; }
  // Where the chunk of a token is among what gather() gives of all ranks' chunks.
  int64_t gathered(int64_t token) const {
    const int64_t place = token % seq_len / chunk_size, half = place < cp ? 0 : 1;
    const int64_t owner = half == 0 ? place : 2 * cp - 1 - place;
    return owner * std::ssize(chunks) + token / seq_len * 2 + half;
  }
};

// own [n, …] of each rank → [cp · n, …], rank after rank. The backward sums the ranks' gradients, in fp32.
Tensor gather(const Tensor& own, Communicator& ring) {
  std::vector<int64_t> bounds, sizes = own.sizes().vec();
  for (int64_t r = 0; r <= ring.size(); ++r) bounds.push_back(r * own.numel());
  const int64_t rows = sizes[0];
  sizes[0] *= ring.size();
  const Tensor whole = at::empty(sizes, own.options());
  whole.narrow(0, ring.rank() * rows, rows).copy_(own.detach());
  ring.all_gather(whole.view({-1}), bounds).wait();
  return differentiable({own}, {whole},
                        [=, &ring, type = own.scalar_type()](const variable_list& d_out) -> variable_list {
                          const Tensor sums = d_out[0].to(at::kFloat, false, /*copy=*/true).contiguous();
                          ring.reduce_scatter(sums.view({-1}), bounds).wait();
                          return {sums.narrow(0, ring.rank() * rows, rows).to(type, false, /*copy=*/true)};
                        })[0];
}

// [segments, K − 1, C]: the rows before each segment that are of its document, zeros in place of others.
Tensor rows_before(const Tensor& x, int64_t rows, const Segments& segments, Communicator& ring) {
  // The last rows of each chunk travel; shorter chunks whole.
  const int64_t tail = std::min(rows, segments.chunk_size), chunks = std::ssize(segments.chunks), width = x.size(1);
  const Tensor tails = x.view({chunks, segments.chunk_size, width}).slice(1, segments.chunk_size - tail);
  const Tensor all = gather(tails.contiguous(), ring).view({-1, width});
  std::vector<int64_t> from(segments.count() * rows, 0);
  std::vector<int32_t> absent(from.size(), 1);
  for (const Segments::Chunk& chunk : segments.chunks) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t token = chunk.token - rows + row, at = chunk.first * rows + row;
      if (token < chunk.document) continue;
      from[at] = segments.gathered(token) * tail + token % segments.chunk_size - (segments.chunk_size - tail);
      absent[at] = 0;
    }
  }
  const Tensor mask = to_device(absent, x.device()).to(at::kBool).unsqueeze(1);
  return all.index_select(0, to_device(from, x.device())).masked_fill(mask, 0).view({segments.count(), rows, width});
}

// The states [chunks, Hv, Dk, Dv] in which a rank's chunks begin: over the chunks of a sequence S ← A·S + B, with A and
// B [chunks, Hv, Dk, …] of each rank's chunks.
Tensor states_before(const Tensor& a, const Tensor& b, const Segments& segments, Communicator& ring) {
  const Tensor all = gather(at::cat({a, b}, -1), ring);
  const int64_t last = 2 * segments.cp - 1, sequences = std::ssize(segments.chunks) / 2;
  std::vector<int64_t> order;  // chunk by chunk, all sequences of each
  for (int64_t place = 0; place < last; ++place) {
    for (int64_t s = 0; s < sequences; ++s) {
      order.push_back(segments.gathered(s * segments.seq_len + place * segments.chunk_size));
    }
  }
  const variable_list steps = all.index_select(0, to_device(order, all.device())).split(sequences);
  variable_list states{at::zeros_like(b.detach().narrow(0, 0, sequences))};
  for (const Tensor& step : steps) {
    const variable_list parts = step.split_with_sizes({a.size(-1), b.size(-1)}, -1);
    states.push_back(at::matmul(parts[0], states.back()) + parts[1]);
  }
  return at::stack({states[ring.rank()], states[last - ring.rank()]}, 1).flatten(0, 1);
}

}  // namespace

Tensor context_short_convolution(const Tensor& x, const Parameter& weight, const AttentionLayout& layout,
                                 Communicator* ring) {
  const Segments segments(layout, ring);
  const int64_t rows = weight.value.size(1) - 1;
  const Tensor starts = to_device(segments.starts, x.device());
  if (segments.cp == 1 || rows == 0) return short_convolution(x, weight, starts, {});
  const Tensor dense = x.contiguous();
  return short_convolution(dense, weight, starts, rows_before(dense, rows, segments, *ring));
}

// The rule is linear in the state: what a chunk gives from a state of zeros, plus what it makes of the state before it,
// which a run with values of zero and the unit matrix as its state says of any state.
Tensor context_gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                                const AttentionLayout& layout, Communicator* ring) {
  const Segments segments(layout, ring);
  const Tensor starts = to_device(segments.starts, q.device());
  const GatedDeltaRule own = gated_delta_rule(q, k, v, g, beta, starts, {});
  if (segments.cp == 1) return own.out;

  const int64_t heads = v.size(1), size = k.size(2), chunks = std::ssize(segments.chunks);
  std::vector<int32_t> continues(segments.count(), 0);
  std::vector<int64_t> last;
  for (const Segments::Chunk& chunk : segments.chunks) {
    continues[chunk.first] = Segments::continues(chunk) ? 1 : 0;
    last.push_back(chunk.last);
  }
  // Zero where a document begins: it takes nothing over, nor does what follows it in the chunk.
  const Tensor units = to_device(continues, q.device()).to(at::kFloat).view({-1, 1, 1, 1}) *
                       at::eye(size, q.options().dtype(at::kFloat)).expand({1, heads, size, size});
  const Tensor no_values = at::zeros({q.size(0), heads, size}, v.options());
  const GatedDeltaRule carried = gated_delta_rule(q, k, no_values, g, beta, starts, units);

  const Tensor ends = to_device(last, q.device());
  const Tensor before =
      states_before(carried.state.index_select(0, ends), own.state.index_select(0, ends), segments, *ring);
  const Tensor reads = carried.out.view({chunks, segments.chunk_size, heads, size}).transpose(1, 2);
  const Tensor more = at::matmul(reads, before.to(reads.scalar_type()));  // [chunks, Hv, rows, Dv]
  return own.out + more.transpose(1, 2).reshape(v.sizes());
}

}  // namespace marrow
