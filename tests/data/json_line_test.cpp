#include <gtest/gtest.h>

#include "data/document_source.h"
#include "data/unicode_text.h"

namespace marrow {
namespace {

// Independent of the code under test: decodes by arithmetic and re-checks ranges.
bool is_valid_character(const std::string& bytes) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const size_t length = bytes.size();
  if (length == 1) return byte(0) < 0x80;
  static const unsigned kLead[5] = {0, 0, 0xC0, 0xE0, 0xF0}, kMask[5] = {0, 0, 0xE0, 0xF0, 0xF8};
  if ((byte(0) & kMask[length]) != kLead[length]) return false;
  unsigned code = byte(0) & ~kMask[length];
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return false;
    code = code << 6 | (byte(i) & 0x3F);
  }
  const unsigned lowest = length == 2 ? 0x80 : length == 3 ? 0x800 : 0x10000;
  return code >= lowest && code <= 0x10FFFF && (code < 0xD800 || code > 0xDFFF);
}

TEST(Utf8, EveryTwoByteAndManyLongerSequences) {
  const unsigned char tails[] = {0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xFF};
  for (unsigned a = 0; a < 256; ++a) {
    for (unsigned b = 0; b < 256; ++b) {
      const std::string two{static_cast<char>(a), static_cast<char>(b)};
      const bool valid = is_valid_character(two) || (is_valid_character(two.substr(0, 1)) && b < 0x80);
      EXPECT_EQ(valid_utf8_length(two) == 2, valid) << a << " " << b;
      if (a < 0xE0) continue;
      for (const unsigned char c : tails) {
        const std::string three = two + static_cast<char>(c);
        EXPECT_EQ(valid_utf8_length(three) == 3, is_valid_character(three)) << a << " " << b << c;
        for (const unsigned char d : tails) {
          const std::string four = three + static_cast<char>(d);
          const bool good = is_valid_character(four) || (is_valid_character(three) && d < 0x80);
          EXPECT_EQ(valid_utf8_length(four) == 4, good) << a << " " << b << " " << +c << " " << +d;
        }
      }
    }
  }
}

TEST(Utf8, PositionOfTheFirstBadByteAtAnyAlignment) {
  for (size_t before = 0; before < 100; ++before) {
    const std::string text(before, 'a');
    EXPECT_EQ(valid_utf8_length(text), before);
    EXPECT_EQ(valid_utf8_length(text + "\xFF" + std::string(70, 'b')), before);
    EXPECT_EQ(valid_utf8_length(text + "\xE2\x82"), before);  // cut within a character
    EXPECT_EQ(valid_utf8_length(text + "\xE2\x82\xAC" + text), 2 * before + 3);
  }
}

JsonField find(std::string_view line) {
  RegexScratch scratch;
  return find_json_string(line, "text", scratch);
}

TEST(JsonLine, FindsAndDecodesTheField) {
  const std::pair<std::string, std::string> cases[] = {
      {R"({"text":"plain"})", "plain"},
      {R"( { "a" : [1, -2.5e+3, {"text": "inner"}], "text" : "x" , "z": null } )", "x"},
      {R"({"text":""})", ""},
      {R"({"text":"\"\\\/\b\f\n\r\t"})", "\"\\/\b\f\n\r\t"},
      {R"({"text":"\u0041\u00e9\u20AC\ud83d\ude00"})", "A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"},
      {R"({"text":"a\u0000b"})", std::string("a\0b", 3)},
      {R"({"te\u0078t":"escaped key"})", "escaped key"},
      {R"({"other":"\ud83d","text":"fine"})", "fine"},
      {"{\"text\":\"" + std::string(100, 'q') + "\"}\r", std::string(100, 'q')},
  };
  for (const auto& [line, expected] : cases) {
    const JsonField field = find(line);
    EXPECT_EQ(field.fault, "") << line << ": " << field.text;
    EXPECT_EQ(field.text, expected) << line;
  }
}

TEST(JsonLine, HalfASurrogatePair) {
  for (const char* line : {R"({"text":"\ud83d"})", R"({"text":"\ude00"})", R"({"text":"\ud83dx"})",
                           R"({"text":"\ud83d\u0041"})", R"({"text":"\ud83d\n\ude00"})"}) {
    EXPECT_EQ(find(line).fault, input_fault::kInvalidUtf8) << line;
  }
}

TEST(JsonLine, MissingField) {
  for (const char* line : {"{}", R"({"txt":"a"})", R"({"text":1})", R"({"text":null})", R"({"text":["a"]})", "[]", "1",
                           R"("text")", R"({"a":{"text":"b"}})"}) {
    EXPECT_EQ(find(line).fault, input_fault::kMissingField) << line;
  }
}

TEST(JsonLine, NotJson) {
  for (const char* line : {"",
                           "{",
                           "x",
                           R"({"text":"a")",
                           R"({"text":"a"}})",
                           R"({"text":"a"} 1)",
                           R"({"text" "a"})",
                           R"({text:"a"})",
                           R"({"text":"a",})",
                           R"({"text":"\x"})",
                           R"({"text":"\u12g4"})",
                           R"({"text":"\u12)",
                           R"({"text":"a\)",
                           R"({"text":01})",
                           R"({"text":1.})",
                           R"({"text":-})",
                           R"({"text":1e})",
                           R"({"text":tru})",
                           R"({"text":NaN})",
                           "{\"text\":\"a\tb\"}",
                           R"({"text":"a","text":"b"})",
                           R"({"a":[1,]})",
                           R"({"a":[1)",
                           R"({'text':'a'})"}) {
    const JsonField field = find(line);
    EXPECT_EQ(field.fault, input_fault::kNotJson) << line;
    EXPECT_FALSE(field.text.empty());
  }
}

// Every prefix of a valid line, and the line with any byte replaced, gives a status and stays
// inside the line (the sanitizer build would see otherwise).
TEST(JsonLine, CutAndChangedLines) {
  const std::string line = R"({"a":[true,{"b":-1.5e3}],"text":"x\n\ud83d\ude00y","c":null})";
  for (size_t size = 0; size < line.size(); ++size) {
    const std::string cut = line.substr(0, size);
    EXPECT_EQ(find(cut).fault, input_fault::kNotJson) << cut;
  }
  for (size_t at = 0; at < line.size(); ++at) {
    for (int byte = 0; byte < 128; ++byte) {
      std::string changed = line;
      changed[at] = static_cast<char>(byte);
      const JsonField field = find(changed);
      EXPECT_FALSE(!field.fault.empty() && field.text.empty());
    }
  }
}

TEST(JsonLine, MillionsOfValuesAreNoRunaway) {
  std::string line = "{\"a\":[0";
  for (int i = 0; i < 2'000'000; ++i) line += ",[],{\"\":\"\"}";
  EXPECT_EQ(find(line + "],\"text\":\"t\"}").text, "t");
}

TEST(JsonLine, DeepNestingIsRefusedNotFatal) {
  EXPECT_EQ(find(std::string(1000000, '[')).fault, input_fault::kNotJson);
  const std::string deep = std::string(400, '[') + std::string(400, ']');
  EXPECT_EQ(find("{\"a\":" + deep + ",\"text\":\"t\"}").text, "t");
}

}  // namespace
}  // namespace marrow
