// The published models of every family: their parameters, by configs/models alone.
#include "models/config_changes.h"

namespace marrow {
namespace {

// All parameters, and those that a token meets: of the experts, k in E; of the embedding none, which is looked up.
std::pair<int64_t, int64_t> parameters(const MoeModel& model) {
  int64_t total = 0, active = 0;
  for (const ParameterSpec& spec : all_parameter_specs(model)) {
    int64_t elements = 0;
    for (const HubTensor& part : spec.parts) elements += part.elements();
    total += elements;
    if (spec.name == "embedding") continue;
    active += spec.expert ? elements / model.shape().experts * model.shape().top_k : elements;
  }
  for (const HubTensor& bias : model.shape().selection_biases) total += bias.elements();
  return {total, active};
}

TEST(PublishedModels, HaveTheirParameters) {
  struct Row {
    const char* name;
    int64_t total, active;
  };
  const Row rows[] = {
      {"qwen3-30b-a3b", 30'532'122'624, 3'041'867'776},    {"qwen3-235b-a22b", 235'093'634'560, 21'568'433'664},
      {"deepseek-v2-lite", 15'706'484'224, 2'451'435'008}, {"moonlight-16b-a3b", 15'960'110'208, 2'579'230'208},
      {"gpt-oss-20b", 20'914'757'184, 3'608'307'264},    // the card says 20.9B and 3.6B
      {"gpt-oss-120b", 116'829'156'672, 5'132'849'472},  // 116.8B and 5.1B
      {"qwen3.5-35b-a3b", 34'660'610'688, 2'946'429'568},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(parameters(*open_model(test::published(row.name))), std::pair(row.total, row.active)) << row.name;
  }
}

// A model is exported with what its config.json says there.
TEST(PublishedModels, ArchitecturesAreAListOfNames) {
  for (const char* name :
       {"qwen3-30b-a3b", "deepseek-v2-lite", "moonlight-16b-a3b", "gpt-oss-20b", "qwen3.5-35b-a3b"}) {
    for (const char* value : {"\"Qwen3MoeForCausalLM\"", "3", "[3]", "[\"A\", null]", "{\"A\": 1}", "true"}) {
      test::expect_refused(test::published(name), "architectures", value);
    }
    for (const char* value : {"null", "[]", "[\"A\"]", ""}) {
      EXPECT_NO_THROW(open_model(test::changed(test::published(name), "architectures", value))) << name << value;
    }
  }
  const std::string text = test::published("qwen3.5-35b-a3b").dump();
  const Json whole = Json::parse(JsonWriter().field("model_type", "qwen3_5_moe").raw("text_config", text).text(), "c");
  EXPECT_NO_THROW(open_model(whole));
  for (const char* path : {"architectures", "text_config.architectures"}) test::expect_refused(whole, path, "\"A\"");
}

// Each size is possible by itself.
TEST(PublishedModels, ProductsOfSizesThatOverflowAreRefused) {
  for (const char* name : {"qwen3-30b-a3b", "deepseek-v2-lite", "moonlight-16b-a3b", "gpt-oss-20b"}) {
    const char* const inner = std::string_view(name) == "gpt-oss-20b" ? "intermediate_size" : "moe_intermediate_size";
    const Json wide = test::changed(test::published(name), "hidden_size", "16777216");
    try {
      open_model(test::changed(wide, inner, "16777216"));
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.report().code, ExitCode::kUsage);
      EXPECT_NE(error.report().what.find("elements"), std::string::npos) << error.report().what;
    }
  }
}

}  // namespace
}  // namespace marrow
