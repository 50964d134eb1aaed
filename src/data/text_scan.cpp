#include "data/text_scan.h"

#include <fmt/format.h>
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <optional>

namespace marrow {
namespace {

constexpr int kMaxDepth = 500;

// Bytes of the valid character at `at`, or 0. `at` < `end`.
size_t character_length(const unsigned char* at, const unsigned char* end) {
  const unsigned char lead = *at;
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || end - at < static_cast<ptrdiff_t>(length)) return 0;
  // The second byte's range excludes overlong forms, surrogates and what lies past U+10FFFF.
  const unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (at[1] < low || at[1] > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if ((at[i] & 0xC0) != 0x80) return 0;
  }
  return length;
}

// The first quote, backslash or control character in [at, end), or `end`.
const char* find_special(const char* at, const char* end) {
  const __m256i quote = _mm256_set1_epi8('"');
  const __m256i backslash = _mm256_set1_epi8('\\');
  const __m256i control = _mm256_set1_epi8(0x1F);
  for (; end - at >= 32; at += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    const __m256i hits = _mm256_or_si256(
        _mm256_or_si256(_mm256_cmpeq_epi8(bytes, quote), _mm256_cmpeq_epi8(bytes, backslash)),
        _mm256_cmpeq_epi8(_mm256_min_epu8(bytes, control), bytes));
    const auto mask = static_cast<uint32_t>(_mm256_movemask_epi8(hits));
    if (mask != 0) return at + __builtin_ctz(mask);
  }
  while (at < end && *at != '"' && *at != '\\' && static_cast<unsigned char>(*at) >= 0x20) ++at;
  return at;
}

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

uint32_t hex4(const char* at) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = value * 16 + static_cast<uint32_t>(hex_value(at[i]));
  return value;
}

void append_utf8(uint32_t code, std::string& out) {
  const auto put = [&](uint32_t byte) { out += static_cast<char>(byte); };
  if (code < 0x80) return put(code);
  if (code < 0x800) {
    put(0xC0 | code >> 6);
  } else {
    if (code < 0x10000) {
      put(0xE0 | code >> 12);
    } else {
      put(0xF0 | code >> 18);
      put(0x80 | (code >> 12 & 0x3F));
    }
    put(0x80 | (code >> 6 & 0x3F));
  }
  put(0x80 | (code & 0x3F));
}

// A checked string as it stands between its quotes.
struct RawString {
  std::string_view text;
  bool escaped = false;
};

// Decodes the escapes of a checked string; false at half a surrogate pair.
bool unescape(std::string_view raw, std::string& out) {
  static constexpr std::string_view kNames = "\"\\/bfnrt", kBytes = "\"\\/\b\f\n\r\t";
  out.clear();
  out.reserve(raw.size());
  for (size_t at = 0; at < raw.size();) {
    const size_t next = std::min(raw.find('\\', at), raw.size());
    out.append(raw, at, next - at);
    if (next == raw.size()) break;
    at = next + 2;
    if (raw[next + 1] != 'u') {
      out += kBytes[kNames.find(raw[next + 1])];
      continue;
    }
    uint32_t code = hex4(raw.data() + at);
    at += 4;
    if (code >= 0xDC00 && code <= 0xDFFF) return false;
    if (code >= 0xD800 && code <= 0xDBFF) {
      if (raw.substr(at, 2) != "\\u") return false;
      const uint32_t low = hex4(raw.data() + at + 2);
      if (low < 0xDC00 || low > 0xDFFF) return false;
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      at += 6;
    }
    append_utf8(code, out);
  }
  return true;
}

// Recursive descent over one line. A false return leaves what is wrong in error_, at at_.
class Scanner {
 public:
  explicit Scanner(std::string_view line)
      : begin_(line.data()), at_(begin_), end_(at_ + line.size()) {}

  // The whole line; the last string of top-level key `field` lands in `found`.
  bool document(std::string_view field) {
    skip_space();
    field_ = field;
    if (!value(0)) return false;
    skip_space();
    return at_ == end_ || fail("text after the value");
  }
  std::string error() const { return fmt::format("{} at byte {}", error_, at_ - begin_); }

  int times_found = 0;
  std::optional<RawString> found;

 private:
  bool fail(const char* what) {
    error_ = what;
    return false;
  }
  void skip_space() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\n' || *at_ == '\r')) ++at_;
  }
  bool take(char c) {
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }

  bool value(int depth) {
    if (at_ == end_) return fail("the line ends inside a value");
    if (depth > kMaxDepth) return fail("nesting is too deep");
    RawString ignored;
    switch (*at_) {
      case '{':
        return object(depth);
      case '[':
        return array(depth);
      case '"':
        return string(ignored);
      case 't':
        return word("true");
      case 'f':
        return word("false");
      case 'n':
        return word("null");
      default:
        return number();
    }
  }

  bool object(int depth) {
    ++at_;
    skip_space();
    if (take('}')) return true;
    do {
      skip_space();
      RawString key;
      if (at_ == end_ || *at_ != '"') return fail("expected a key");
      if (!string(key)) return false;
      skip_space();
      if (!take(':')) return fail("expected ':'");
      skip_space();
      if (!(depth == 0 && is_field(key) ? field_value() : value(depth + 1))) return false;
      skip_space();
    } while (take(','));
    return take('}') || fail("expected ',' or '}'");
  }

  bool is_field(const RawString& key) {
    if (!key.escaped) return key.text == field_;
    return unescape(key.text, key_scratch_) && key_scratch_ == field_;
  }

  bool field_value() {
    ++times_found;
    if (at_ == end_ || *at_ != '"') return value(1);
    return string(found.emplace());
  }

  bool array(int depth) {
    ++at_;
    skip_space();
    if (take(']')) return true;
    do {
      skip_space();
      if (!value(depth + 1)) return false;
      skip_space();
    } while (take(','));
    return take(']') || fail("expected ',' or ']'");
  }

  bool string(RawString& out) {
    const char* const start = ++at_;
    while (true) {
      at_ = find_special(at_, end_);
      if (at_ == end_) return fail("the line ends inside a string");
      if (*at_ == '"') break;
      if (*at_ != '\\') return fail("a control character in a string");
      out.escaped = true;
      if (!escape()) return false;
    }
    out.text = {start, static_cast<size_t>(at_++ - start)};
    return true;
  }

  bool escape() {
    if (end_ - at_ < 2) return fail("the line ends inside a string");
    const char kind = at_[1];
    if (kind != 'u') {
      if (std::strchr("\"\\/bfnrt", kind) == nullptr || kind == '\0') return fail("unknown escape");
      at_ += 2;
      return true;
    }
    if (end_ - at_ < 6) return fail("the line ends inside a string");
    for (int i = 2; i < 6; ++i) {
      if (hex_value(at_[i]) < 0) return fail("\\u without four hexadecimal digits");
    }
    at_ += 6;
    return true;
  }

  bool word(std::string_view expected) {
    if (std::string_view(at_, static_cast<size_t>(end_ - at_)).substr(0, expected.size()) !=
        expected) {
      return fail("unknown word");
    }
    at_ += expected.size();
    return true;
  }

  bool digits() {
    const char* const start = at_;
    while (at_ < end_ && *at_ >= '0' && *at_ <= '9') ++at_;
    return at_ > start || fail("expected a value");
  }

  bool number() {
    take('-');
    if (!take('0') && !digits()) return false;
    if (take('.') && !digits()) return false;
    if (at_ == end_ || (*at_ | 0x20) != 'e') return true;
    ++at_;
    if (!take('+')) take('-');
    return digits();
  }

  const char* begin_;
  const char* at_;
  const char* end_;
  const char* error_ = "";
  std::string_view field_;
  std::string key_scratch_;
};

}  // namespace

size_t valid_utf8_length(std::string_view text) {
  const auto* const begin = reinterpret_cast<const unsigned char*>(text.data());
  const auto* const end = begin + text.size();
  const auto* at = begin;
  while (at < end) {
    if (*at < 0x80 && end - at >= 32) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
      const auto mask = static_cast<uint32_t>(_mm256_movemask_epi8(bytes));
      at += mask == 0 ? 32 : __builtin_ctz(mask);
      continue;
    }
    const size_t length = character_length(at, end);
    if (length == 0) break;
    at += length;
  }
  return static_cast<size_t>(at - begin);
}

JsonField find_json_string(std::string_view line, std::string_view field, std::string& scratch) {
  using Status = JsonField::Status;
  Scanner scanner(line);
  if (!scanner.document(field)) return {Status::kNotJson, {}, scanner.error()};
  if (scanner.times_found > 1) {
    return {Status::kNotJson, {}, fmt::format("field \"{}\" appears twice", field)};
  }
  if (scanner.times_found == 0) {
    return {Status::kMissing, {}, fmt::format("no field \"{}\"", field)};
  }
  if (!scanner.found) {
    return {Status::kMissing, {}, fmt::format("field \"{}\" is no string", field)};
  }
  if (!scanner.found->escaped) return {Status::kFound, scanner.found->text, {}};
  if (!unescape(scanner.found->text, scratch)) {
    return {Status::kLoneSurrogate, {}, fmt::format("half a surrogate pair in \"{}\"", field)};
  }
  return {Status::kFound, scratch, {}};
}

}  // namespace marrow
