#include "ops/pch.h"

#include "train/pretrain_config.h"

#define TOML_HEADER_ONLY 1
// The parser refuses by itself, and with its place, what it asserts of a text; an assertion would end the process.
#define TOML_ASSERT(expression) static_cast<void>(0)
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

// A TOML basic string, quotes included. DEL is a control character to TOML, not to JSON.
std::string toml_quote(const std::string& text) {
  std::string out = json_quote(text);
  for (size_t at = 0; (at = out.find('\x7f')) != std::string::npos;) out.replace(at, 1, "\\u007F");
  return out;
}

// Puts "train.steps=10" into `root`. What is no TOML value is a string: paths need no quotes.
void apply_override(toml::table& root, const std::string& assignment) {
  const size_t equals = assignment.find('=');
  MARROW_CHECK(equals != std::string::npos && equals > 0 && equals + 1 < assignment.size(), ExitCode::kUsage,
               Fix("write --set SECTION.KEY=VALUE, as in --set train.steps=10"), "--set {} is no assignment",
               json_quote(assignment));
  const std::string path = assignment.substr(0, assignment.find_last_not_of(' ', equals - 1) + 1);
  const std::string origin = "--set " + path, text = assignment.substr(equals + 1);
  toml::table value;
  try {
    value = toml::parse("value = " + text, origin);
  } catch (const toml::parse_error&) {  // a bare word
  }
  if (value.size() != 1) value = toml::parse("value = " + toml_quote(text), origin);  // "1\nother = 2" is TOML, too
  const toml::source_region source = value.begin()->first.source();
  const size_t dot = path.rfind('.');
  toml::table* table = &root;
  if (dot != std::string::npos) {
    table = root.insert(toml::key(path.substr(0, dot), source), toml::table{}).first->second.as_table();
  }
  if (table == nullptr) return;  // read_section refuses what the file has instead
  const toml::key key(path.substr(dot + 1), source);
  value.begin()->second.visit([&](auto& node) { table->insert_or_assign(key, std::move(node)); });
}

using Fault = const toml::node*;  // what is no valid value; null: nothing

// One key of the run config, bound to a member of one PretrainConfig.
struct Key {
  std::string name, valid, help;  // "train.steps", "an integer from 1"
  std::function<Fault(const toml::node&)> read;
  std::function<std::string()> write;  // TOML; "" for a value that stands for "not set"
  bool required = false;
};

// The upper bounds keep sums and products of sizes far from an overflow.
constexpr int64_t kMaxCount = int64_t{1} << 40, kMaxBatch = int64_t{1} << 24, kMaxRanks = int64_t{1} << 15;

Key integer(std::string name, int64_t& target, std::string help, int64_t min = 0, int64_t max = kMaxCount) {
  const std::string limit = max == INT64_MAX ? "" : fmt::format(" to 2^{}", std::bit_width(uint64_t(max)) - 1);
  const auto read = [=, &target](const toml::node& node) -> Fault {
    const std::optional<int64_t> value = node.value_exact<int64_t>();
    if (!value || *value < min || *value > max) return &node;
    target = *value;
    return nullptr;
  };
  return {std::move(name), fmt::format("an integer from {}{}", min, limit), std::move(help), read,
          [&target] { return json_text(target); }};
}

// A mesh dimension: an integer, or "auto" (0).
Key dimension(std::string name, int64_t& target, std::string help) {
  Key key = integer(std::move(name), target, std::move(help), 1, kMaxRanks);
  key.valid += ", or \"auto\"";
  key.read = [&target, number = key.read](const toml::node& node) -> Fault {
    if (node.value<std::string_view>() != "auto") return number(node);
    target = 0;
    return nullptr;
  };
  key.write = [&target] { return target == 0 ? "\"auto\"" : json_text(target); };
  return key;
}

// A number in [min, max), or with min = kAboveZero in (0, max).
constexpr double kAboveZero = std::numeric_limits<double>::denorm_min();
Key real(std::string name, double& target, std::string help, double min = 0, double max = HUGE_VAL) {
  const std::string limit = std::isinf(max) ? "" : fmt::format(" below {}", max);
  const auto read = [=, &target](const toml::node& node) -> Fault {
    const double value = node.is_number() ? *node.value<double>() : std::nan("");
    if (!(value >= min && value < max)) return &node;
    target = value;
    return nullptr;
  };
  return {std::move(name), fmt::format("a number {} 0{}", min > 0 ? "above" : "from", limit), std::move(help), read,
          [&target] { return target < 0 ? "" : json_number(target); }};
}

Key flag(std::string name, bool& target, std::string help) {
  const auto read = [&target](const toml::node& node) {
    if (node.is_boolean()) target = *node.value<bool>();
    return node.is_boolean() ? nullptr : &node;
  };
  return {std::move(name), "true or false", std::move(help), read, [&target] { return json_text(target); }};
}

Key text(std::string name, std::string& target, std::string help) {
  const auto read = [&target](const toml::node& node) {
    if (node.is_string()) target = *node.value<std::string>();
    return node.is_string() && !target.empty() ? nullptr : &node;
  };
  return {std::move(name), "a string that is not empty", std::move(help), read,
          [&target] { return target.empty() ? "" : toml_quote(target); }};
}

// `names[i]` stands for the enumerator with value i.
template <typename Enum>
Key choice(std::string name, Enum& target, const std::vector<std::string>& names, std::string help) {
  const auto read = [=, &target](const toml::node& node) -> Fault {
    const auto found = std::find(names.begin(), names.end(), node.value_or(std::string()));
    if (!node.is_string() || found == names.end()) return &node;
    target = static_cast<Enum>(found - names.begin());
    return nullptr;
  };
  return {std::move(name), fmt::format("\"{}\"", fmt::join(names, "\" or \"")), std::move(help), read,
          [=, &target] { return toml_quote(names[static_cast<size_t>(target)]); }};
}

// `element` makes a nameless key of one element.
template <typename T, typename Element>
Key list(std::string name, std::vector<T>& target, const std::string& elements, std::string help, Element element) {
  const auto read = [=, &target](const toml::node& node) {
    Fault fault = node.is_array() ? nullptr : &node;
    target.clear();
    for (size_t i = 0; fault == nullptr && i < node.as_array()->size(); ++i) {
      fault = element(target.emplace_back()).read(*node.as_array()->get(i));
    }
    return fault;
  };
  const auto write = [=, &target] {
    std::vector<std::string> items;
    for (T& value : target) items.push_back(element(value).write());
    return fmt::format("[{}]", fmt::join(items, ", "));
  };
  return {std::move(name), "a list of " + elements, std::move(help), read, write};
}

// "data/corpus", or {path = "data/corpus", weight = 2}.
Key source(CorpusWeight& source) {
  const auto read = [&source](const toml::node& node) -> Fault {
    const Key path = text("", source.path, ""), weight = real("", source.weight, "", kAboveZero);
    if (!node.is_table()) return path.read(node);
    for (const auto& [key, value] : *node.as_table()) {
      MARROW_CHECK(key == "path" || key == "weight", ExitCode::kUsage, Fix("give path and weight only"),
                   "{}: an element of data.train has no key {}", place(key.source()), json_quote(key.str()));
      const Fault fault = (key == "path" ? path : weight).read(value);
      if (fault != nullptr) return fault;
    }
    return source.path.empty() ? &node : nullptr;
  };
  return {"", "", "", read, [&source] {
            if (source.weight == 1.0) return toml_quote(source.path);
            return fmt::format("{{path = {}, weight = {}}}", toml_quote(source.path), json_number(source.weight));
          }};
}

Key required(Key key) {
  key.required = true;
  return key;
}

// Every key of the run config, in the order in which it is written.
std::vector<Key> all_keys(PretrainConfig& config) {
  auto& [model, data, mesh, train, optimizer, router, checkpoint, log, origin] = config;
  const auto prefix = [](std::string& element) { return text("", element, ""); };
  const auto step = [](int64_t& element) { return integer("", element, "", 1); };
  return {
      required(text("model.config", model.config, "path of a Hugging Face config.json")),
      text("model.init_from", model.init_from, "checkpoint or Hugging Face folder to start from; else random"),
      required(list("data.train", data.train, "prefixes (\"data/corpus\") or {path = ..., weight = a number above 0}",
                    "corpora: PREFIX.bin and PREFIX.idx", source)),
      list("data.validation", data.validation, "prefixes", "held-out corpora", prefix),
      integer("data.seq_len", data.seq_len, "tokens of a sequence", 1, kMaxBatch),
      integer("data.validate_every", data.validate_every, "steps between validations; 0 = after the last step only"),
      integer("data.validate_sequences", data.validate_sequences, "sequences of one validation", 1),
      flag("data.mask_documents", data.mask_documents, "attention and positions restart at each document"),
      dimension("mesh.pp", mesh.pp, "pipeline ranks"),
      dimension("mesh.dp", mesh.dp, "data-parallel ranks"),
      dimension("mesh.cp", mesh.cp, "ranks that share a sequence"),
      dimension("mesh.ep", mesh.ep, "ranks that share the experts"),
      integer("mesh.replicate", mesh.replicate, "copies of the sharded state; divides dp", 1, kMaxRanks),
      choice("mesh.shard", mesh.shard, {"step", "layer"}, "gather parameters once a step, or by layer (less memory)"),
      choice("mesh.schedule", mesh.schedule, {"dualpipev", "1f1b"}, "pipeline schedule"),
      required(integer("train.steps", train.steps, "optimizer steps", 1)),
      required(integer("train.global_batch", train.global_batch, "sequences of a step", 1, kMaxBatch)),
      integer("train.micro_batch", train.micro_batch, "sequences of one pass on a rank", 1, kMaxBatch),
      integer("train.seed", train.seed, "of initial values and data order", 0, INT64_MAX),
      choice("train.device", train.device, {"cpu", "gpu"}, "default: a GPU where there is one"),
      choice("train.dtype", train.dtype, {std::begin(kTrainDtypeNames), std::end(kTrainDtypeNames)},
             "of the passes; default: bf16 on a GPU, fp32 on the CPU; fp8: bf16 with weights' products in E4M3"),
      flag("train.fp8_at_any_size", train.fp8_at_any_size, "also where bf16 is faster: to see what fp8 does to a loss"),
      flag("train.deterministic", train.deterministic, "bitwise equal runs on one mesh"),
      choice("train.recompute", train.recompute, {"none", "cheap", "layer"}, "activations made again in the backward"),
      flag("train.overlap", train.overlap, "hide communication behind computation"),
      integer("train.skip_nonfinite", train.skip_nonfinite, "steps with a non-finite gradient to skip before the end"),
      integer("train.cpu_threads", train.cpu_threads, "0 = cores / ranks", 0, 1024),
      choice("optimizer.name", optimizer.name, {"adamw", "muon"}, "update rule"),
      required(real("optimizer.lr", optimizer.lr, "peak learning rate", kAboveZero)),
      choice("optimizer.schedule", optimizer.schedule, {"wsd", "cosine", "constant"}, "rate after the warm-up"),
      integer("optimizer.warmup_steps", optimizer.warmup_steps, "linear rise from 0"),
      integer("optimizer.decay_steps", optimizer.decay_steps,
              "wsd: the last steps, linear; cosine: length of the fall, 0 = all after warm-up"),
      real("optimizer.min_lr", optimizer.min_lr, "end of the fall (absolute)"),
      real("optimizer.beta1", optimizer.beta1, "AdamW's first moment", 0, 1),
      real("optimizer.beta2", optimizer.beta2, "AdamW's second moment", 0, 1),
      real("optimizer.eps", optimizer.eps, "AdamW's epsilon", kAboveZero),
      real("optimizer.muon_momentum", optimizer.muon_momentum, "Muon's momentum", 0, 1),
      real("optimizer.weight_decay", optimizer.weight_decay, "of linear layers, experts, embedding and head"),
      real("optimizer.clip_norm", optimizer.clip_norm, "gradient norm; 0 = no clipping"),
      choice("optimizer.state_dtype", optimizer.state_dtype, {"bf16", "fp32"}, "of the optimizer's moments"),
      choice("router.balance", router.balance, {"none", "micro", "sequence", "global", "bias"}, "of experts' load"),
      real("router.coef", router.coef, "of the balance term; default: the model's router_aux_loss_coef, else 1e-3"),
      real("router.z_loss", router.z_loss, "coefficient of logsumexp(logits)^2"),
      flag("router.forced", router.forced, "route evenly (for speed measurements only)"),
      text("checkpoint.dir", checkpoint.dir, "default: checkpoints/ in log.dir"),
      integer("checkpoint.every", checkpoint.every, "steps; 0 = the last step only"),
      integer("checkpoint.keep", checkpoint.keep, "newest ones kept; 0 = all"),
      flag("checkpoint.async", checkpoint.async, "write while training goes on"),
      flag("checkpoint.resume", checkpoint.resume, "from the newest complete one in dir"),
      text("log.dir", log.dir, "default: runs/ + the config file's name"),
      integer("log.every", log.every, "steps between console lines; one at least every 30 s", 1),
      list("log.trace", log.trace, "steps from 1", "steps to trace", step),
      flag("log.memory_trace", log.memory_trace, "record allocations of the traced steps"),
      real("log.watchdog_seconds", log.watchdog_seconds, "a collective that takes longer ends the run", kAboveZero),
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
      const Fault fault = known->read(value);
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
  config.origin = {path, places};
  // One dimension may be "auto"; dp is by default, and gives way to another.
  auto& mesh = config.mesh;
  if (!places.contains("mesh.dp") && (mesh.pp == 0 || mesh.cp == 0 || mesh.ep == 0)) mesh.dp = 1;
  const int automatic = (mesh.pp == 0) + (mesh.dp == 0) + (mesh.cp == 0) + (mesh.ep == 0);
  MARROW_CHECK(automatic <= 1, ExitCode::kUsage, Fix("set all but one of mesh.pp, dp, cp and ep to a number"),
               "{}: {} dimensions of [mesh] are \"auto\"", path, automatic);

  if (!places.contains("train.device")) config.train.device = have_gpu ? TrainDevice::kGpu : TrainDevice::kCpu;
  const bool gpu = config.train.device == TrainDevice::kGpu;
  MARROW_CHECK(!gpu || have_gpu, ExitCode::kUsage,
               Fix("set train.device = \"cpu\", or run marrow doctor to see why there is no GPU"),
               "{}: train.device is \"gpu\", but no GPU can be used here", places.at("train.device"));
  if (!places.contains("train.dtype")) config.train.dtype = gpu ? TrainDtype::kBf16 : TrainDtype::kFp32;
  if (config.log.dir.empty()) config.log.dir = "runs/" + std::filesystem::path(path).stem().string();
  if (config.checkpoint.dir.empty()) config.checkpoint.dir = config.log.dir + "/checkpoints";
  try {
    check_config(config, needs_inputs);
  } catch (Error& error) {
    throw locate(error, config);
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

std::vector<std::string> changed_settings(const std::string& before, const PretrainConfig& now) {
  const auto settings = [](const std::string& toml) {
    std::vector<std::string> out;
    std::istringstream lines(toml);
    for (std::string line, section; std::getline(lines, line);) {
      if (line.starts_with('[')) section = line.substr(1, line.size() - 2);
      if (line.find(" = ") != std::string::npos) out.push_back(fmt::format("{}.{}", section, line));
    }
    return out;
  };
  const std::vector<std::string> old = settings(before);
  std::vector<std::string> changed = settings(to_toml(now));
  std::erase_if(changed, [&](const std::string& setting) { return std::ranges::count(old, setting) > 0; });
  return changed;
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
