// What a tokenizer.json may not hold, and that the error says where.
#include "data/tokenizer_json.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "data/tokenizer.h"
#include "data/unicode_text.h"
#include "tokenizer_testing.h"

namespace marrow {
namespace {

std::string open_error(const std::string& json) {
  const TokenizerFolder folder;
  folder.write("tokenizer.json", json);
  try {
    open_tokenizer(folder.path());
  } catch (const Error& error) {
    EXPECT_EQ(error.report().code, ExitCode::kBadInput);
    EXPECT_FALSE(error.report().fix.empty());
    EXPECT_NE(std::string(error.what()).find(folder.path() + "/tokenizer.json"), std::string::npos);
    return error.what();
  }
  return "accepted";
}

std::string token(const std::string& changed) {
  return R"([{"id": 261, "content": "<x>", "single_word": false, "lstrip": false, "rstrip": false,
              "normalized": false, )" +
         changed + "}]";
}

std::string split(const std::string& pattern, const std::string& rest) {
  return R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": )" + pattern + rest +
         R"(}, {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})";
}

TEST(TokenizerJson, EveryUnsupportedFeatureIsRefusedByItsPath) {
  const std::string isolated = R"(, "behavior": "Isolated", "invert": false)";
  struct Case {
    std::string TinyTokenizer::*section;
    std::string text;
    std::string path;
  };
  using T = TinyTokenizer;
  const std::string model = T().model_flags;
  const auto flag = [&](const std::string& from, const std::string& to) {
    std::string changed = model;
    changed.replace(changed.find(from), from.size(), to);
    return changed;
  };
  const Case cases[] = {
      {&T::before, R"("version": "2.0")", "version"},
      {&T::before, R"("truncation": {"max_length": 5})", "truncation"},
      {&T::before, R"("padding": {"pad_id": 0})", "padding"},
      {&T::before, R"("extra": 1)", "extra"},
      {&T::normalizer, R"({"type": "Lowercase"})", "normalizer.type"},
      {&T::normalizer, R"({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]})",
       "normalizer.normalizers[1].type"},
      {&T::pretokenizer, "null", "pre_tokenizer"},
      {&T::pretokenizer, R"({"type": "Metaspace"})", "pre_tokenizer.type"},
      {&T::pretokenizer, R"({"type": "Sequence", "pretokenizers": []})", "pre_tokenizer"},
      {&T::pretokenizer, R"({"type": "Digits", "individual_digits": true})", "pre_tokenizer"},
      {&T::pretokenizer,
       R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": false},
           {"type": "Digits"}]})",
       "pre_tokenizer.pretokenizers[1]"},
      {&T::pretokenizer, R"({"type": "ByteLevel", "add_prefix_space": false, "new": 1})", "pre_tokenizer.new"},
      {&T::pretokenizer, split(R"({"Regex": "a"})", R"(, "behavior": "Swapped", "invert": false)"),
       "pre_tokenizer.pretokenizers[0].behavior"},
      {&T::pretokenizer, split(R"({"Regex": "\\bword"})", isolated), "pre_tokenizer.pretokenizers[0].pattern.Regex"},
      {&T::pretokenizer, split(R"({"Regex": "a*"})", isolated), "pre_tokenizer.pretokenizers[0].pattern.Regex"},
      {&T::pretokenizer, split(R"({"Glob": "a"})", isolated), "pre_tokenizer.pretokenizers[0].pattern.Glob"},
      {&T::pretokenizer, split(R"({"String": " "})", isolated), "pre_tokenizer.pretokenizers[0].pattern.String"},
      {&T::pretokenizer, split(R"({"Regex": "a"})", R"(, "behavior": "MergedWithNext")"),
       "pre_tokenizer.pretokenizers[0].behavior"},
      {&T::pretokenizer, R"({"type": "ByteLevel", "add_prefix_space": true})", "pre_tokenizer.add_prefix_space"},
      {&T::post_processor, R"({"type": "BertProcessing"})", "post_processor.type"},
      {&T::post_processor, R"({"type": "Sequence", "processors": [{"type": "RobertaProcessing"}]})",
       "post_processor.processors[0].type"},
      {&T::decoder, "null", "decoder"},
      {&T::decoder, R"({"type": "WordPiece"})", "decoder"},
      {&T::model_flags, flag("\"BPE\"", "\"WordPiece\""), "model.type"},
      {&T::model_flags, flag("\"dropout\": null", "\"dropout\": 0.1"), "model.dropout"},
      {&T::model_flags, flag("\"byte_fallback\": false", "\"byte_fallback\": true"), "model.byte_fallback"},
      {&T::model_flags, flag("prefix\": null", "prefix\": \"##\""), "model.continuing_subword_prefix"},
      {&T::model_flags, flag("suffix\": null", "suffix\": \"</w>\""), "model.end_of_word_suffix"},
      {&T::model_flags, model + R"(, "cache": 3)", "model.cache"},
      {&T::vocab, R"("a": 0)", "model.vocab"},
      {&T::vocab, T().vocab + R"(, "dup": 97)", "model.vocab"},
      {&T::vocab, T().vocab + R"(, "huge": 2000000000)", "model.vocab"},
      {&T::vocab, T().vocab + R"(, "minus": -1)", "model.vocab.minus"},
      {&T::vocab, T().vocab + R"(, "text": "1")", "model.vocab.text"},
      {&T::merges, R"(["t h", "q q"])", "model.merges[1]"},
      {&T::merges, R"(["th"])", "model.merges[0]"},
      {&T::merges, R"(["t h e"])", "model.merges[0]"},
      {&T::merges, R"([["t", "h", "e"]])", "model.merges[0]"},
      {&T::merges, "{}", "model.merges"},
      {&T::added, token(R"("special": true, "single_word2": true)"), "added_tokens[0].single_word2"},
      {&T::added, R"([{"id": 261, "content": "x", "single_word": true, "special": true}])",
       "added_tokens[0].single_word"},
      {&T::added, R"([{"id": 261, "content": "x", "lstrip": true, "special": true}])", "added_tokens[0].lstrip"},
      {&T::added, R"([{"id": 261, "content": "x", "rstrip": true, "special": true}])", "added_tokens[0].rstrip"},
      {&T::added, R"([{"id": 261, "content": "", "special": true}])", "added_tokens[0].content"},
      {&T::added, R"([{"id": 270, "content": "<x>", "special": true}])", "added_tokens[0].id"},
      {&T::added, R"([{"id": 261, "content": "the", "special": true}])", "added_tokens[0].id"},
      {&T::added, R"([{"content": "the", "special": true}])", "added_tokens[0].id"},
  };
  for (const Case& refused : cases) {
    TinyTokenizer tiny;
    if (refused.section == &T::vocab) tiny.added = "[]";  // whose ids follow the vocab's
    tiny.*refused.section = refused.text;
    const std::string error = open_error(tiny.json());
    EXPECT_NE(error.find(refused.path), std::string::npos) << refused.text << "\n" << error;
  }
}

TEST(TokenizerJson, WhatChangesNoTokenIsAccepted) {
  TinyTokenizer tiny;
  tiny.normalizer = R"({"type": "Sequence", "normalizers": []})";
  tiny.post_processor = R"({"type": "Sequence", "processors": [{"type": "ByteLevel"},
                            {"type": "TemplateProcessing", "single": []}]})";
  tiny.merges = R"(["#version: 0.2", "t h", ["th", "e"]])";
  tiny.added = token(R"("special": true)");
  EXPECT_EQ(open_error(tiny.json()), "accepted");
}

TEST(TokenizerJson, BrokenFiles) {
  const std::string whole = TinyTokenizer().json();
  for (size_t size = 0; size < whole.size(); size += 97) {
    EXPECT_NE(open_error(whole.substr(0, size)), "accepted") << size;
  }
  for (const std::string text : {"[]", "7", "{}", "{\"model\": {}}", "\xff", "null"}) {
    EXPECT_NE(open_error(text), "accepted") << text;
  }
  EXPECT_THROW(open_tokenizer("/nonexistent/tokenizer.json"), Error);
  EXPECT_THROW(open_tokenizer("/tmp"), Error);
}

// The error of a split pattern; "" if it is accepted.
std::string pattern_error(const std::string& pattern) {
  try {
    split_regex(pattern);
  } catch (const std::invalid_argument& problem) {
    return problem.what();
  }
  return "";
}

TEST(SplitRegex, AcceptsOrRefuses) {
  for (const std::string pattern : {R"(\s+(?!\S))", R"([^\s\p{L}\d])", R"((?i:'s|'ll)\p{N}{1,3})",
                                    R"('(?i:[sdmt]|ll|ve|re))", R"(a++|b+?c*|[\x41\x{42}])", R"([^\S\D]\D)",
                                    R"((?<=\p{Ll})\p{Lu}|(?<!a)b(?=c)|(?>d)|(e))", "[一-龥]+[\r\n]*|\\s+$"}) {
    EXPECT_EQ(pattern_error(pattern), "") << pattern;
  }
  for (const std::string pattern :
       {R"(\w)",      R"(\b)",          R"(^a)",        R"((?<!^)a)",       R"([a[b]])", R"([\p{L}&&\p{Lu}])",
        R"(\p{Han})", R"(\p{L)",        R"((?i)a)",     R"(a{2}+)",         R"(a{,2})",  R"(a{)",
        R"((?i:ss))", R"((?i:\p{Lu}))", R"((?i:[^a]))", R"((a)\1)",         R"(a))",     R"([a)",
        R"(\)",       R"(\h)",          R"((?<n>a))",   R"(\x{110000000})", R"(\x8f)",   R"([]a])"}) {
    EXPECT_NE(pattern_error(pattern), "") << pattern;
  }
  EXPECT_NE(pattern_error(R"(\s+\w+)").find(R"(\\w+)"), std::string::npos);  // names what it is
}

// PCRE2's \s has U+180E, which is no white space; the classes of U+0897 and others are Unicode
// 16's.
TEST(SplitRegex, ClassesAreThoseOfTheReference) {
  const std::string text = "a\u180e\u0897\U00011f50";
  std::string scratch;
  const std::string classes(class_text(text, scratch));
  ASSERT_EQ(classes.size(), text.size());
  RegexScratch regex;
  EXPECT_FALSE(split_regex(R"(\s)").find(classes, 0, regex));
  EXPECT_TRUE(split_regex(R"(\p{Cf}\p{Mn}\p{Nd})").find(classes, 0, regex));
  EXPECT_EQ(class_text("a\u0085", scratch), "a\u0085");
}

}  // namespace
}  // namespace marrow
