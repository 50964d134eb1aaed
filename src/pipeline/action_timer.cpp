#include "pipeline/action_timer.h"

#include <filesystem>

#include "base/json.h"

namespace marrow {
namespace {

constexpr ActionKind kKinds[] = {ActionKind::kForward, ActionKind::kBackward, ActionKind::kBackwardInput,
                                 ActionKind::kWeightGrad, ActionKind::kForwardBackward};

}  // namespace

ActionTimer::ActionTimer(at::Device device) : device_(device), origin_(device) {
  origin_.wait();
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  origin_seconds_ = std::chrono::duration<double>(now).count();
}

void ActionTimer::begin(const PipelineAction& action) {
  marks_.push_back({action, DeviceMark(device_), DeviceMark(device_)});
}
void ActionTimer::input_arrived() { marks_.back().start = DeviceMark(device_); }
void ActionTimer::output_ready() { marks_.back().end = DeviceMark(device_); }

std::vector<TimedAction> ActionTimer::timeline() const {
  std::vector<TimedAction> actions;
  for (const auto& [action, start, end] : marks_) {
    start.wait();
    end.wait();
    actions.push_back(
        {action, origin_seconds_ + start.seconds_since(origin_), origin_seconds_ + end.seconds_since(origin_)});
  }
  return actions;
}

std::string timeline_path(const std::string& folder, int64_t step, int64_t rank) {
  return fmt::format("{}/timeline-{:08}-rank-{:04}.json", folder, step, rank);
}

void remove_timelines(const std::string& folder, int64_t after_step) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    long long step = 0;
    const std::string name = entry.path().filename().string();
    const bool one = std::sscanf(name.c_str(), "timeline-%lld-rank-", &step) == 1 ||
                     std::sscanf(name.c_str(), "trace-%lld", &step) == 1;
    if (one && step > after_step) std::filesystem::remove(entry.path());
  }
}

std::string timeline_json(const std::vector<TimedAction>& actions, const std::string& mesh) {
  std::string list;
  for (const TimedAction& timed : actions) {
    JsonWriter json;
    json.field("kind", action_name(timed.action.kind));
    for (const auto& [key, pass] : {std::pair("forward", timed.action.forward), {"backward", timed.action.backward}}) {
      if (pass) json.field(key, std::array{pass.slot, pass.micro_batch});
    }
    list += list.empty() ? "\n" : ",\n";
    list += json.field("start", timed.start, "end", timed.end).text();
  }
  return JsonWriter().field("mesh", mesh).raw("actions", "[" + list + "\n]").text() + "\n";
}

std::vector<TimedAction> read_timeline(const std::string& path, const std::string& mesh) {
  std::vector<TimedAction> actions;
  const Json file = Json::read_file(path);
  const std::string measured = file.at("mesh").as_string();
  MARROW_CHECK(measured == mesh, ExitCode::kUsage,
               Fix("give marrow plan the config of the run that was measured, its run.toml"),
               "{} is of the mesh {}, the config has {}", path, measured, mesh);
  for (const Json& json : file.at("actions").elements()) {
    const std::string name = json.at("kind").as_string();
    const auto kind = std::ranges::find(kKinds, name, action_name);
    if (kind == std::end(kKinds)) json.at("kind").fail("unknown kind " + name, Fix("use the file as the run wrote it"));
    const auto pass = [&](const char* key) {
      return json.has(key) ? PipelinePass{json.at(key).at(0).as_int(), json.at(key).at(1).as_int()} : PipelinePass{};
    };
    actions.push_back(
        {{*kind, pass("forward"), pass("backward")}, json.at("start").as_double(), json.at("end").as_double()});
    if (!actions.back().action.forward && !actions.back().action.backward) {
      json.fail("neither \"forward\" nor \"backward\"", Fix("use the file as the run wrote it"));
    }
  }
  return actions;
}

}  // namespace marrow
