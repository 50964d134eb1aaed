// When a rank began and ended the actions of a step, as measured.
#pragma once
#include <c10/core/Event.h>

#include "ops/pch.h"
#include "pipeline/schedule_simulator.h"

namespace marrow {

// On a GPU by events of its stream, so that nothing waits meanwhile; on the CPU by the clock.
class ActionTimer {
 public:
  explicit ActionTimer(at::Device device);
  void begin(const PipelineAction& action);
  void input_arrived();  // the action begins here: until now the rank waited
  void output_ready();   // the action ends here, unless more comes of it
  // In seconds of the system clock, which the ranks of a host share. Waits for the device.
  std::vector<TimedAction> timeline() const;

 private:
  struct Mark {
    double seconds = 0;
    std::optional<c10::Event> event;  // on a GPU, in place of seconds
  };
  struct Marks {
    PipelineAction action;
    Mark start, end;
  };
  Mark now() const;
  double seconds(const Mark& mark) const;
  at::Device device_;
  Mark origin_;  // its event is at its seconds
  std::vector<Marks> marks_;
};

// The file of a rank and step that a traced run writes: {"mesh": "pp 2 x …", "actions": [{"kind": "pair", "forward":
// [SLOT, MICRO-BATCH], "backward": [SLOT, MICRO-BATCH], "start": SECONDS, "end": SECONDS}, …]}.
std::string timeline_path(const std::string& folder, int64_t step, int64_t rank);
void remove_timelines(const std::string& folder, int64_t after_step);  // and traces, of any rank: of a run begun anew
std::string timeline_json(const std::vector<TimedAction>& actions, const std::string& mesh);
std::vector<TimedAction> read_timeline(const std::string& path, const std::string& mesh);  // Error: of another mesh

}  // namespace marrow
