#include "ops/pch.h"

#include "train/pretrain_config.h"

#define TOML_HEADER_ONLY 1
#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <bit>
#include <filesystem>

#include "base/files.h"
#include "base/json.h"

namespace marrow {
namespace {

// "run.toml:3:9", or "--set train.steps": where a key or value stands.
std::string place(const toml::source_region& source) {
  if (source.path->starts_with("--set")) return *source.path;
  return fmt::format("{}:{}:{}", *source.path, source.begin.line, source.begin.column);
}

// "the integer 3"
std::string described(const toml::node& node) {
  if (const auto* text = node.as_string()) return "the string " + json_quote(text->get());
  std::ostringstream out;
  out << "the " << node.type() << " " << toml::node_view(node);
  return out.str();
}

toml::table parse_toml(const std::string& text, const std::string& origin) {
  try {
    return toml::parse(text, origin);
  } catch (const toml::parse_error& error) {
    MARROW_THROW(ExitCode::kUsage, Fix("repair the TOML at that line"), "{}: not valid TOML: {}", place(error.source()),
                 error.description());
  }
}

// The value of "--set KEY=TEXT". What is no TOML value is a string: paths need no quotes.
toml::table parse_override(const std::string& text, const std::string& origin) {
  try {
    toml::table parsed = toml::parse("value = " + text, origin);
    if (parsed.size() == 1) return parsed;  // "1\nother = 2" is TOML, but not one value
  } catch (const toml::parse_error&) {
    // A bare word: falls through.
  }
  return toml::parse("value = " + json_quote(text), origin);
}

// Puts "train.steps=10" into `root`.
void apply_override(toml::table& root, const std::string& assignment) {
  const size_t equals = assignment.find('=');
  MARROW_CHECK(equals != std::string::npos && equals > 0 && equals + 1 < assignment.size(), ExitCode::kUsage,
               Fix("write --set SECTION.KEY=VALUE, as in --set train.steps=10"), "--set {} is no assignment",
               json_quote(assignment));
  const std::string path = assignment.substr(0, assignment.find_last_not_of(' ', equals - 1) + 1);
  const std::string origin = "--set " + path;
  toml::table value = parse_override(assignment.substr(equals + 1), origin);
  const toml::source_region source = value.begin()->first.source();
  const size_t dot = path.rfind('.');
  toml::table* table = &root;
  if (dot != std::string::npos) {
    const toml::key section(path.substr(0, dot), source);
    table = root.insert(section, toml::table{}).first->second.as_table();
    MARROW_CHECK(table != nullptr, ExitCode::kUsage, Fix("write --set SECTION.KEY=VALUE"), "{}: {} is no section",
                 origin, json_quote(section.str()));
  }
  const toml::key key(path.substr(dot + 1), source);
  value.begin()->second.visit([&](auto& node) { table->insert_or_assign(key, std::move(node)); });
}

// A TOML basic string, quotes included.
std::string toml_quote(const std::string& text) {
  std::string out;
  for (const char c : json_quote(text)) {
    out += c == '\x7f' ? "\\u007F" : std::string(1, c);  // a control character to TOML, not to JSON
  }
  return out;
}

// The values that a key takes. `read` returns the node that is no such value, or nullptr; `write`
// gives TOML, "" for a value that stands for "not set".
template <typename T>
struct Rule {
  std::string valid;  // "an integer from 1"
  std::function<const toml::node*(const toml::node&, T&)> read;
  std::function<std::string(const T&)> write;
};

// The rule for single values of type Value that satisfy `holds`.
template <typename T, typename Value = T, typename Holds>
Rule<T> plain_rule(std::string valid, Holds holds, std::function<std::string(const T&)> write) {
  const auto read = [=](const toml::node& node, T& target) -> const toml::node* {
    const std::optional<Value> value = node.value_exact<Value>();
    if (!value || !holds(*value)) return &node;
    target = *value;
    return nullptr;
  };
  return {std::move(valid), read, std::move(write)};
}

// The upper bounds keep sums and products of sizes far from an overflow.
constexpr int64_t kMaxCount = int64_t{1} << 40;
constexpr int64_t kMaxBatch = int64_t{1} << 24;
constexpr int64_t kMaxRanks = int64_t{1} << 15;

Rule<int64_t> integer(int64_t min, int64_t max = kMaxCount) {
  const std::string limit = max == INT64_MAX ? "" : fmt::format(" to 2^{}", std::bit_width(uint64_t(max)) - 1);
  return plain_rule<int64_t>(
      fmt::format("an integer from {}{}", min, limit), [=](int64_t x) { return min <= x && x <= max; },
      json_text<int64_t>);
}

// A mesh dimension: an integer, or "auto" (0).
Rule<int64_t> dimension() {
  Rule<int64_t> rule = integer(1, kMaxRanks);
  const auto read = [number = rule.read](const toml::node& node, int64_t& target) {
    if (node.value<std::string_view>() != "auto") return number(node, target);
    target = 0;
    return static_cast<const toml::node*>(nullptr);
  };
  return {rule.valid + ", or \"auto\"", read, [](int64_t size) { return size == 0 ? "\"auto\"" : json_text(size); }};
}

// A number in [min, max), or with `open` in (min, max).
Rule<double> real(double min, bool open = false, double max = HUGE_VAL) {
  const auto read = [=](const toml::node& node, double& target) -> const toml::node* {
    const double x = node.is_number() ? *node.value<double>() : std::nan("");
    if (!(open ? x > min : x >= min) || !(x < max)) return &node;
    target = x;
    return nullptr;
  };
  return {fmt::format("a number {} {}{}", open ? "above" : "from", min,
                      std::isinf(max) ? "" : fmt::format(" below {}", max)),
          read, [](double x) { return x < 0 ? "" : json_number(x); }};
}

Rule<bool> flag() {
  return plain_rule<bool>(
      "true or false", [](bool) { return true; }, json_text<bool>);
}

Rule<std::string> text() {
  return plain_rule<std::string>(
      "a string that is not empty", [](const std::string& x) { return !x.empty(); },
      [](const std::string& x) { return x.empty() ? "" : toml_quote(x); });
}

// `names[i]` stands for the enumerator with value i.
template <typename Enum>
Rule<Enum> choice(const std::vector<std::string>& names) {
  const auto read = [=](const toml::node& node, Enum& target) -> const toml::node* {
    const auto found = std::find(names.begin(), names.end(), node.value_or(std::string()));
    if (!node.is_string() || found == names.end()) return &node;
    target = static_cast<Enum>(found - names.begin());
    return nullptr;
  };
  return {fmt::format("\"{}\"", fmt::join(names, "\" or \"")), read,
          [=](Enum value) { return toml_quote(names[static_cast<size_t>(value)]); }};
}

template <typename T>
Rule<std::vector<T>> list_of(const std::string& elements, const Rule<T>& rule) {
  const auto read = [=](const toml::node& node, std::vector<T>& target) {
    const toml::node* fault = node.is_array() ? nullptr : &node;
    target.clear();
    for (size_t i = 0; fault == nullptr && i < node.as_array()->size(); ++i) {
      fault = rule.read(*node.as_array()->get(i), target.emplace_back());
    }
    return fault;
  };
  const auto write = [=](const std::vector<T>& values) {
    std::string items;
    for (const T& value : values) items += (items.empty() ? "" : ", ") + rule.write(value);
    return "[" + items + "]";
  };
  return {"a list of " + elements, read, write};
}

// "data/corpus", or {path = "data/corpus", weight = 2}.
const toml::node* read_source(const toml::node& node, DataSource& source) {
  if (!node.is_table()) return text().read(node, source.path);
  for (const auto& [key, value] : *node.as_table()) {
    MARROW_CHECK(key == "path" || key == "weight", ExitCode::kUsage, Fix("give path and weight only"),
                 "{}: an element of data.train has no key {}", place(key.source()), json_quote(key.str()));
    const toml::node* fault =
        key == "path" ? text().read(value, source.path) : real(0, true).read(value, source.weight);
    if (fault != nullptr) return fault;
  }
  return source.path.empty() ? &node : nullptr;
}

std::string write_source(const DataSource& source) {
  if (source.weight == 1.0) return toml_quote(source.path);
  return fmt::format("{{path = {}, weight = {}}}", toml_quote(source.path), json_number(source.weight));
}

// One key of the run config, bound to a member of one PretrainConfig.
struct Key {
  std::string name, valid, help;  // "train.steps"
  std::function<const toml::node*(const toml::node&)> read;
  std::function<std::string()> write;
  bool required = false;
};

template <typename T>
Key key(std::string name, T& target, const Rule<T>& rule, std::string help) {
  return {std::move(name), rule.valid, std::move(help),
          [&target, rule](const toml::node& node) { return rule.read(node, target); },
          [&target, rule] { return rule.write(target); }};
}

Key required(Key key) {
  key.required = true;
  return key;
}

// Every key of the run config, in the order in which it is written.
std::vector<Key> all_keys(PretrainConfig& c) {
  return {
      required(key("model.config", c.model.config, text(), "path of a Hugging Face config.json")),
      key("model.init_from", c.model.init_from, text(), "checkpoint or Hugging Face folder to start from; else random"),
      required(key("data.train", c.data.train,
                   list_of<DataSource>("prefixes (\"data/corpus\") or {path = ..., weight = a number above 0}",
                                       {"", read_source, write_source}),
                   "corpora: PREFIX.bin and PREFIX.idx")),
      key("data.validation", c.data.validation, list_of("prefixes", text()), "held-out corpora"),
      key("data.seq_len", c.data.seq_len, integer(1, kMaxBatch), "tokens of a sequence"),
      key("data.validate_every", c.data.validate_every, integer(0),
          "steps between validations; 0 = after the last step only"),
      key("data.validate_sequences", c.data.validate_sequences, integer(1), "sequences of one validation"),
      key("data.mask_documents", c.data.mask_documents, flag(), "attention and positions restart at each document"),
      key("mesh.pp", c.mesh.pp, dimension(), "pipeline ranks"),
      key("mesh.dp", c.mesh.dp, dimension(), "data-parallel ranks"),
      key("mesh.cp", c.mesh.cp, dimension(), "ranks that share a sequence"),
      key("mesh.ep", c.mesh.ep, dimension(), "ranks that share the experts"),
      key("mesh.replicate", c.mesh.replicate, integer(1, kMaxRanks), "copies of the sharded state; divides dp"),
      key("mesh.shard", c.mesh.shard, choice<ShardMode>({"step", "layer"}),
          "gather parameters once a step, or layer by layer (less memory)"),
      key("mesh.schedule", c.mesh.schedule, choice<PipelineSchedule>({"dualpipev", "1f1b"}), "pipeline schedule"),
      required(key("train.steps", c.train.steps, integer(1), "optimizer steps")),
      required(key("train.global_batch", c.train.global_batch, integer(1, kMaxBatch), "sequences of a step")),
      key("train.micro_batch", c.train.micro_batch, integer(1, kMaxBatch),
          "sequences of one forward and backward on a rank"),
      key("train.seed", c.train.seed, integer(0, INT64_MAX), "of initial values and data order"),
      key("train.device", c.train.device, choice<TrainDevice>({"cpu", "gpu"}), "default: a GPU where there is one"),
      key("train.dtype", c.train.dtype, choice<TrainDtype>({"bf16", "fp32"}),
          "of the forward and backward; default: bf16 on a GPU, fp32 on the CPU"),
      key("train.deterministic", c.train.deterministic, flag(), "bitwise equal runs on one mesh"),
      key("train.recompute", c.train.recompute, choice<Recompute>({"none", "cheap", "layer"}),
          "activations computed again in the backward: those without a product, or all but a layer's input"),
      key("train.overlap", c.train.overlap, flag(), "hide communication behind computation"),
      key("train.skip_nonfinite", c.train.skip_nonfinite, integer(0),
          "steps with a non-finite gradient to skip before the run stops"),
      key("train.cpu_threads", c.train.cpu_threads, integer(0, 1024), "0 = cores / ranks"),
      key("optimizer.name", c.optimizer.name, choice<OptimizerName>({"adamw", "muon"}), "update rule"),
      required(key("optimizer.lr", c.optimizer.lr, real(0, true), "peak learning rate")),
      key("optimizer.schedule", c.optimizer.schedule, choice<LearningRateSchedule>({"wsd", "cosine", "constant"}),
          "learning rate after the warm-up"),
      key("optimizer.warmup_steps", c.optimizer.warmup_steps, integer(0), "linear rise from 0"),
      key("optimizer.decay_steps", c.optimizer.decay_steps, integer(0),
          "wsd: the last steps, linear; cosine: length of the fall, 0 = all after warm-up"),
      key("optimizer.min_lr", c.optimizer.min_lr, real(0), "end of the fall (absolute)"),
      key("optimizer.beta1", c.optimizer.beta1, real(0, false, 1), "AdamW's first moment"),
      key("optimizer.beta2", c.optimizer.beta2, real(0, false, 1), "AdamW's second moment"),
      key("optimizer.eps", c.optimizer.eps, real(0, true), "AdamW's epsilon"),
      key("optimizer.muon_momentum", c.optimizer.muon_momentum, real(0, false, 1), "Muon's momentum"),
      key("optimizer.weight_decay", c.optimizer.weight_decay, real(0), "of linear layers, experts, embedding and head"),
      key("optimizer.clip_norm", c.optimizer.clip_norm, real(0), "gradient norm; 0 = no clipping"),
      key("optimizer.state_dtype", c.optimizer.state_dtype, choice<TrainDtype>({"bf16", "fp32"}),
          "of the optimizer's moments"),
      key("router.balance", c.router.balance, choice<BalanceMode>({"none", "micro", "sequence", "global", "bias"}),
          "load balancing of experts"),
      key("router.coef", c.router.coef, real(0),
          "of the balance term; default: the model's router_aux_loss_coef, else 1e-3"),
      key("router.z_loss", c.router.z_loss, real(0), "coefficient of logsumexp(logits)^2"),
      key("router.forced", c.router.forced, flag(), "route evenly (for speed measurements only)"),
      key("checkpoint.dir", c.checkpoint.dir, text(), "default: checkpoints/ in log.dir"),
      key("checkpoint.every", c.checkpoint.every, integer(0), "steps; 0 = the last step only"),
      key("checkpoint.keep", c.checkpoint.keep, integer(0), "newest ones kept; 0 = all"),
      key("checkpoint.async", c.checkpoint.async, flag(), "write while training goes on"),
      key("checkpoint.resume", c.checkpoint.resume, flag(), "from the newest complete one in dir"),
      key("log.dir", c.log.dir, text(), "default: runs/ + the config file's name"),
      key("log.every", c.log.every, integer(1), "steps between console lines"),
      key("log.trace", c.log.trace, list_of("steps from 1", integer(1)), "steps to trace"),
      key("log.memory_trace", c.log.memory_trace, flag(), "record allocations of the traced steps"),
      key("log.watchdog_seconds", c.log.watchdog_seconds, real(0, true), "a collective that takes longer ends the run"),
  };
}

[[noreturn]] void fail_unknown(const toml::key& key, const std::string& name, const std::vector<Key>& keys) {
  std::vector<std::string> names;
  for (const Key& known : keys) names.push_back(known.name);
  // The key's own name in another section is the likeliest slip, then a misspelling.
  const auto ending = name.substr(name.find('.'));
  const auto elsewhere =
      std::find_if(names.begin(), names.end(), [&](const auto& other) { return other.ends_with(ending); });
  const std::string nearest = elsewhere != names.end() ? *elsewhere : nearest_match(name, names);
  MARROW_THROW(ExitCode::kUsage,
               Fix(nearest.empty() ? "see marrow pretrain --help-config" : fmt::format("did you mean {}?", nearest)),
               "{}: unknown key {}", place(key.source()), name);
}

const toml::table& read_section(const toml::key& name, const toml::node& node) {
  const std::vector<std::string> sections{"model", "data", "mesh", "train", "optimizer", "router", "checkpoint", "log"};
  if (std::find(sections.begin(), sections.end(), name.str()) == sections.end()) {
    const std::string nearest = nearest_match(name.str(), sections);
    MARROW_THROW(ExitCode::kUsage,
                 Fix(nearest.empty() ? fmt::format("use {}", fmt::join(sections, ", "))
                                     : fmt::format("did you mean [{}]?", nearest)),
                 "{}: unknown section or top-level key {}", place(name.source()), json_quote(name.str()));
  }
  MARROW_CHECK(node.is_table(), ExitCode::kUsage, Fix("write [{}] above its keys", name.str()),
               "{}: {} is a section, not {}", place(node.source()), name.str(), described(node));
  return *node.as_table();
}

// Reads `tree` into the members that `keys` are bound to; returns where each given key stands.
std::map<std::string, std::string> read_tree(const toml::table& tree, const std::vector<Key>& keys,
                                             const std::string& path) {
  std::map<std::string, std::string> places;
  for (const auto& [section, node] : tree) {
    for (const auto& [key, value] : read_section(section, node)) {
      const std::string name = fmt::format("{}.{}", section.str(), key.str());
      const auto known =
          std::find_if(keys.begin(), keys.end(), [&](const Key& candidate) { return candidate.name == name; });
      if (known == keys.end()) fail_unknown(key, name, keys);
      const toml::node* fault = known->read(value);
      MARROW_CHECK(fault == nullptr, ExitCode::kUsage, Fix("set {} to {}", name, known->valid), "{}: {} is {}, not {}",
                   place(fault->source()), name, described(*fault), known->valid);
      places[name] = place(value.source());
    }
  }
  for (const Key& key : keys) {
    MARROW_CHECK(!key.required || places.contains(key.name), ExitCode::kUsage,
                 Fix("add {} = {} ({})", key.name, key.valid, key.help), "{}: {} is missing", path, key.name);
  }
  return places;
}

// Exactly one dimension may be "auto"; dp is by default, and gives way to another.
void settle_automatic(PretrainConfig::MeshSizes& mesh, bool dp_is_given, const std::string& path) {
  if (!dp_is_given && (mesh.pp == 0 || mesh.cp == 0 || mesh.ep == 0)) mesh.dp = 1;
  const int automatic = (mesh.pp == 0) + (mesh.dp == 0) + (mesh.cp == 0) + (mesh.ep == 0);
  MARROW_CHECK(automatic <= 1, ExitCode::kUsage, Fix("set all but one of mesh.pp, dp, cp and ep to a number"),
               "{}: {} dimensions of [mesh] are \"auto\"", path, automatic);
}

// "name = value" of every key under its section's heading: line(key, name) prints one.
std::string listing(const std::vector<Key>& keys,
                    const std::function<std::string(const Key&, const std::string&)>& line) {
  std::string out, section;
  for (const Key& key : keys) {
    const size_t dot = key.name.find('.');
    if (key.name.substr(0, dot) != section) {
      section = key.name.substr(0, dot);
      out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", section);
    }
    out += line(key, key.name.substr(dot + 1));
  }
  return out;
}

}  // namespace

PretrainConfig read_pretrain_config(const std::string& path, const std::vector<std::string>& overrides, bool have_gpu,
                                    bool needs_inputs) {
  toml::table tree = parse_toml(read_text_file(path, ExitCode::kUsage), path);
  for (const std::string& assignment : overrides) apply_override(tree, assignment);
  PretrainConfig config;
  const auto places = read_tree(tree, all_keys(config), path);
  settle_automatic(config.mesh, places.contains("mesh.dp"), path);

  if (!places.contains("train.device")) {
    config.train.device = have_gpu ? TrainDevice::kGpu : TrainDevice::kCpu;
  }
  const bool gpu = config.train.device == TrainDevice::kGpu;
  MARROW_CHECK(!gpu || have_gpu, ExitCode::kUsage,
               Fix("set train.device = \"cpu\", or run marrow doctor to see why there is no GPU"),
               "{}: train.device is \"gpu\", but no GPU can be used here", places.at("train.device"));
  if (!places.contains("train.dtype")) {
    config.train.dtype = gpu ? TrainDtype::kBf16 : TrainDtype::kFp32;
  }
  if (config.log.dir.empty()) {
    config.log.dir = "runs/" + std::filesystem::path(path).stem().string();
  }
  if (config.checkpoint.dir.empty()) config.checkpoint.dir = config.log.dir + "/checkpoints";
  try {
    check_config(config, needs_inputs);
  } catch (Error& error) {
    throw error.add_who("config " + path);
  }
  return config;
}

std::string to_toml(const PretrainConfig& config) {
  PretrainConfig copy = config;
  return listing(all_keys(copy), [](const Key& key, const std::string& name) {
    const std::string value = key.write();
    return value.empty() ? "" : fmt::format("{} = {}\n", name, value);
  });
}

std::string config_help() {
  PretrainConfig defaults;
  return "# Every key of a run config, with its default. The five that have none must be given;\n"
         "# these five lines are a whole config:\n"
         "#   model.config = \"configs/models/qwen3-tiny.json\"\n"
         "#   data.train = [\"data/corpus\"]\n#   train.steps = 200\n"
         "#   train.global_batch = 16\n#   optimizer.lr = 1e-3\n\n" +
         listing(all_keys(defaults), [](const Key& key, const std::string& name) {
           const bool from_machine = key.name == "train.device" || key.name == "train.dtype";
           const std::string value = from_machine ? "" : key.write();
           const std::string shown = key.required ? "REQUIRED" : value.empty() ? "..." : value;
           return fmt::format("{:<30} # {}: {}\n", name + " = " + shown, key.valid, key.help);
         });
}

}  // namespace marrow
