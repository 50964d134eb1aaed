// Text to a tokenized corpus, in parallel: the engine of `marrow tokenize`.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/log.h"
#include "data/document_source.h"
#include "data/tokenizer.h"

namespace marrow {

struct TokenizeOptions {
  std::vector<std::string> inputs;
  std::string output;          // prefix
  std::string field = "text";  // of JSON lines
  bool skip_faults = false;    // inputs that give no document are counted, else the first ends the run
  bool overwrite = false;
  bool append_end_of_document = true;
  int64_t workers = 0;  // threads; 0 = one per core
  double progress_seconds = 1;
  DocumentSource::Limits limits = {};
  std::function<bool()> stop = {};  // asked after each block; true ends the run, without output
};

struct TokenizeResult {
  int64_t documents = 0, tokens = 0;
  int64_t bytes = 0;  // of the documents' text
  int64_t skipped = 0;
  std::map<std::string_view, int64_t> faults;  // skipped, by kind (of input_fault)
  double seconds = 0;
};

// The corpus is the same, byte for byte, for any number of workers. Memory is bounded at any input size: 64 MiB of text
// in flight and its tokens, or about nine times the largest document. Nothing appears under the output's names unless
// all went well. Faults are told with file:line: the first as Error (kBadInput), under skip_faults ten as warnings.
TokenizeResult tokenize_corpus(const TokenizeOptions& options, const Tokenizer& tokenizer, Logger& logger);

}  // namespace marrow
