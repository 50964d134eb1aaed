#include "data/tokenizer_json.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <unordered_map>

#include "base/files.h"
#include "base/json.h"
#include "data/unicode_text.h"

namespace marrow {
namespace {

const char* const kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// char::is_numeric of the reference, which knows 13 more code points than its regular expressions.
const char* const kDigitPattern = R"([\p{N}\x{11de0}-\x{11de9}\x{16ff4}-\x{16ff6}])";

Fix unsupported() {
  return Fix(
      "use a byte-level BPE tokenizer without this feature; marrow implements the added_tokens, "
      "NFC, Split, Digits, ByteLevel, Sequence and BPE parts of tokenizer.json");
}

[[noreturn]] void refuse(const Json& value) {
  value.fail(fmt::format("{} is not supported", value.dump().substr(0, 80)), unsupported());
}

// Every key of `object` must be one of `known`: an unknown one may change the tokens.
void expect_keys(const Json& object, const std::vector<std::string_view>& known) {
  for (const std::string& key : object.keys()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) refuse(object.at(key));
  }
}

void expect_absent(const Json& object, std::string_view key) {
  if (object.has(key) && !object.at(key).is_null()) refuse(object.at(key));
}

void expect_null_or_empty(const Json& object, std::string_view key) {
  if (!object.string_or(key, "").empty()) refuse(object.at(key));
}

void expect_false(const Json& object, std::string_view key) {
  if (object.bool_or(key, false)) refuse(object.at(key));
}

Json list_at(const Json& object, std::string_view key) {
  const Json list = object.at(key);
  if (!list.is_array()) list.fail("expected an array", Fix("write a list in [ ]"));
  return list;
}

int32_t read_id(const Json& value) {
  const int64_t id = value.as_int();
  if (id < 0 || id > INT32_MAX - 1) {
    value.fail(fmt::format("id {} is outside of [0, {}]", id, INT32_MAX - 1),
               Fix("repair the id in this file"));
  }
  return static_cast<int32_t>(id);
}

bool reads_nfc(const Json& normalizer) {
  if (normalizer.is_null()) return false;
  const std::string type = normalizer.at("type").as_string();
  if (type == "NFC") {
    expect_keys(normalizer, {"type"});
    return true;
  }
  if (type != "Sequence") refuse(normalizer.at("type"));
  expect_keys(normalizer, {"type", "normalizers"});
  const Json parts = list_at(normalizer, "normalizers");
  bool nfc = false;
  for (size_t i = 0; i < parts.size(); ++i) nfc = reads_nfc(parts.at(i)) || nfc;
  return nfc;
}

SplitRegex compile(const std::string& pattern, const Json& value) {
  std::string problem;
  SplitRegex regex(pattern, problem);
  if (!problem.empty()) {
    value.fail(fmt::format("the regular expression {}: {}", json_quote(pattern), problem),
               unsupported());
  }
  return regex;
}

std::string escape_pattern(const std::string& text) {
  std::string pattern;
  for (const char c : text) {
    if (std::string_view("\\.+*?()|[]{}^$#&-~/ ").find(c) != std::string_view::npos)
      pattern += '\\';
    pattern += c;
  }
  return pattern;
}

SplitBehavior read_behavior(const Json& value) {
  const std::string name = value.as_string();
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  refuse(value);
}

SplitStage read_split(const Json& json) {
  expect_keys(json, {"type", "pattern", "behavior", "invert"});
  const Json pattern = json.at("pattern");
  expect_keys(pattern, {"Regex", "String"});
  const bool literal = pattern.has("String");
  const Json text = pattern.at(literal ? "String" : "Regex");
  const std::string source = text.as_string();
  return {compile(literal ? escape_pattern(source) : source, text),
          read_behavior(json.at("behavior")), json.bool_or("invert", false)};
}

// Appends the stages of `json`. `complete` is set by ByteLevel, behind which nothing may stand, for
// it would see letters in place of bytes.
void read_pretokenizer(const Json& json, PreTokenizer& out, bool& complete) {
  if (complete) refuse(json);
  const std::string type = json.at("type").as_string();
  if (type == "Sequence") {
    expect_keys(json, {"type", "pretokenizers"});
    const Json parts = list_at(json, "pretokenizers");
    for (size_t i = 0; i < parts.size(); ++i) read_pretokenizer(parts.at(i), out, complete);
  } else if (type == "Split") {
    out.stages.push_back(read_split(json));
  } else if (type == "Digits") {
    expect_keys(json, {"type", "individual_digits"});
    out.stages.push_back({compile(kDigitPattern, json),
                          json.bool_or("individual_digits", false) ? SplitBehavior::kIsolated
                                                                   : SplitBehavior::kContiguous,
                          false});
  } else if (type == "ByteLevel") {
    expect_keys(json, {"type", "add_prefix_space", "trim_offsets", "use_regex"});
    complete = true;
    if (json.at("add_prefix_space").as_bool()) out.prefix_space_stage = out.stages.size();
    if (json.bool_or("use_regex", true)) {
      out.stages.push_back({compile(kGpt2Pattern, json), SplitBehavior::kIsolated, false});
    }
  } else {
    refuse(json.at("type"));
  }
}

void read_model(const Json& model, TokenizerSpec& spec) {
  expect_keys(model,
              {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
               "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (model.has("type") && model.at("type").as_string() != "BPE") refuse(model.at("type"));
  if (model.double_or("dropout", 0.0) != 0.0) refuse(model.at("dropout"));
  expect_null_or_empty(model, "continuing_subword_prefix");
  expect_null_or_empty(model, "end_of_word_suffix");
  expect_false(model, "byte_fallback");  // unk_token and fuse_unk: every byte has an id, see BPE
  spec.ignore_merges = model.bool_or("ignore_merges", false);

  const Json vocab = model.at("vocab");
  spec.vocab.reserve(vocab.size());
  vocab.for_each([&spec](const std::string& entry, const Json& id) {
    spec.vocab.emplace_back(entry, read_id(id));
  });

  const Json merges = list_at(model, "merges");
  spec.merges.reserve(merges.size());
  for (size_t i = 0; i < merges.size(); ++i) {
    const Json merge = merges.at(i);
    if (merge.is_array() && merge.size() == 2) {
      spec.merges.emplace_back(merge.at(0).as_string(), merge.at(1).as_string());
      continue;
    }
    const std::string pair = merge.as_string();
    if (pair.starts_with("#version")) continue;
    const size_t space = pair.find(' ');
    if (space == std::string::npos || pair.find(' ', space + 1) != std::string::npos) {
      merge.fail(fmt::format("{} is not two entries with a space between", json_quote(pair)),
                 Fix("repair this merge"));
    }
    spec.merges.emplace_back(pair.substr(0, space), pair.substr(space + 1));
  }
}

// The reference numbers added tokens itself: those outside of the vocab get the ids behind it, in
// the file's order, whatever the file says. Where the two differ, the file is refused.
void read_added_tokens(const Json& tokens, TokenizerSpec& spec) {
  std::unordered_map<std::string, int32_t> ids(spec.vocab.begin(), spec.vocab.end());
  auto next_id = static_cast<int32_t>(spec.vocab.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Json json = tokens.at(i);
    expect_keys(json,
                {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    expect_false(json, "single_word");
    AddedToken token;
    token.content = json.at("content").as_string();
    token.id = read_id(json.at("id"));
    token.lstrip = json.bool_or("lstrip", false);
    token.rstrip = json.bool_or("rstrip", false);
    token.special = json.bool_or("special", false);
    token.normalized = json.bool_or("normalized", !token.special);
    if (token.content.empty()) refuse(json.at("content"));
    const auto [entry, is_new] = ids.try_emplace(token.content, next_id);
    if (is_new) ++next_id;
    if (entry->second != token.id) {
      json.at("id").fail(fmt::format("{} has id {} here, but the reference library gives it {}",
                                     json_quote(token.content), token.id, entry->second),
                         Fix("number the added tokens so that they follow the vocabulary"));
    }
    spec.added_tokens.push_back(std::move(token));
  }
}

// ByteLevel changes offsets only. TemplateProcessing adds tokens around a text for inference; a
// corpus is encoded without them, as add_special_tokens=False does.
void check_post_processor(const Json& json) {
  if (json.is_null()) return;
  const std::string type = json.at("type").as_string();
  if (type == "Sequence") {
    const Json parts = list_at(json, "processors");
    for (size_t i = 0; i < parts.size(); ++i) check_post_processor(parts.at(i));
  } else if (type != "ByteLevel" && type != "TemplateProcessing") {
    refuse(json.at("type"));
  }
}

}  // namespace

TokenizerSpec read_tokenizer_json(std::string_view text, const std::string& path) {
  const Json root = Json::parse(text, path);
  expect_keys(root, {"version", "truncation", "padding", "added_tokens", "normalizer",
                     "pre_tokenizer", "post_processor", "decoder", "model"});
  if (root.string_or("version", "1.0") != "1.0") refuse(root.at("version"));
  expect_absent(root, "truncation");
  expect_absent(root, "padding");

  TokenizerSpec spec;
  if (root.has("normalizer")) spec.nfc = reads_nfc(root.at("normalizer"));
  bool complete = false;
  const Json pretokenizer = root.at("pre_tokenizer");
  if (pretokenizer.is_null()) refuse(pretokenizer);
  read_pretokenizer(pretokenizer, spec.pretokenizer, complete);
  if (!complete) {
    pretokenizer.fail("does not end with ByteLevel", unsupported());
  }
  if (root.has("post_processor")) check_post_processor(root.at("post_processor"));
  const Json decoder = root.at("decoder");
  if (decoder.string_or("type", "") != "ByteLevel") refuse(decoder);
  read_model(root.at("model"), spec);
  if (root.has("added_tokens")) read_added_tokens(list_at(root, "added_tokens"), spec);
  return spec;
}

std::optional<int32_t> read_end_of_document(const TokenizerSpec& spec, const std::string& path) {
  const std::string config_path =
      (std::filesystem::path(path).parent_path() / "tokenizer_config.json").string();
  if (!std::filesystem::exists(config_path)) return std::nullopt;
  const Json config = Json::read_file(config_path);
  if (!config.has("eos_token") || config.at("eos_token").is_null()) return std::nullopt;
  const Json value = config.at("eos_token");
  const std::string content =
      value.is_string() ? value.as_string() : value.at("content").as_string();
  for (const AddedToken& token : spec.added_tokens) {
    if (token.content == content) return token.id;
  }
  for (const auto& [entry, id] : spec.vocab) {
    if (entry == content) return id;
  }
  value.fail(fmt::format("{} is no token of {}", json_quote(content), path),
             Fix("name a token of the vocabulary, or give its id with --eod-id"));
}

std::optional<std::string> spelled_bytes(std::string_view entry) {
  // Printable Latin-1 characters stand for themselves; the other bytes, in order, for U+0100 on.
  static const auto bytes = [] {
    std::array<int, 0x144> table{};
    table.fill(-1);
    size_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte != 0xad);
      table[printable ? static_cast<size_t>(byte) : next++] = byte;
    }
    return table;
  }();
  std::string out;
  for (size_t at = 0; at < entry.size();) {
    const CodePoint point = decode_utf8(entry.data() + at);
    if (point.value >= bytes.size() || bytes[point.value] < 0) return std::nullopt;
    out.push_back(static_cast<char>(bytes[point.value]));
    at += point.size;
  }
  return out;
}

}  // namespace marrow
