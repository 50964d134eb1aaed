// PREFIX.json (none where it is empty), PREFIX.idx and PREFIX.bin, and reading of what was accepted.
#include <algorithm>

#include "data/indexed_corpus.h"
#include "fuzz/fuzz_target.h"

namespace marrow {
namespace {

using namespace fuzz;  // NOLINT

void read_all(const IndexedCorpus& corpus) {
  require(corpus.document_begin(0) == 0 || corpus.documents() == 0, "the first document begins at 0");
  require(corpus.document_begin(corpus.documents()) == corpus.tokens(), "the last document ends with the tokens");
  for (int64_t d = 0; d < corpus.documents(); ++d) {
    const int64_t begin = corpus.document_begin(d), end = corpus.document_begin(d + 1);
    require(begin <= end && end <= corpus.tokens(), "documents follow each other");
    const int64_t after = corpus.document_after(begin);
    require(after > d || begin == end, "the next document is behind this one");
    std::vector<int32_t> tokens(static_cast<size_t>(end - begin));
    const int64_t vocab_size = corpus.info() ? corpus.info()->vocab_size : 1000;
    accepts([&] {
      corpus.read(begin, tokens, vocab_size);
      for (const int32_t id : tokens) require(id >= 0 && id < vocab_size, "ids are those of the vocabulary");
    });
  }
  std::vector<int32_t> beyond(2);
  require(!accepts([&] { corpus.read(corpus.tokens() - 1, beyond, 1000); }), "nothing is read behind the end");
  accepts([&] { corpus.content_hash(); });
}

}  // namespace
}  // namespace marrow

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const marrow::fuzz::ScratchFolder folder;
  const auto parts = marrow::fuzz::parts_of(marrow::fuzz::text_of(data, size), 3);
  std::filesystem::remove(folder.path() + "/c.json");
  if (!parts[0].empty()) folder.write("c.json", parts[0]);
  folder.write("c.idx", parts[1]);
  folder.write("c.bin", parts[2]);
  marrow::fuzz::accepts([&] { marrow::read_all(marrow::IndexedCorpus(folder.path() + "/c")); });
  return 0;
}
