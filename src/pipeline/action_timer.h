// When a rank began and ended the actions of a step, as measured.
#pragma once
#include "ops/device.h"
#include "pipeline/schedule_simulator.h"

namespace marrow {

// Nothing waits meanwhile.
class ActionTimer {
 public:
  explicit ActionTimer(at::Device device);
  void begin(const PipelineAction& action);
  void input_arrived();  // the action begins here: until now the rank waited
  void output_ready();   // the action ends here, unless more comes of it
  // In seconds of the system clock, which the ranks of a host share. Waits for the device.
  std::vector<TimedAction> timeline() const;

 private:
  struct Marks {
    PipelineAction action;
    DeviceMark start, end;
  };
  at::Device device_;
  DeviceMark origin_;
  double origin_seconds_;  // of the system clock
  std::vector<Marks> marks_;
};

// The file of a rank and step that a traced run writes: {"mesh": "pp 2 x …", "actions": [{"kind": "pair", "forward":
// [SLOT, MICRO-BATCH], "backward": [SLOT, MICRO-BATCH], "start": SECONDS, "end": SECONDS}, …]}.
std::string timeline_path(const std::string& folder, int64_t step, int64_t rank);
void remove_timelines(const std::string& folder, int64_t after_step);  // and traces, of any rank: of a run begun anew
std::string timeline_json(const std::vector<TimedAction>& actions, const std::string& mesh);
std::vector<TimedAction> read_timeline(const std::string& path, const std::string& mesh);  // Error: of another mesh

}  // namespace marrow
