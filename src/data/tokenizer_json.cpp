#include "data/tokenizer_json.h"

#include <algorithm>
#include <filesystem>
#include <stdexcept>

#include "base/files.h"
#include "base/json.h"
#include "data/tokenizer.h"
#include "data/unicode_text.h"

namespace marrow {
namespace {

const char* const kGpt2Pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// char::is_numeric of the reference, which knows 13 more code points than its regular expressions.
const char* const kDigitPattern = R"([\p{N}\x{11de0}-\x{11de9}\x{16ff4}-\x{16ff6}])";

// The constructs that Oniguruma and PCRE2 read alike. Caseless groups hold letters alone, without the pairs that
// Oniguruma also finds as one character (ß, ligatures); \x80 to \xff are bytes there and characters here.
const char* const kUnderstood = R"re((?x) \A
  (?: (?&escape)
    | \[ \^? (?!\]) (?: (?&escape) | [^]\[\\&] | &(?!&) )+ \]
    | \( (?! [?*] ) | \(\? (?: [:=!>] | <[=!] ) | \)
    | \(\?i: (?! [^)]* (?:ss|ff|fi|fl|st) ) [a-z'|\[\]]+ \)
    | \{ [0-9]+ (?: ,[0-9]* )? \} (?! [?+*{] )
    | [*+?] [?+]?
    | [^]\[\\(){}*+?^]
  )++
  (?(DEFINE) (?<escape> \\ (?:
      [sSdDrntf]
    | [pP]\{ (?: L[ultmo]? | M[nce]? | N[dlo]? | P[cdseifo]? | S[mcko]? | Z[slp]? | C[cfon]? ) \}
    | x \{ [0-9A-Fa-f]{1,6} \} | x [0-7][0-9A-Fa-f]
    | [^a-zA-Z0-9\x80-\xff] ) ) ))re";

Fix unsupported() {
  return Fix(
      "use a byte-level BPE tokenizer without this feature; marrow implements the added_tokens, NFC, Split, Digits, "
      "ByteLevel, Sequence and BPE parts of tokenizer.json");
}

[[noreturn]] void refuse(const Json& value) {
  value.fail(fmt::format("{} is not supported", value.dump().substr(0, 80)), unsupported());
}

// Every key of `object` must be one of `known`: an unknown one may change the tokens.
void expect_keys(const Json& object, const std::vector<std::string_view>& known) {
  for (const auto& [key, value] : object.items()) {
    if (std::ranges::find(known, key) == known.end()) refuse(value);
  }
}

// Each of `keys` may be there only as null, false, 0 or "".
void expect_unused(const Json& object, const std::vector<std::string_view>& keys) {
  for (const std::string_view key : keys) {
    if (!object.has(key)) continue;
    const std::string value = object.at(key).dump();
    if (value != "null" && value != "false" && value != "0.0" && value != "\"\"") refuse(object.at(key));
  }
}

// The parts of a Sequence, under `list_key`, and of those that it holds, else `json` itself; nothing for null.
std::vector<Json> flatten(const Json& json, std::string_view list_key) {
  if (json.is_null()) return {};
  if (json.at("type").as_string() != "Sequence") return {json};
  expect_keys(json, {"type", list_key});
  std::vector<Json> parts;
  for (const Json& child : json.at(list_key).elements()) {
    for (const Json& part : flatten(child, list_key)) parts.push_back(part);
  }
  return parts;
}

// Refuses the parts of `root`'s `key` whose type is not one of `known`; false where there is no part.
bool expect_parts(const Json& root, std::string_view key, std::string_view list_key,
                  const std::vector<std::string_view>& known) {
  if (!root.has(key)) return false;
  const std::vector<Json> parts = flatten(root.at(key), list_key);
  for (const Json& part : parts) {
    if (std::ranges::find(known, part.at("type").as_string()) == known.end()) refuse(part.at("type"));
  }
  return !parts.empty();
}

SplitStage read_split(const Json& json) {
  expect_keys(json, {"type", "pattern", "behavior", "invert"});
  expect_keys(json.at("pattern"), {"Regex"});
  const Json pattern = json.at("pattern").at("Regex"), behavior = json.at("behavior");
  const bool removed = behavior.as_string() == "Removed";  // the delimiters are
  if (!removed && behavior.as_string() != "Isolated") refuse(behavior);
  const bool invert = json.bool_or("invert", false);  // delimiters are what does not match
  try {
    return {split_regex(pattern.as_string()), !removed || invert, !removed || !invert};
  } catch (const std::invalid_argument& problem) {
    pattern.fail(fmt::format("the regular expression {}: {}", pattern.dump(), problem.what()), unsupported());
  }
}

void read_pretokenizer(const Json& json, std::vector<SplitStage>& stages) {
  bool complete = false;  // by ByteLevel, behind which others would see letters in place of bytes
  for (const Json& part : flatten(json, "pretokenizers")) {
    if (complete) refuse(part);
    const std::string type = part.at("type").as_string();
    if (type == "Split") {
      stages.push_back(read_split(part));
    } else if (type == "Digits") {
      expect_keys(part, {"type", "individual_digits"});
      const bool each = part.bool_or("individual_digits", false);
      stages.push_back({Regex(std::string(kDigitPattern) + (each ? "" : "+"))});
    } else if (type == "ByteLevel") {
      expect_keys(part, {"type", "add_prefix_space", "trim_offsets", "use_regex"});
      expect_unused(part, {"add_prefix_space"});
      if (part.bool_or("use_regex", true)) stages.push_back({Regex(kGpt2Pattern)});
      complete = true;
    } else {
      refuse(part.at("type"));
    }
  }
  if (!complete) json.fail("does not end with ByteLevel", unsupported());
}

// GPT-2's code point for each byte: printable Latin-1 characters are themselves, the others, in order, U+0100 and on.
std::array<uint32_t, 256> byte_alphabet() {
  std::array<uint32_t, 256> alphabet{};
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte != 0xad);
    alphabet[byte] = printable ? byte : next++;
  }
  return alphabet;
}

// The bytes that a vocabulary entry spells; nothing where it holds a character of no byte.
std::optional<std::string> spelled_bytes(const std::string& entry) {
  static const auto bytes = [] {
    std::array<int, 0x144> table{};
    table.fill(-1);
    for (int byte = 0; const uint32_t code : byte_alphabet()) table[code] = byte++;
    return table;
  }();
  std::string out;
  for (size_t at = 0; at < entry.size();) {
    const auto [value, size] = decode_utf8(std::string_view(entry).substr(at));
    if (value >= bytes.size() || bytes[value] < 0) return std::nullopt;
    out.push_back(static_cast<char>(bytes[value]));
    at += size;
  }
  return out;
}

void set_text(size_t id, const std::string& text, TokenizerSpec& spec) {
  if (id >= spec.texts.size()) spec.texts.resize(id + 1, kReplacementCharacter);
  spec.texts[id] = text;
}

void read_vocab(const Json& json, bool ignore_merges, TokenizerSpec& spec) {
  const size_t limit = json.size() * 8 + 65536;  // a corrupt id must not decide the memory taken
  spec.vocab.reserve(json.size());
  spec.byte_ids.fill(-1);
  std::vector<bool> taken(limit);
  for (const auto& [entry, value] : json.items()) {
    const auto index = static_cast<size_t>(value.as_int());
    if (index >= limit || taken[index]) {
      value.fail(fmt::format("id {} is taken by another entry, negative, or too large for {} entries", value.as_int(),
                             json.size()),
                 Fix("repair the ids in this file"));
    }
    taken[index] = true;
    const auto id = static_cast<int32_t>(index);
    spec.vocab.emplace(entry, id);
    const auto bytes = spelled_bytes(entry);
    set_text(index, bytes.value_or(entry), spec);
    if (bytes && bytes->size() == 1) spec.byte_ids[static_cast<uint8_t>((*bytes)[0])] = id;
    if (bytes && ignore_merges) spec.words.emplace(*bytes, id);
  }
  const auto missing = std::ranges::find(spec.byte_ids, -1);
  if (missing != spec.byte_ids.end()) {
    json.fail(fmt::format("byte {:#04x} has no entry", missing - spec.byte_ids.begin()),
              Fix("use a byte-level tokenizer, whose vocab has one for each of the 256 bytes"));
  }
}

// Merges are written ["left", "right"] or "left right".
void read_merges(const Json& merges, TokenizerSpec& spec) {
  for (const Json& merge : merges.elements()) {
    std::string left, right;
    if (merge.is_array() && merge.size() == 2) {
      left = merge.at(0).as_string();
      right = merge.at(1).as_string();
    } else {
      const std::string pair = merge.as_string();
      if (pair.starts_with("#version")) continue;
      const size_t space = std::min(pair.find(' '), pair.size() - 1);
      left = pair.substr(0, space);
      right = pair.substr(space + 1);
    }
    const auto id = [&](const std::string& entry) {
      const auto found = spec.vocab.find(entry);
      if (found == spec.vocab.end()) {
        merge.fail(fmt::format("{} is not in model.vocab", json_quote(entry)),
                   Fix("repair this merge: two entries of the vocab that make a third"));
      }
      return found->second;
    };
    spec.merges.push_back({id(left), id(right), id(left + right)});
  }
}

// The reference numbers added tokens itself: those outside of the vocab get the ids behind it, in the file's order,
// whatever the file says. Where the two differ, the file is refused.
void read_added_tokens(const Json& root, TokenizerSpec& spec) {
  auto next_id = static_cast<int32_t>(spec.vocab.size());
  for (const Json& json : root.at("added_tokens").elements()) {
    expect_keys(json, {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    expect_unused(json, {"single_word", "lstrip", "rstrip"});
    AddedToken token{.content = json.at("content").as_string(), .id = 0};
    token.special = json.bool_or("special", false);
    token.normalized = json.bool_or("normalized", !token.special);
    if (token.content.empty()) refuse(json.at("content"));
    const auto [entry, is_new] = spec.vocab.try_emplace(token.content, next_id);
    if (is_new) ++next_id;
    token.id = entry->second;
    if (json.at("id").as_int() != token.id) {
      json.at("id").fail(fmt::format("{} has id {} here, but the reference library gives it {}",
                                     json_quote(token.content), json.at("id").as_int(), token.id),
                         Fix("number the added tokens so that they follow the vocabulary"));
    }
    set_text(static_cast<size_t>(token.id), token.content, spec);
    spec.added_tokens.push_back(std::move(token));
  }
}

}  // namespace

Regex split_regex(const std::string& pattern) {
  static const Regex understood(kUnderstood, Regex::Unit::kBytes);
  RegexScratch scratch;
  const size_t length = understood.find(pattern, 0, scratch) ? scratch.end() : 0;
  if (length < pattern.size()) {
    throw std::invalid_argument(json_quote(pattern.substr(length, 12)) + " is not supported");
  }
  Regex regex(pattern);
  if (regex.matches_empty()) throw std::invalid_argument("it matches the empty string");
  return regex;
}

TokenizerSpec read_tokenizer_json(std::string_view text, const std::string& path) {
  const Json root = Json::parse(text, path);
  expect_keys(root, {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                     "post_processor", "decoder", "model"});
  if (root.string_or("version", "1.0") != "1.0") refuse(root.at("version"));
  expect_unused(root, {"truncation", "padding"});

  TokenizerSpec spec;
  spec.nfc = expect_parts(root, "normalizer", "normalizers", {"NFC"});
  read_pretokenizer(root.at("pre_tokenizer"), spec.stages);
  // ByteLevel changes offsets only. TemplateProcessing adds tokens around a text for inference; a corpus is encoded
  // without them, as add_special_tokens=False does.
  expect_parts(root, "post_processor", "processors", {"ByteLevel", "TemplateProcessing"});
  if (root.at("decoder").string_or("type", "") != "ByteLevel") refuse(root.at("decoder"));
  const Json model = root.at("model");
  expect_keys(model, {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                      "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (model.string_or("type", "BPE") != "BPE") refuse(model.at("type"));
  // unk_token and fuse_unk mean nothing: every byte has an id.
  expect_unused(model, {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"});
  read_vocab(model.at("vocab"), model.bool_or("ignore_merges", false), spec);
  read_merges(model.at("merges"), spec);
  if (root.has("added_tokens")) read_added_tokens(root, spec);
  return spec;
}

std::vector<SideFile> bytes_tokenizer_files() {
  JsonWriter vocab;
  for (int byte = 0; const uint32_t code : byte_alphabet()) vocab.field(encode_utf8(code), byte++);
  const std::string byte_level = R"({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, )"
                                 R"("use_regex": false})";
  JsonWriter end, model, file, config;
  end.field("id", 256, "content", "<|endoftext|>", "single_word", false, "lstrip", false, "rstrip", false, "normalized",
            false, "special", true);
  model.field("type", "BPE").raw("vocab", vocab.text()).raw("merges", "[]");
  file.field("version", "1.0").raw("added_tokens", "[" + end.text() + "]").raw("pre_tokenizer", byte_level);
  file.raw("decoder", byte_level).raw("model", model.text());
  config.field("tokenizer_class", "PreTrainedTokenizerFast", "eos_token", "<|endoftext|>",
               "clean_up_tokenization_spaces", false, "model_max_length", 1'000'000'000);
  return {{"tokenizer.json", file.lines()}, {"tokenizer_config.json", config.lines()}};
}

std::optional<int32_t> read_end_of_document(const TokenizerSpec& spec, const std::string& path) {
  const std::string config_path = (std::filesystem::path(path).parent_path() / "tokenizer_config.json").string();
  if (!std::filesystem::exists(config_path)) return std::nullopt;
  const Json config = Json::read_file(config_path);
  if (!config.has("eos_token") || config.at("eos_token").is_null()) return std::nullopt;
  const Json value = config.at("eos_token");
  const std::string content = (value.is_string() ? value : value.at("content")).as_string();
  const auto found = spec.vocab.find(content);
  if (found == spec.vocab.end()) {
    value.fail(fmt::format("{} is no token of {}", json_quote(content), path),
               Fix("name a token of the vocabulary, or give its id with --eod-id"));
  }
  return found->second;
}

}  // namespace marrow
