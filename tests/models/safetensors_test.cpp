#include "models/safetensors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

namespace marrow {
namespace {

namespace fs = std::filesystem;

class SafetensorsTest : public ::testing::Test {
 protected:
  SafetensorsTest() : folder_((fs::temp_directory_path() / fmt::format("marrow-st-{}", getpid())).string()) {
    fs::create_directories(folder_);
  }
  ~SafetensorsTest() override { fs::remove_all(folder_); }

  // A file of the given JSON header and `data_bytes` zero bytes. `length` overrides the header's.
  std::string make_file(const std::string& json, size_t data_bytes, int64_t length = -1) {
    const uint64_t n = length < 0 ? json.size() : static_cast<uint64_t>(length);
    std::string bytes(reinterpret_cast<const char*>(&n), sizeof n);
    bytes += json + std::string(data_bytes, '\0');
    return write(bytes);
  }
  std::string write(const std::string& bytes) {
    const std::string path = folder_ + "/file.safetensors";
    OutputFile(path).append(bytes);
    return path;
  }
  // The error's text; fails if the file is accepted or the error is of another kind.
  std::string refusal(const std::string& path) {
    try {
      TensorFiles file({path});
    } catch (const Error& error) {
      EXPECT_EQ(error.report().code, ExitCode::kBadInput);
      EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
      EXPECT_FALSE(error.report().fix.empty());
      return error.what();
    }
    ADD_FAILURE() << "accepted";
    return "";
  }
  std::string folder_;
};

void expect_contains(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST_F(SafetensorsTest, WritesAtPlannedOffsetsAndReadsBack) {
  const SafetensorsLayout layout = layout_safetensors("x", {{{"scalar", {}}, at::kDouble},
                                                            {{"a \"quoted\" name", {2, 3}}, at::kFloat},
                                                            {{"none", {0, 5}}, at::kLong},
                                                            {{"halves", {3}}, at::kBFloat16}});
  EXPECT_EQ(layout.header.size() % 8, 0u);
  EXPECT_EQ(layout.file_bytes, static_cast<int64_t>(layout.header.size()) + 8 + 24 + 0 + 6);
  const std::string path = folder_ + "/x";
  {
    OutputFile first(path);
    first.append(layout.header);
    first.truncate_to(layout.file_bytes);
  }
  const std::array<float, 6> values{1, 2, 3, 4, 5, 6};
  OutputFile second(path, /*existing=*/true);  // as another rank does
  second.write_at(layout.tensors[1].begin + 8, std::as_bytes(std::span(values)).subspan(8));
  second.write_at(layout.tensors[1].begin, std::as_bytes(std::span(values)).first(8));
  second.close();

  const TensorFiles file({path});
  ASSERT_EQ(file.names().size(), 4u);
  const at::Tensor read = file.read_whole("a \"quoted\" name");
  EXPECT_TRUE(read.equal(at::arange(1, 7, at::kFloat).view({2, 3})));
  EXPECT_EQ(file.find("none")->elements(), 0);
  EXPECT_EQ(file.find("scalar")->elements(), 1);
  EXPECT_EQ(file.find("absent"), nullptr);
}

TEST_F(SafetensorsTest, ShardsKeepOrderAndLimit) {
  std::vector<StoredTensor> tensors;
  for (int i = 0; i < 7; ++i) {
    tensors.push_back({{fmt::format("t{}", i), {i == 3 ? 100 : 10}}, at::kFloat});
  }
  const auto shards = layout_shards("model", tensors, 80);
  ASSERT_EQ(shards.size(), 5u);  // t0 t1 | t2 | t3 (400 bytes, alone) | t4 t5 | t6
  EXPECT_EQ(shards[0].file_name, "model-00001-of-00005.safetensors");
  std::vector<std::string> names;
  for (const auto& shard : shards) {
    for (const auto& tensor : shard.tensors) names.push_back(tensor.name);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"t0", "t1", "t2", "t3", "t4", "t5", "t6"}));
  EXPECT_EQ(shards[2].tensors.size(), 1u);
  EXPECT_TRUE(layout_shards("model", {}, 80).empty());
}

TEST_F(SafetensorsTest, RefusesDamagedLengths) {
  expect_contains(refusal(write("1234567")), {"7 bytes", "too short"});
  expect_contains(refusal(write("")), {"0 bytes"});
  expect_contains(refusal(make_file("{}", 0, 50)), {"58 bytes", "ends after 10"});
  expect_contains(refusal(make_file("{}", 0, 100'000'001)), {"100000001", "100000000"});
  expect_contains(refusal(make_file("{}", 0, INT64_MAX)), {"9223372036854775807"});
  expect_contains(refusal(make_file(" {}", 0)), {"does not start with"});
  expect_contains(refusal(make_file("[1]", 0)), {"does not start with"});
}

// It is no JSON file that could be mended.
TEST_F(SafetensorsTest, SaysThatTheHeaderIsDamaged) {
  for (const auto& [json, why] : {std::pair("{]", "not valid JSON"),
                                  {"{\"w\": {}, \"w\": {}}", "twice"},
                                  {"{\"w\": 3}", "w: expected an object, found 3"},
                                  {"{\"w\": {\"dtype\": \"F32\"}}", "w.shape: this key is missing"},
                                  {"[1]", "does not start with"}}) {
    const std::string path = make_file(json, 0);
    try {
      TensorFiles file({path});
      ADD_FAILURE() << json;
    } catch (const Error& error) {
      EXPECT_TRUE(error.report().what.starts_with("the safetensors header of " + path + ": "));
      expect_contains(error.report().what, {why});
      EXPECT_EQ(error.report().code, ExitCode::kBadInput);
      EXPECT_TRUE(error.report().fix.starts_with("copy or download the file again"));
    }
  }
  expect_contains(refusal(make_file(std::string("{}\0{x", 5), 0)), {"not valid JSON", "column 3: a zero byte"});
}

TEST_F(SafetensorsTest, RefusesFaultyEntries) {
  const auto one = [](const char* dtype, const char* shape, const char* offsets) {
    return fmt::format(R"({{"w":{{"dtype":"{}","shape":{},"data_offsets":{}}}}})", dtype, shape, offsets);
  };
  EXPECT_NO_THROW(TensorFiles({make_file(one("F32", "[2]", "[0,8]"), 8)}));
  expect_contains(refusal(make_file(one("F31", "[2]", "[0,8]"), 8)), {"w.dtype", "F31"});
  expect_contains(refusal(make_file(one("F32", "[2]", "[0,9]"), 9)), {"w.data_offsets", "9", "8"});
  expect_contains(refusal(make_file(one("F32", "[2]", "[0,16]"), 8)), {"out of range", "16", "8"});
  expect_contains(refusal(make_file(one("F32", "[2]", "[-8,0]"), 8)), {"out of range", "-8"});
  expect_contains(refusal(make_file(one("F32", "[2]", "[8,0]"), 8)), {"out of range"});
  expect_contains(refusal(make_file(one("F32", "[2]", "[0,8,16]"), 8)), {"two offsets"});
  expect_contains(refusal(make_file(one("F32", "[-2]", "[0,8]"), 8)), {"w.shape", "-2"});
  expect_contains(refusal(make_file(one("F32", "[4294967296,4294967296]", "[0,0]"), 0)), {"no possible shape"});
  // No byte, but strides that overflow.
  expect_contains(refusal(make_file(one("F32", "[4611686018427387904,4611686018427387904,0]", "[0,0]"), 0)),
                  {"no possible shape"});
  expect_contains(refusal(make_file(one("F32", "[0.5]", "[0,8]"), 8)), {"integer"});
  expect_contains(refusal(make_file(one("F32", "[2]", "[0,18446744073709551615]"), 8)), {"integer"});
  expect_contains(refusal(make_file(R"({"w":{"dtype":"F32","shape":[2]}})", 8)), {"w.data_offsets", "missing"});
  expect_contains(refusal(make_file(R"({"w":3})", 8)), {"w", "object"});
}

TEST_F(SafetensorsTest, RefusesGapsOverlapsAndExcess) {
  const auto two = [](const char* first, const char* second, const char* name = "b") {
    return fmt::format(R"({{"a":{{"dtype":"U8","shape":[8],"data_offsets":{}}},)"
                       R"("{}":{{"dtype":"U8","shape":[8],"data_offsets":{}}}}})",
                       first, name, second);
  };
  EXPECT_NO_THROW(TensorFiles({make_file(two("[8,16]", "[0,8]"), 16)}));  // any order in JSON
  expect_contains(refusal(make_file(two("[0,8]", "[4,12]"), 12)), {"\"b\"", "overlaps", "\"a\""});
  expect_contains(refusal(make_file(two("[0,8]", "[0,8]"), 8)), {"overlaps"});
  expect_contains(refusal(make_file(two("[0,8]", "[9,17]"), 17)), {"gap", "\"b\""});
  expect_contains(refusal(make_file(two("[1,9]", "[9,17]"), 17)), {"gap", "the header"});
  expect_contains(refusal(make_file(two("[0,8]", "[8,16]"), 17)), {"the file has"});
  expect_contains(refusal(make_file(two("[0,8]", "[8,16]", "a"), 16)), {"twice"});
}

// Every prefix of a sound file is refused: no truncation passes.
TEST_F(SafetensorsTest, RefusesEveryTruncation) {
  const SafetensorsLayout layout = layout_safetensors("x", {{{"a", {3}}, at::kFloat}, {{"b", {2, 2}}, at::kInt}});
  const std::string whole = layout.header + std::string(28, 'x');
  EXPECT_NO_THROW(TensorFiles({write(whole)}));
  for (size_t n = 0; n < whole.size(); ++n) EXPECT_THROW(TensorFiles({write(whole.substr(0, n))}), Error);
}

}  // namespace
}  // namespace marrow
