// marrow tokenize: text files to a corpus.
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "app/command_line.h"
#include "base/stop_signal.h"
#include "data/tokenize_corpus.h"

namespace marrow {
namespace {

// Else --overwrite could replace an input, and the next run over a folder would read this one's output as text.
void check_output_is_no_input(const TokenizeOptions& options) {
  std::error_code missing;
  const auto folder = std::filesystem::weakly_canonical(std::filesystem::absolute(options.output)).parent_path();
  for (const std::string& input : options.inputs) {
    const auto path = std::filesystem::weakly_canonical(std::filesystem::absolute(input));
    bool inside = std::filesystem::is_directory(path, missing) &&
                  std::mismatch(path.begin(), path.end(), folder.begin(), folder.end()).first == path.end();
    for (const char* suffix : {".bin", ".idx", ".json"}) {
      inside = inside || std::filesystem::equivalent(path, options.output + suffix, missing);
    }
    MARROW_CHECK(!inside, ExitCode::kUsage, Fix("give --output a path outside of every --input"),
                 "the corpus {} would lie in or over the input {}", options.output, input);
  }
}

int run_tokenize(const CommandLine& args) {
  StopSignal stop;
  TokenizerOptions tokenizer_options{.special_tokens = args.has("special-tokens"), .end_of_document = std::nullopt};
  if (args.has("eod-id")) {
    tokenizer_options.end_of_document = static_cast<int32_t>(args.integer("eod-id", 0, INT32_MAX));
  }
  const TokenizeOptions options{.inputs = args.list("input"),
                                .output = args.text("output"),
                                .field = args.text("field"),
                                .skip_faults = args.text("on-error") == "skip",
                                .overwrite = args.has("overwrite"),
                                .append_end_of_document = !args.has("no-eod"),
                                .workers = args.integer("workers", 0, 4096),
                                .progress_seconds = isatty(STDERR_FILENO) == 1 ? 0.5 : 10.0,
                                .limits = {},
                                .stop = [&] { return stop.requested(); }};
  check_output_is_no_input(options);
  const auto tokenizer = open_tokenizer(args.text("tokenizer"), tokenizer_options);
  const TokenizeResult result = tokenize_corpus(options, *tokenizer, args.logger());
  const double megabytes = static_cast<double>(result.bytes) / 1e6;
  args.print(fmt::format("{}: {} documents, {} tokens from {:.1f} MB in {:.1f} s ({:.1f} MB/s), {} skipped",
                         options.output, result.documents, result.tokens, megabytes, result.seconds,
                         megabytes / result.seconds, result.skipped),
             JsonWriter().field("documents", result.documents, "tokens", result.tokens, "bytes", result.bytes,
                                "skipped", result.skipped, "seconds", result.seconds));
  return 0;
}

}  // namespace

Subcommand tokenize_command() {
  return {
      .name = "tokenize",
      .summary = "text files to a tokenized corpus",
      .options =
          {{"--tokenizer bytes|PATH", "built in, or a tokenizer.json (or its folder)"},
           {"--input PATH...",
            "files and folders: .jsonl holds a document a line, any other file is one document; also .gz and .zst"},
           {"--output PREFIX", "writes PREFIX.bin, PREFIX.idx (Megatron's format) and PREFIX.json"},
           {"[--field NAME]", "where a JSON line holds its text", "text"},
           {"[--on-error skip|stop]", "skip and count inputs that give no document, or stop at the first", "stop"},
           {"[--workers N]", "threads; 0 is one per core. The output does not depend on it", "0"},
           {"[--eod-id ID]",
            "the end-of-document token, where eos_token in the tokenizer_config.json beside the tokenizer.json does "
            "not tell it"},
           {"[--no-eod]", "append no end-of-document token"},
           {"[--special-tokens]", "special tokens in the text become their ids"},
           {"[--overwrite]", "replace an existing output"}},
      .example = "marrow tokenize --tokenizer bytes --input docs README.md --output data/corpus",
      .notes =
          R"(Inputs that give no document: invalid UTF-8 (also half a surrogate pair escaped in JSON); an empty document; a
line that is not JSON; a line without the field, or where it is no string; a document over 512 MiB; a truncated
or corrupt .gz or .zst (the lines before the damage count). Each is told with file and line. Pipes, sockets and
devices are refused. A folder's files are read in the order of their paths; names that begin with a dot, and
what is no plain file, are passed over. Text is not changed: CR LF, NUL and a byte order mark stay, but a mark
before the first JSON line and blank lines between JSON lines are ignored.
)",
      .run = run_tokenize,
  };
}

}  // namespace marrow
