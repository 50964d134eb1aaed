#include "data/unicode_text.h"

#include <utf8proc.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>

#include "base/error.h"

namespace marrow {
namespace {

constexpr uint32_t kTableEnd = 0x32400;  // above it no class differs and nothing decomposes

// Code points whose general category differs between Unicode 14 (PCRE2's) and 16, in hexadecimal ranges, and for each
// group a code point that has this category in Unicode 14. And U+180E, which PCRE2's \s has, but White_Space has not.
constexpr const char* kChangedClasses = R"(
180e -> 200b; 1c8a -> 1c88; 1c89 -> 1c90; cf3 -> d02; 897 ece -> 898; 1b4e-1b4f 1b7f -> 1b5a; 2427-2429 2ffc-2fff
31e4-31e5 31ef -> 2426; a7cd a7db -> a7ca; a7cb-a7cc a7da a7dc -> a7c9; 13439-1343f -> 13438; 10d70-10d85 1df25-1df2a
-> 10cf2; 10d4e 10d6f 16d40-16d42 16d6b-16d6c 1e030-1e06d 1e4eb -> 107ba; 105c0-105f3 10d4a-10d4d 10d4f 10ec2-10ec4
1123f-11240 11380-11389 1138b 1138e 11390-113b5 113b7 113d1 113d3 11bc0-11be0 11f02 11f04-11f10 11f12-11f33 1342f
13441-13446 13460-143fa 16100-1611d 16d43-16d6a 18cff 1b132 1b155 1e4d0-1e4ea 1e5d0-1e5ed 1e5f0 -> 10600; 10d50-10d65
-> 10cb2; 113b8-113ba 113c2 113c5 113c7-113ca 113cc-113cd 113cf 1171e 11f03 11f34-11f35 11f3e-11f3f 11f41 1612a-1612c
-> 11363; 10d69-10d6d 10efc-10eff 11241 113bb-113c0 113ce 113d0 113d2 113e1-113e2 11f00-11f01 11f36-11f3a 11f40 11f42
11f5a 13440 13447-13455 1611e-16129 1612d-1612f 1e08f 1e4ec-1e4ef 1e5ee-1e5ef -> 10d27; 10d40-10d49 116d0-116e3
11bf0-11bf9 11f50-11f59 16130-16139 16d70-16d79 1ccf0-1ccf9 1e4f0-1e4f9 1e5f1-1e5fa -> 10d39; 1d2c0-1d2d3 -> 1d2e0;
10d6e -> 10ead; 113d4-113d5 113d7-113d8 11b00-11b09 11be1 11f43-11f4f 16d6d-16d6f 1e5ff -> 1144b; 10d8e-10d8f -> 1d6c1;
1cc00-1ccef 1cd00-1ceb3 1f6dc 1f774-1f776 1f77b-1f77f 1f7d9 1f8b2-1f8bb 1f8c0-1f8c1 1fa75-1fa77 1fa87-1fa89 1fa8f
1faad-1faaf 1fabb-1fabf 1fac6 1face-1facf 1fada-1fadc 1fadf 1fae8-1fae9 1faf7-1faf8 1fbcb-1fbef -> 1cf50; 2b739
2ebf0-2ee5d -> 2b738; 31350-323af -> 3134a)";

// Code points that have a combining class, or compose with what stands before them, only since Unicode versions after
// 9. And U+11A7, which utf8proc takes for a final consonant.
constexpr const char* kNewCombining = R"(
11a7 7fd 898-89f 8ca-8d3 9fe c3c d3b-d3c eba 1715 1abf-1ace 1df6-1dfa a82c 10d24-10d27 10eab-10eac 10f46-10f50
10f82-10f85 11070 1133b 1145e 11839-1183a 11930 1193d-1193e 11943 119e0 11a34 11a47 11a99 11d42 11d44-11d45 11d97
16ff0-16ff1 1e130-1e136 1e2ae 1e2ec-1e2ef)";

// Calls visit(code point, stand-in) for all ranges of a table; without "->" the stand-in is 0.
template <class Visit>
void for_each_code_point(const char* table, Visit&& visit) {
  std::istringstream groups(table);
  for (std::string group; std::getline(groups, group, ';');) {
    const auto number = [](const std::string& text) { return static_cast<uint32_t>(std::stoul(text, nullptr, 16)); };
    const size_t arrow = group.find("->");
    const uint32_t stand_in = arrow == std::string::npos ? 0 : number(group.substr(arrow + 2));
    std::istringstream ranges(group.substr(0, arrow));
    for (std::string range; ranges >> range;) {
      const uint32_t last = number(range.substr(range.find('-') + 1));  // npos + 1 = 0: a single one
      for (uint32_t c = number(range); c <= last; ++c) visit(c, stand_in);
    }
  }
}

void append_nfc(std::string_view text, std::string& out) {
  utf8proc_uint8_t* normal = nullptr;
  const auto size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &normal, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(normal, &std::free);
  MARROW_CHECK(size >= 0, ExitCode::kBadInput,
               Fix("split the document: one run of its text is too large for normalization"), "NFC of {} bytes: {}",
               text.size(), utf8proc_errmsg(size));
  out.append(reinterpret_cast<const char*>(normal), static_cast<size_t>(size));
}

}  // namespace

CodePoint decode_utf8(std::string_view text) {
  utf8proc_int32_t value = 0;
  const auto size = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                     static_cast<utf8proc_ssize_t>(text.size()), &value);
  return {static_cast<uint32_t>(value), size > 0 ? static_cast<uint32_t>(size) : 0};
}

std::string encode_utf8(uint32_t value) {
  utf8proc_uint8_t bytes[4];
  const auto size = utf8proc_encode_char(static_cast<utf8proc_int32_t>(value), bytes);
  return {reinterpret_cast<const char*>(bytes), static_cast<size_t>(size)};
}

size_t valid_utf8_length(std::string_view text) {
  constexpr uint64_t kHighBits = 0x8080808080808080U;
  size_t at = 0;
  for (uint32_t size = 1; at < text.size() && size > 0; at += size) {
    uint64_t eight = kHighBits;
    if (at + 8 <= text.size()) std::memcpy(&eight, text.data() + at, 8);
    size = (eight & kHighBits) == 0 ? 8 : decode_utf8(text.substr(at)).size;
  }
  return at;
}

std::string_view class_text(std::string_view text, std::string& scratch) {
  static const auto table = [] {  // by code point; 0 where the class did not change
    std::vector<uint32_t> filled(kTableEnd);
    for_each_code_point(kChangedClasses, [&](uint32_t c, uint32_t stand_in) { filled[c] = stand_in; });
    return filled;
  }();
  bool copied = false;
  for (size_t at = 0; at < text.size();) {
    if (static_cast<uint8_t>(text[at]) < 0xe0) {  // one- and two-byte characters never changed
      ++at;
      continue;
    }
    const auto [value, size] = decode_utf8(text.substr(at));
    if (value < kTableEnd && table[value] != 0) {
      if (!copied) scratch.assign(text);
      copied = true;
      encode_utf8(table[value]).copy(scratch.data() + at, size);
    }
    at += size;
  }
  return copied ? scratch : text;
}

// Characters that NFC neither changes nor moves nor composes with those before them, and those that it must leave
// alone, are copied; the runs between them are normalized, each with the character before it, which it may compose
// with.
std::string to_nfc(std::string_view text) {
  static const auto inert = [] {
    std::vector<bool> table(kTableEnd);
    for (const char* const ranges : {kNewCombining, kChangedClasses}) {
      for_each_code_point(ranges, [&](uint32_t c, uint32_t) { table[c] = true; });
    }
    return table;
  }();
  std::string out;
  out.reserve(text.size());
  size_t copied = 0, run = 0;  // a run would begin here
  const auto end_run = [&](size_t end) {
    out.append(text.substr(copied, run - copied));
    append_nfc(text.substr(run, end - run), out);
    copied = end;
  };
  bool in_run = false;
  for (size_t at = 0; at < text.size();) {
    const auto lead = static_cast<uint8_t>(text[at]);
    const auto [value, size] = lead < 0x80 ? CodePoint{lead, 1} : decode_utf8(text.substr(at));
    const bool is_inert = value < kTableEnd && inert[value];
    const bool is_plain = value < 0x300 || (value >= 0x3400 && value < 0xa000) || is_inert;
    if (is_plain && in_run) end_run(at);
    if (is_plain) run = is_inert ? at + size : at;
    in_run = !is_plain;
    at += size;
  }
  if (in_run) end_run(text.size());
  return out.append(text.substr(copied));
}

}  // namespace marrow
