#include "ops/pch.h"

#include "train/pretrain_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>

#include "base/files.h"
#include "base/json.h"
#include "base/toml.h"
#include "train/config_checks.h"

namespace marrow {
namespace {

// One key of the run config, bound to a member of one PretrainConfig.
struct Key {
  std::string name;   // "train.steps"
  std::string valid;  // "an integer from 1"
  std::string help;
  std::function<void(const TomlValue&)> read;
  std::function<std::string()> write;  // TOML; "" where there is nothing to write
  bool required = false;
};

[[noreturn]] void fail_value(const TomlValue& value, const std::string& name,
                             const std::string& found, const std::string& valid) {
  MARROW_THROW(ExitCode::kUsage, Fix(fmt::format("set {} to {}", name, valid)),
               "{}: {} is {}, not {}", value.where, name, found, valid);
}

int64_t checked_integer(const TomlValue& value, const std::string& name, int64_t min, int64_t max,
                        const std::string& valid) {
  if (value.kind != TomlValue::Kind::kInteger || value.integer < min || value.integer > max) {
    fail_value(value, name, value.describe(), valid);
  }
  return value.integer;
}

// The upper bounds keep sums and products of sizes far from an overflow.
constexpr int64_t kMaxCount = int64_t{1} << 40;
constexpr int64_t kMaxBatch = int64_t{1} << 24;
constexpr int64_t kMaxRanks = int64_t{1} << 15;

Key integer_key(std::string name, int64_t* target, int64_t min, std::string help,
                int64_t max = kMaxCount) {
  const std::string limit = max <= kMaxRanks
                                ? fmt::format("{}", max)
                                : fmt::format("2^{}", std::bit_width(uint64_t(max)) - 1);
  const std::string valid = max == INT64_MAX ? fmt::format("an integer from {}", min)
                                             : fmt::format("an integer from {} to {}", min, limit);
  return {name, valid, std::move(help),
          [=](const TomlValue& value) { *target = checked_integer(value, name, min, max, valid); },
          [=] { return fmt::format("{}", *target); }};
}

// A mesh dimension: an integer, or "auto" (0).
Key dimension_key(std::string name, int64_t* target, std::string help) {
  const std::string valid = fmt::format("an integer from 1 to {}, or \"auto\"", kMaxRanks);
  return {name, valid, std::move(help),
          [=](const TomlValue& value) {
            const bool automatic = value.kind == TomlValue::Kind::kString && value.text == "auto";
            *target = automatic ? 0 : checked_integer(value, name, 1, kMaxRanks, valid);
          },
          [=] { return *target == 0 ? "\"auto\"" : fmt::format("{}", *target); }};
}

enum class Bound { kClosed, kOpen };  // is the limit itself allowed?

Key real_key(std::string name, double* target, double min, Bound at_min, double max, Bound at_max,
             std::string help) {
  const std::string low = fmt::format("{} {}", at_min == Bound::kOpen ? "above" : "from", min);
  const std::string high =
      std::isinf(max) ? "" : fmt::format(" {} {}", at_max == Bound::kOpen ? "below" : "to", max);
  const std::string valid = fmt::format("a number {}{}", low, high);
  return {name, valid, std::move(help),
          [=](const TomlValue& value) {
            using Kind = TomlValue::Kind;
            const double x = value.real;
            const bool number = value.kind == Kind::kInteger || value.kind == Kind::kReal;
            const bool above = at_min == Bound::kOpen ? x > min : x >= min;
            const bool below = at_max == Bound::kOpen ? x < max : x <= max;
            if (!number || !above || !below || !std::isfinite(x)) {
              fail_value(value, name, value.describe(), valid);
            }
            *target = x;
          },
          // A negative value stands for "not set" (router.coef): it is not written.
          [=] { return *target < 0 ? "" : json_number(*target); }};
}

Key flag_key(std::string name, bool* target, std::string help) {
  return {name, "true or false", std::move(help),
          [=](const TomlValue& value) {
            if (value.kind != TomlValue::Kind::kBool) {
              fail_value(value, name, value.describe(), "true or false");
            }
            *target = value.boolean;
          },
          [=] { return *target ? "true" : "false"; }};
}

Key text_key(std::string name, std::string* target, std::string help) {
  return {name, "a string", std::move(help),
          [=](const TomlValue& value) {
            if (value.kind != TomlValue::Kind::kString || value.text.empty()) {
              fail_value(value, name, value.describe(), "a string that is not empty");
            }
            *target = value.text;
          },
          [=] { return target->empty() ? "" : toml_quote(*target); }};
}

// `choices[i]` stands for the enumerator with value i.
template <typename Enum>
Key choice_key(std::string name, Enum* target, std::vector<std::string> choices, std::string help) {
  std::string valid;
  for (const std::string& choice : choices)
    valid += (valid.empty() ? "" : " or ") + toml_quote(choice);
  return {name, valid, std::move(help),
          [=](const TomlValue& value) {
            const auto found = std::find(choices.begin(), choices.end(), value.text);
            if (value.kind == TomlValue::Kind::kString && value.text == "fp8") {
              MARROW_THROW(ExitCode::kUsage, Fix(fmt::format("set {} to {}", name, valid)),
                           "{}: {} = \"fp8\" is not supported for now", value.where, name);
            }
            if (value.kind != TomlValue::Kind::kString || found == choices.end()) {
              fail_value(value, name, value.describe(), valid);
            }
            *target = static_cast<Enum>(found - choices.begin());
          },
          [=] { return toml_quote(choices[static_cast<size_t>(*target)]); }};
}

// A list whose elements `read_item` appends and `write_items` prints.
template <typename T>
Key list_key(std::string name, std::vector<T>* target, std::string element, std::string help,
             std::function<T(const TomlValue&)> read_item,
             std::function<std::string(const T&)> write_item) {
  const std::string valid = fmt::format("a list of {}", element);
  return {name, valid, std::move(help),
          [=](const TomlValue& value) {
            if (value.kind != TomlValue::Kind::kArray) {
              fail_value(value, name, value.describe(), valid);
            }
            target->clear();
            for (const TomlValue& item : value.items) target->push_back(read_item(item));
          },
          [=] {
            std::string out;
            for (const T& item : *target) out += (out.empty() ? "" : ", ") + write_item(item);
            return "[" + out + "]";
          }};
}

std::string read_prefix(const TomlValue& value, const std::string& name, const std::string& valid) {
  if (value.kind != TomlValue::Kind::kString || value.text.empty()) {
    fail_value(value, name, value.describe(), valid);
  }
  return value.text;
}

DataSource read_source(const TomlValue& value) {
  const std::string valid = "a list of prefixes (\"data/corpus\") or {path = ..., weight = ...}";
  if (value.kind != TomlValue::Kind::kTable) return {read_prefix(value, "data.train", valid), 1.0};
  DataSource source;
  for (const TomlValue& item : value.items) {
    if (item.key == "path") {
      source.path = read_prefix(item, "data.train's path", "a corpus prefix");
    } else if (item.key == "weight") {
      const bool number =
          item.kind == TomlValue::Kind::kInteger || item.kind == TomlValue::Kind::kReal;
      if (!number || !(item.real > 0) || !std::isfinite(item.real)) {
        fail_value(item, "data.train's weight", item.describe(), "a number above 0");
      }
      source.weight = item.real;
    } else {
      MARROW_THROW(ExitCode::kUsage, Fix("give path and weight only"),
                   "{}: an element of data.train has no key {}", item.key_where,
                   json_quote(item.key));
    }
  }
  if (source.path.empty()) fail_value(value, "data.train", "a table without path", valid);
  return source;
}

std::string write_source(const DataSource& source) {
  if (source.weight == 1.0) return toml_quote(source.path);
  return fmt::format("{{path = {}, weight = {}}}", toml_quote(source.path),
                     json_number(source.weight));
}

Key required(Key key) {
  key.required = true;
  return key;
}

// Every key of the run config, in the order in which it is written.
std::vector<Key> all_keys(PretrainConfig& c) {
  constexpr double kInfinity = HUGE_VAL;
  const auto positive = [](std::string name, double* target, std::string help) {
    return real_key(std::move(name), target, 0, Bound::kOpen, kInfinity, Bound::kOpen,
                    std::move(help));
  };
  const auto not_negative = [](std::string name, double* target, std::string help) {
    return real_key(std::move(name), target, 0, Bound::kClosed, kInfinity, Bound::kOpen,
                    std::move(help));
  };
  const auto fraction = [](std::string name, double* target, std::string help) {
    return real_key(std::move(name), target, 0, Bound::kClosed, 1, Bound::kOpen, std::move(help));
  };
  const auto prefix = [](const TomlValue& value) {
    return read_prefix(value, "data.validation", "a list of corpus prefixes");
  };
  const auto trace_step = [](const TomlValue& value) {
    return checked_integer(value, "log.trace", 1, kMaxCount, "a list of steps from 1");
  };
  return {
      required(text_key("model.config", &c.model.config, "path of a Hugging Face config.json")),
      text_key("model.init_from", &c.model.init_from,
               "checkpoint or Hugging Face folder to start from; else random"),
      required(list_key<DataSource>(
          "data.train", &c.data.train, "prefixes or {path = ..., weight = ...}",
          "corpora: PREFIX.bin and PREFIX.idx", read_source, write_source)),
      list_key<std::string>("data.validation", &c.data.validation, "prefixes", "held-out corpora",
                            prefix, toml_quote),
      integer_key("data.seq_len", &c.data.seq_len, 1, "tokens of a sequence", kMaxBatch),
      integer_key("data.validate_every", &c.data.validate_every, 0,
                  "steps between validations; 0 = after the last step only"),
      integer_key("data.validate_sequences", &c.data.validate_sequences, 1,
                  "sequences of one validation"),
      flag_key("data.mask_documents", &c.data.mask_documents,
               "attention and positions restart at each document"),
      dimension_key("mesh.pp", &c.mesh.pp, "pipeline ranks"),
      dimension_key("mesh.dp", &c.mesh.dp, "data-parallel ranks"),
      dimension_key("mesh.cp", &c.mesh.cp, "ranks that share a sequence"),
      dimension_key("mesh.ep", &c.mesh.ep, "ranks that share the experts"),
      integer_key("mesh.replicate", &c.mesh.replicate, 1, "copies of the sharded state; divides dp",
                  kMaxRanks),
      choice_key("mesh.shard", &c.mesh.shard, {"step", "layer"},
                 "gather parameters once a step, or layer by layer (less memory)"),
      choice_key("mesh.schedule", &c.mesh.schedule, {"dualpipev", "1f1b"}, "pipeline schedule"),
      required(integer_key("train.steps", &c.train.steps, 1, "optimizer steps")),
      required(integer_key("train.global_batch", &c.train.global_batch, 1, "sequences of a step",
                           kMaxBatch)),
      integer_key("train.micro_batch", &c.train.micro_batch, 1,
                  "sequences of one forward and backward on a rank", kMaxBatch),
      integer_key("train.seed", &c.train.seed, 0, "of initial values and data order", INT64_MAX),
      choice_key("train.device", &c.train.device, {"cpu", "gpu"},
                 "default: a GPU where there is one"),
      choice_key("train.dtype", &c.train.dtype, {"bf16", "fp32"},
                 "of the forward and backward; default: bf16 on a GPU, fp32 on the CPU"),
      flag_key("train.deterministic", &c.train.deterministic, "bitwise equal runs on one mesh"),
      choice_key("train.recompute", &c.train.recompute, {"none", "cheap", "layer"},
                 "activations computed again in the backward"),
      flag_key("train.overlap", &c.train.overlap, "hide communication behind computation"),
      integer_key("train.skip_nonfinite", &c.train.skip_nonfinite, 0,
                  "steps with a non-finite gradient to skip before the run stops"),
      integer_key("train.cpu_threads", &c.train.cpu_threads, 0, "0 = cores / ranks", kMaxRanks),
      choice_key("optimizer.name", &c.optimizer.name, {"adamw", "muon"}, "update rule"),
      required(positive("optimizer.lr", &c.optimizer.lr, "peak learning rate")),
      choice_key("optimizer.schedule", &c.optimizer.schedule, {"wsd", "cosine", "constant"},
                 "learning rate after the warm-up"),
      integer_key("optimizer.warmup_steps", &c.optimizer.warmup_steps, 0, "linear rise from 0"),
      integer_key("optimizer.decay_steps", &c.optimizer.decay_steps, 0,
                  "wsd: the last steps, linear; cosine: length of the fall, 0 = all after warm-up"),
      not_negative("optimizer.min_lr", &c.optimizer.min_lr, "end of the fall (absolute)"),
      fraction("optimizer.beta1", &c.optimizer.beta1, "AdamW's first moment"),
      fraction("optimizer.beta2", &c.optimizer.beta2, "AdamW's second moment"),
      positive("optimizer.eps", &c.optimizer.eps, "AdamW's epsilon"),
      fraction("optimizer.muon_momentum", &c.optimizer.muon_momentum, "Muon's momentum"),
      not_negative("optimizer.weight_decay", &c.optimizer.weight_decay,
                   "of linear layers, experts, embedding and head"),
      not_negative("optimizer.clip_norm", &c.optimizer.clip_norm, "gradient norm; 0 = no clipping"),
      choice_key("optimizer.state_dtype", &c.optimizer.state_dtype, {"bf16", "fp32"},
                 "of the optimizer's moments"),
      choice_key("router.balance", &c.router.balance,
                 {"none", "micro", "sequence", "global", "bias"}, "load balancing of experts"),
      not_negative("router.coef", &c.router.coef,
                   "of the balance term; default: the model's router_aux_loss_coef, else 1e-3"),
      not_negative("router.z_loss", &c.router.z_loss, "coefficient of logsumexp(logits)^2"),
      flag_key("router.forced", &c.router.forced, "route evenly (for speed measurements only)"),
      text_key("checkpoint.dir", &c.checkpoint.dir, "default: checkpoints/ in log.dir"),
      integer_key("checkpoint.every", &c.checkpoint.every, 0, "steps; 0 = the last step only"),
      integer_key("checkpoint.keep", &c.checkpoint.keep, 0, "newest ones kept; 0 = all"),
      flag_key("checkpoint.async", &c.checkpoint.async, "write while training goes on"),
      flag_key("checkpoint.resume", &c.checkpoint.resume, "from the newest complete one in dir"),
      text_key("log.dir", &c.log.dir, "default: runs/ + the config file's name"),
      integer_key("log.every", &c.log.every, 1, "steps between console lines"),
      list_key<int64_t>("log.trace", &c.log.trace, "steps", "steps to trace", trace_step,
                        [](const int64_t& step) { return fmt::format("{}", step); }),
      flag_key("log.memory_trace", &c.log.memory_trace, "record allocations of the traced steps"),
      positive("log.watchdog_seconds", &c.log.watchdog_seconds,
               "a collective that takes longer ends the run"),
  };
}

std::string section_of(const std::string& name) { return name.substr(0, name.find('.')); }

[[noreturn]] void fail_unknown(const TomlValue& value, const std::string& name,
                               const std::vector<Key>& keys) {
  // The key's own name in another section is the likeliest slip, then a misspelling.
  std::vector<std::string> names;
  std::string nearest;
  for (const Key& key : keys) {
    names.push_back(key.name);
    if (key.name.substr(key.name.find('.') + 1) == name.substr(name.find('.') + 1)) {
      nearest = key.name;
    }
  }
  if (nearest.empty()) nearest = nearest_match(name, names);
  MARROW_THROW(ExitCode::kUsage,
               Fix(nearest.empty() ? "see marrow pretrain --help-config"
                                   : fmt::format("did you mean {}?", nearest)),
               "{}: unknown key {}", value.key_where, name);
}

// Reads `tree` into the members that `keys` are bound to; returns where each given key stands.
std::map<std::string, std::string> read_tree(const TomlValue& tree, const std::vector<Key>& keys,
                                             const std::string& path) {
  std::map<std::string, std::string> places;
  std::vector<std::string> sections;
  for (const Key& key : keys) {
    const std::string section = section_of(key.name);
    if (sections.empty() || sections.back() != section) sections.push_back(section);
  }
  for (const TomlValue& section : tree.items) {
    if (std::find(sections.begin(), sections.end(), section.key) == sections.end()) {
      const std::string nearest = nearest_match(section.key, sections);
      MARROW_THROW(ExitCode::kUsage,
                   Fix(nearest.empty() ? fmt::format("use {}", fmt::join(sections, ", "))
                                       : fmt::format("did you mean [{}]?", nearest)),
                   "{}: unknown section or top-level key {}", section.key_where,
                   json_quote(section.key));
    }
    MARROW_CHECK(section.kind == TomlValue::Kind::kTable, ExitCode::kUsage,
                 Fix(fmt::format("write [{}] above its keys", section.key)),
                 "{}: {} is a section, not {}", section.where, section.key, section.describe());
    for (const TomlValue& value : section.items) {
      const std::string name = section.key + "." + value.key;
      const auto key = std::find_if(keys.begin(), keys.end(),
                                    [&](const Key& candidate) { return candidate.name == name; });
      if (key == keys.end()) fail_unknown(value, name, keys);
      key->read(value);
      places[name] = value.where;
    }
  }
  for (const Key& key : keys) {
    MARROW_CHECK(!key.required || places.contains(key.name), ExitCode::kUsage,
                 Fix(fmt::format("add {} = {} ({})", key.name, key.valid, key.help)),
                 "{}: {} is missing", path, key.name);
  }
  return places;
}

}  // namespace

PretrainConfig read_pretrain_config(const std::string& path,
                                    const std::vector<std::string>& overrides, bool have_gpu) {
  TomlValue tree = parse_toml(read_text_file(path, ExitCode::kUsage), path);
  for (const std::string& assignment : overrides) override_toml(tree, assignment);
  PretrainConfig config;
  const auto places = read_tree(tree, all_keys(config), path);

  PretrainConfig::MeshSizes& mesh = config.mesh;
  const auto automatic = [&] {
    return (mesh.pp == 0) + (mesh.dp == 0) + (mesh.cp == 0) + (mesh.ep == 0);
  };
  if (automatic() > 1 && !places.contains("mesh.dp")) mesh.dp = 1;  // its default gives way
  MARROW_CHECK(automatic() <= 1, ExitCode::kUsage,
               Fix("set all but one of mesh.pp, dp, cp and ep to a number"),
               "{}: {} dimensions of [mesh] are \"auto\"", path, automatic());
  if (!places.contains("train.device")) {
    config.train.device = have_gpu ? TrainDevice::kGpu : TrainDevice::kCpu;
  }
  const bool gpu = config.train.device == TrainDevice::kGpu;
  MARROW_CHECK(!gpu || have_gpu, ExitCode::kUsage,
               Fix("set train.device = \"cpu\", or run marrow doctor to see why there is no GPU"),
               "{}: train.device is \"gpu\", but no GPU can be used here",
               gpu && !have_gpu ? places.at("train.device") : path);
  if (!places.contains("train.dtype")) {
    config.train.dtype = gpu ? TrainDtype::kBf16 : TrainDtype::kFp32;
  }
  if (config.log.dir.empty()) {
    config.log.dir = "runs/" + std::filesystem::path(path).stem().string();
  }
  if (config.checkpoint.dir.empty()) config.checkpoint.dir = config.log.dir + "/checkpoints";
  try {
    check_config(config);
  } catch (Error& error) {
    throw error.add_who("config " + path);
  }
  return config;
}

std::string to_toml(const PretrainConfig& config) {
  PretrainConfig copy = config;
  std::string out;
  std::string section;
  for (const Key& key : all_keys(copy)) {
    if (section_of(key.name) != section) {
      out += out.empty() ? "" : "\n";
      section = section_of(key.name);
      out += "[" + section + "]\n";
    }
    const std::string value = key.write();
    if (!value.empty()) out += key.name.substr(section.size() + 1) + " = " + value + "\n";
  }
  return out;
}

std::string config_help() {
  PretrainConfig defaults;
  std::string out =
      "# Every key of a run config, with its default. The five that have none must be "
      "given;\n# these five lines are a whole config:\n"
      "#   model.config = \"configs/models/qwen3-tiny.json\"\n"
      "#   data.train = [\"data/corpus\"]\n#   train.steps = 200\n"
      "#   train.global_batch = 16\n#   optimizer.lr = 1e-3\n";
  std::string section;
  for (const Key& key : all_keys(defaults)) {
    if (section_of(key.name) != section) {
      section = section_of(key.name);
      out += "\n[" + section + "]\n";
    }
    const bool from_machine = key.name == "train.device" || key.name == "train.dtype";
    const std::string fallback = key.required ? "REQUIRED" : from_machine ? "" : key.write();
    const std::string line = fmt::format("{} = {}", key.name.substr(section.size() + 1),
                                         fallback.empty() ? "..." : fallback);
    out += fmt::format("{:<30} # {}: {}\n", line, key.valid, key.help);
  }
  return out;
}

}  // namespace marrow
