// marrow tokenize: text files to a corpus.
#include <unistd.h>

#include "app/subcommands.h"
#include "base/log.h"
#include "base/stop_signal.h"
#include "data/tokenize_corpus.h"

namespace marrow {
namespace {

int run_tokenize(const CommandLine& args) {
  StopSignal stop;
  TokenizerOptions tokenizer_options{.special_tokens = args.flag("special-tokens"), .end_of_document = std::nullopt};
  if (args.has("eod-id")) {
    tokenizer_options.end_of_document = static_cast<int32_t>(args.integer("eod-id", 0, INT32_MAX));
  }
  const TokenizeOptions options{.inputs = args.list("input"),
                                .output = args.text("output"),
                                .field = args.text("field"),
                                .skip_faults = args.text("on-error") == "skip",
                                .overwrite = args.flag("overwrite"),
                                .append_end_of_document = !args.flag("no-eod"),
                                .workers = args.integer("workers", 0, 4096),
                                .progress_seconds = isatty(STDERR_FILENO) == 1 ? 0.5 : 10.0,
                                .limits = {},
                                .stop = [&] { return stop.requested(); }};
  const auto tokenizer = open_tokenizer(args.text("tokenizer"), tokenizer_options);
  Logger logger;
  logger.set_quiet(args.json());
  const TokenizeResult result = tokenize_corpus(options, *tokenizer, logger);
  const double megabytes = static_cast<double>(result.bytes) / 1e6;
  args.print(fmt::format("{}: {} documents, {} tokens from {:.1f} MB in {:.1f} s ({:.1f} MB/s), {} "
                         "skipped",
                         options.output, result.documents, result.tokens, megabytes, result.seconds,
                         megabytes / result.seconds, result.skipped),
             JsonWriter()
                 .field("documents", result.documents)
                 .field("tokens", result.tokens)
                 .field("bytes", result.bytes)
                 .field("skipped", result.skipped)
                 .field("seconds", result.seconds));
  return 0;
}

}  // namespace

Subcommand tokenize_command() {
  return {
      .name = "tokenize",
      .summary = "text files to a tokenized corpus",
      .positionals = {},
      .options = {{.name = "tokenizer",
                   .takes = Takes::kOne,
                   .value = "bytes|PATH",
                   .help = "built in, or a tokenizer.json (or its folder)",
                   .required = true},
                  {.name = "input",
                   .takes = Takes::kMany,
                   .value = "PATH",
                   .help = "files and folders: .jsonl holds a document a line, any other file is one "
                           "document; also .gz and .zst",
                   .required = true},
                  {.name = "output",
                   .takes = Takes::kOne,
                   .value = "PREFIX",
                   .help = "writes PREFIX.bin, PREFIX.idx (Megatron's format) and PREFIX.json",
                   .required = true},
                  {.name = "field",
                   .takes = Takes::kOne,
                   .value = "NAME",
                   .fallback = "text",
                   .help = "where a JSON line holds its text"},
                  {.name = "on-error",
                   .takes = Takes::kOne,
                   .value = "skip|stop",
                   .fallback = "stop",
                   .help = "skip and count inputs that give no document, or stop at the first",
                   .choices = {"skip", "stop"}},
                  {.name = "workers",
                   .takes = Takes::kOne,
                   .value = "N",
                   .fallback = "0",
                   .help = "threads; 0 is one per core. The output does not depend on it"},
                  {.name = "eod-id",
                   .takes = Takes::kOne,
                   .value = "ID",
                   .help = "the end-of-document token, where eos_token in the tokenizer_config.json "
                           "beside the tokenizer.json does not tell it"},
                  {.name = "no-eod", .help = "append no end-of-document token"},
                  {.name = "special-tokens", .help = "special tokens in the text become their ids"},
                  {.name = "overwrite", .help = "replace an existing output"}},
      .example = "marrow tokenize --tokenizer bytes --input docs README.md --output data/corpus",
      .notes =
          "Inputs that give no document: invalid UTF-8 (also half a surrogate pair escaped in "
          "JSON); an\nempty document; a line that is not JSON; a line without the field, or where "
          "it "
          "is no string; a\ndocument over 512 MiB; a truncated or corrupt .gz or .zst (the lines "
          "before the damage count).\nEach is told with file and line. A folder's files are read "
          "in "
          "the order of their paths; names\nthat begin with a dot are passed over. Text is not "
          "changed: CR LF, NUL and a byte order mark\nstay, but a mark before the first JSON line "
          "and "
          "blank lines between JSON lines are ignored.\n",
      .run = run_tokenize,
  };
}

}  // namespace marrow
