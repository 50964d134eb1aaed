#include "data/unicode_text.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/error.h"

namespace marrow {
namespace {

struct StandIn {
  uint32_t first, last, stand_in;
};
struct Range {
  uint32_t first, last;
};

// Code points whose general category differs between Unicode 14 and 16, sorted.
constexpr StandIn kStandIns[] = {
    {0x897, 0x897, 0x898},       {0xcf3, 0xcf3, 0xd02},       {0xece, 0xece, 0xecd},
    {0x1b4e, 0x1b4f, 0x1b5a},    {0x1b7f, 0x1b7f, 0x1b7e},    {0x1c89, 0x1c89, 0x1c90},
    {0x1c8a, 0x1c8a, 0x1c88},    {0x2427, 0x2429, 0x2426},    {0x2ffc, 0x2fff, 0x2ffb},
    {0x31e4, 0x31e5, 0x31e3},    {0x31ef, 0x31ef, 0x31e3},    {0xa7cb, 0xa7cc, 0xa7c9},
    {0xa7cd, 0xa7cd, 0xa7ca},    {0xa7da, 0xa7da, 0xa7d8},    {0xa7db, 0xa7db, 0xa7d9},
    {0xa7dc, 0xa7dc, 0xa7d8},    {0x105c0, 0x105f3, 0x10600}, {0x10d40, 0x10d49, 0x10d39},
    {0x10d4a, 0x10d4d, 0x10d23}, {0x10d4e, 0x10d4e, 0x107ba}, {0x10d4f, 0x10d4f, 0x10d23},
    {0x10d50, 0x10d65, 0x10cb2}, {0x10d69, 0x10d6d, 0x10d27}, {0x10d6e, 0x10d6e, 0x10ead},
    {0x10d6f, 0x10d6f, 0x107ba}, {0x10d70, 0x10d85, 0x10cf2}, {0x10d8e, 0x10d8f, 0x1d6c1},
    {0x10ec2, 0x10ec4, 0x10eb1}, {0x10efc, 0x10eff, 0x10f46}, {0x1123f, 0x11240, 0x1122b},
    {0x11241, 0x11241, 0x1123e}, {0x11380, 0x11389, 0x11361}, {0x1138b, 0x1138b, 0x11361},
    {0x1138e, 0x1138e, 0x11361}, {0x11390, 0x113b5, 0x11361}, {0x113b7, 0x113b7, 0x11400},
    {0x113b8, 0x113ba, 0x11363}, {0x113bb, 0x113c0, 0x11374}, {0x113c2, 0x113c2, 0x11363},
    {0x113c5, 0x113c5, 0x11363}, {0x113c7, 0x113ca, 0x11363}, {0x113cc, 0x113cd, 0x11363},
    {0x113ce, 0x113ce, 0x11374}, {0x113cf, 0x113cf, 0x11435}, {0x113d0, 0x113d0, 0x11374},
    {0x113d1, 0x113d1, 0x11400}, {0x113d2, 0x113d2, 0x11374}, {0x113d3, 0x113d3, 0x11400},
    {0x113d4, 0x113d5, 0x1144b}, {0x113d7, 0x113d8, 0x1144b}, {0x113e1, 0x113e2, 0x11438},
    {0x116d0, 0x116e3, 0x116c9}, {0x1171e, 0x1171e, 0x11720}, {0x11b00, 0x11b09, 0x11aa2},
    {0x11bc0, 0x11be0, 0x11c00}, {0x11be1, 0x11be1, 0x11c41}, {0x11bf0, 0x11bf9, 0x11c50},
    {0x11f00, 0x11f01, 0x11ef4}, {0x11f02, 0x11f02, 0x11ef2}, {0x11f03, 0x11f03, 0x11ef6},
    {0x11f04, 0x11f10, 0x11ef2}, {0x11f12, 0x11f33, 0x11ef2}, {0x11f34, 0x11f35, 0x11ef6},
    {0x11f36, 0x11f3a, 0x11ef4}, {0x11f3e, 0x11f3f, 0x11ef6}, {0x11f40, 0x11f40, 0x11ef4},
    {0x11f41, 0x11f41, 0x11ef6}, {0x11f42, 0x11f42, 0x11ef4}, {0x11f43, 0x11f4f, 0x11ef8},
    {0x11f50, 0x11f59, 0x11da9}, {0x11f5a, 0x11f5a, 0x11ef4}, {0x1342f, 0x1342f, 0x1342e},
    {0x13439, 0x1343f, 0x13438}, {0x13440, 0x13440, 0x11ef4}, {0x13441, 0x13446, 0x1342e},
    {0x13447, 0x13455, 0x11ef4}, {0x13460, 0x143fa, 0x1342e}, {0x16100, 0x1611d, 0x16800},
    {0x1611e, 0x16129, 0x16af0}, {0x1612a, 0x1612c, 0x16f51}, {0x1612d, 0x1612f, 0x16af0},
    {0x16130, 0x16139, 0x16a60}, {0x16d40, 0x16d42, 0x16b43}, {0x16d43, 0x16d6a, 0x16b8f},
    {0x16d6b, 0x16d6c, 0x16b43}, {0x16d6d, 0x16d6f, 0x16e97}, {0x16d70, 0x16d79, 0x16b59},
    {0x18cff, 0x18cff, 0x18d00}, {0x1b132, 0x1b132, 0x1b122}, {0x1b155, 0x1b155, 0x1b152},
    {0x1cc00, 0x1ccef, 0x1cf50}, {0x1ccf0, 0x1ccf9, 0x1d7ce}, {0x1cd00, 0x1ceb3, 0x1cf50},
    {0x1d2c0, 0x1d2d3, 0x1d2e0}, {0x1df25, 0x1df2a, 0x1df1e}, {0x1e030, 0x1e06d, 0x1e137},
    {0x1e08f, 0x1e08f, 0x1e02a}, {0x1e4d0, 0x1e4ea, 0x1e2eb}, {0x1e4eb, 0x1e4eb, 0x1e13d},
    {0x1e4ec, 0x1e4ef, 0x1e2ef}, {0x1e4f0, 0x1e4f9, 0x1e2f9}, {0x1e5d0, 0x1e5ed, 0x1e7e0},
    {0x1e5ee, 0x1e5ef, 0x1e8d0}, {0x1e5f0, 0x1e5f0, 0x1e7e0}, {0x1e5f1, 0x1e5fa, 0x1e2f9},
    {0x1e5ff, 0x1e5ff, 0x1e95e}, {0x1f6dc, 0x1f6dc, 0x1f6dd}, {0x1f774, 0x1f776, 0x1f773},
    {0x1f77b, 0x1f77f, 0x1f780}, {0x1f7d9, 0x1f7d9, 0x1f7d8}, {0x1f8b2, 0x1f8bb, 0x1f8b1},
    {0x1f8c0, 0x1f8c1, 0x1f8b1}, {0x1fa75, 0x1fa77, 0x1fa74}, {0x1fa87, 0x1fa89, 0x1fa86},
    {0x1fa8f, 0x1fa8f, 0x1fa90}, {0x1faad, 0x1faaf, 0x1faac}, {0x1fabb, 0x1fabf, 0x1faba},
    {0x1fac6, 0x1fac6, 0x1fac5}, {0x1face, 0x1facf, 0x1fad0}, {0x1fada, 0x1fadc, 0x1fad9},
    {0x1fadf, 0x1fadf, 0x1fae0}, {0x1fae8, 0x1fae9, 0x1fae7}, {0x1faf7, 0x1faf8, 0x1faf6},
    {0x1fbcb, 0x1fbef, 0x1fbca}, {0x2b739, 0x2b739, 0x2b738}, {0x2ebf0, 0x2ee5d, 0x2ebe0},
    {0x31350, 0x323af, 0x3134a}};

// Code points that have a combining class, or compose with what stands before them, only since
// Unicode versions after the reference's: it leaves them where they are. Sorted.
constexpr Range kInert[] = {
    {0x7fd, 0x7fd},     {0x898, 0x89f},     {0x8ca, 0x8d3},     {0x9fe, 0x9fe},
    {0xc3c, 0xc3c},     {0xd3b, 0xd3c},     {0xeba, 0xeba},     {0x1715, 0x1715},
    {0x1abf, 0x1ace},   {0x1df6, 0x1dfa},   {0xa82c, 0xa82c},   {0x10d24, 0x10d27},
    {0x10eab, 0x10eac}, {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070},
    {0x1133b, 0x1133b}, {0x1145e, 0x1145e}, {0x11839, 0x1183a}, {0x11930, 0x11930},
    {0x1193d, 0x1193e}, {0x11943, 0x11943}, {0x119e0, 0x119e0}, {0x11a34, 0x11a34},
    {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d42}, {0x11d44, 0x11d45},
    {0x11d97, 0x11d97}, {0x16ff0, 0x16ff1}, {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae},
    {0x1e2ec, 0x1e2ef}};

// Code points of combining class 0 that compose with what stands before them. Sorted.
constexpr Range kComposesBackward[] = {
    {0x9be, 0x9be},     {0x9d7, 0x9d7},     {0xb3e, 0xb3e},     {0xb56, 0xb57},
    {0xbbe, 0xbbe},     {0xbd7, 0xbd7},     {0xcc2, 0xcc2},     {0xcd5, 0xcd6},
    {0xd3e, 0xd3e},     {0xd57, 0xd57},     {0xdcf, 0xdcf},     {0xddf, 0xddf},
    {0x102e, 0x102e},   {0x1161, 0x1175},   {0x11a8, 0x11c2},   {0x1b35, 0x1b35},
    {0x11127, 0x11127}, {0x1133e, 0x1133e}, {0x11357, 0x11357}, {0x114b0, 0x114b0},
    {0x114ba, 0x114ba}, {0x114bd, 0x114bd}, {0x115af, 0x115af}};

constexpr uint32_t kFirstUnlisted = 0x30000;  // nothing above it decomposes, composes or moves
constexpr size_t kPageBits = 8;
constexpr auto kNfcOptions = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);

// Pages of 256 code points that kStandIns touches: most text touches none.
const std::bitset<(0x110000 >> kPageBits)>& stand_in_pages() {
  static const auto pages = [] {
    std::bitset<(0x110000 >> kPageBits)> touched;
    for (const StandIn& entry : kStandIns) {
      for (uint32_t page = entry.first >> kPageBits; page <= entry.last >> kPageBits; ++page) {
        touched.set(page);
      }
    }
    return touched;
  }();
  return pages;
}

template <class Entry, size_t kCount>
const Entry* find_entry(const Entry (&entries)[kCount], uint32_t code_point) {
  const auto* entry = std::upper_bound(
      std::begin(entries), std::end(entries), code_point,
      [](uint32_t value, const Entry& candidate) { return value < candidate.first; });
  if (entry == std::begin(entries) || code_point > (entry - 1)->last) return nullptr;
  return entry - 1;
}

bool is_space(uint32_t c) {
  return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

bool is_continuation(char byte) { return (static_cast<uint8_t>(byte) & 0xc0) == 0x80; }

void append_utf8(uint32_t code_point, std::string& out) {
  utf8proc_uint8_t buffer[4];
  const auto size = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code_point), buffer);
  out.append(reinterpret_cast<const char*>(buffer), static_cast<size_t>(size));
}

}  // namespace

CodePoint decode_utf8(const char* text) {
  const auto byte = [text](int i) { return static_cast<uint32_t>(static_cast<uint8_t>(text[i])); };
  const uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xe0) return {(lead & 0x1f) << 6 | (byte(1) & 0x3f), 2};
  if (lead < 0xf0) return {(lead & 0x0f) << 12 | (byte(1) & 0x3f) << 6 | (byte(2) & 0x3f), 3};
  return {(lead & 0x07) << 18 | (byte(1) & 0x3f) << 12 | (byte(2) & 0x3f) << 6 | (byte(3) & 0x3f),
          4};
}

size_t find_invalid_utf8(std::string_view text, bool& ascii_only) {
  ascii_only = true;
  size_t at = 0;
  while (at < text.size()) {
    uint64_t eight;
    while (at + 8 <= text.size() &&
           (std::memcpy(&eight, text.data() + at, 8), (eight & 0x8080808080808080U) == 0)) {
      at += 8;
    }
    if (at == text.size()) break;
    const auto lead = static_cast<uint8_t>(text[at]);
    if (lead < 0x80) {
      ++at;
      continue;
    }
    const size_t size = lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
    if (size == 0 || at + size > text.size()) return at;
    for (size_t i = 1; i < size; ++i) {
      if (!is_continuation(text[at + i])) return at;
    }
    const uint32_t value = decode_utf8(text.data() + at).value;
    const bool overlong = (size == 3 && value < 0x800) || (size == 4 && value < 0x10000);
    if (overlong || (value >= 0xd800 && value < 0xe000) || value > 0x10ffff) return at;
    ascii_only = false;
    at += size;
  }
  return at;
}

uint32_t class_stand_in(uint32_t code_point) {
  const StandIn* entry = find_entry(kStandIns, code_point);
  return entry == nullptr ? 0 : entry->stand_in;
}

bool make_class_text(std::string_view text, std::string& classes) {
  const auto& pages = stand_in_pages();
  bool found = false;
  for (size_t at = 0; at < text.size();) {
    if (static_cast<uint8_t>(text[at]) < 0xe0) {  // one- and two-byte characters never changed
      ++at;
      continue;
    }
    const CodePoint point = decode_utf8(text.data() + at);
    if (pages[point.value >> kPageBits]) {
      if (const uint32_t stand_in = class_stand_in(point.value)) {
        if (!found) classes.assign(text);
        found = true;
        utf8proc_encode_char(static_cast<utf8proc_int32_t>(stand_in),
                             reinterpret_cast<utf8proc_uint8_t*>(classes.data() + at));
      }
    }
    at += point.size;
  }
  return found;
}

size_t trailing_space(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t start = end - 1;
    while (start > 0 && is_continuation(text[start])) --start;
    if (!is_space(decode_utf8(text.data() + start).value)) break;
    end = start;
  }
  return text.size() - end;
}

size_t leading_space(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const CodePoint point = decode_utf8(text.data() + at);
    if (!is_space(point.value)) break;
    at += point.size;
  }
  return at;
}

NfcNormalizer::NfcNormalizer() : plain_(kFirstUnlisted) {
  std::string utf8;
  for (uint32_t c = 0; c < kFirstUnlisted; ++c) {
    if (c < 0x300 || class_stand_in(c) != 0 || find_entry(kInert, c) != nullptr) {
      plain_[c] = true;
      continue;
    }
    if (c >= 0xd800 && c < 0xe000) continue;
    const auto* property = utf8proc_get_property(static_cast<utf8proc_int32_t>(c));
    if (property->combining_class != 0 || find_entry(kComposesBackward, c) != nullptr) continue;
    // Only characters that decompose can change: recomposing gives them back, or it does not.
    utf8proc_int32_t parts[8];
    int last_class = 0;
    const auto count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), parts, 8,
                                               kNfcOptions, &last_class);
    if (count == 1 && parts[0] == static_cast<utf8proc_int32_t>(c)) {
      plain_[c] = true;
      continue;
    }
    utf8.clear();
    append_utf8(c, utf8);
    utf8.push_back('\0');
    const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> normal(
        utf8proc_NFC(reinterpret_cast<const utf8proc_uint8_t*>(utf8.c_str())), &std::free);
    plain_[c] = normal && utf8 == std::string(reinterpret_cast<char*>(normal.get())) + '\0';
  }
}

bool NfcNormalizer::is_plain(uint32_t code_point) const {
  return code_point >= kFirstUnlisted || plain_[code_point];
}

// Characters that are plain, and are followed by a plain one, are copied; a run that starts with
// the last plain character before others, and ends before the next plain one, is normalized.
void NfcNormalizer::append(std::string_view text, std::string& out) const {
  size_t copied = 0, last = 0;  // the previous character starts at `last`
  bool last_inert = true;       // nothing may be composed with the previous character
  for (size_t at = 0; at < text.size();) {
    if (static_cast<uint8_t>(text[at]) < 0xcc) {  // below U+0300
      last = at;
      last_inert = false;
      at += static_cast<uint8_t>(text[at]) < 0x80 ? 1 : 2;
      continue;
    }
    const CodePoint point = decode_utf8(text.data() + at);
    if (is_plain(point.value)) {
      last = at;
      last_inert = find_entry(kInert, point.value) != nullptr || class_stand_in(point.value) != 0;
      at += point.size;
      continue;
    }
    const size_t start = last_inert ? at : last;
    size_t end = at + point.size;
    while (end < text.size()) {
      const CodePoint next = decode_utf8(text.data() + end);
      if (is_plain(next.value)) break;
      end += next.size;
    }
    out.append(text.substr(copied, start - copied));
    utf8proc_uint8_t* normal = nullptr;
    const auto size =
        utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data() + start),
                     static_cast<utf8proc_ssize_t>(end - start), &normal, kNfcOptions);
    const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(normal, &std::free);
    MARROW_CHECK(size >= 0, ExitCode::kBadInput,
                 Fix("split the document: one run of its text is "
                     "too large for normalization"),
                 "NFC of {} bytes: {}", end - start, utf8proc_errmsg(size));
    out.append(reinterpret_cast<const char*>(normal), static_cast<size_t>(size));
    copied = last = at = end;
    last_inert = true;
  }
  out.append(text.substr(copied));
}

}  // namespace marrow
