// A run as one page: DIR/report.html out of DIR/metrics.jsonl and DIR/run.toml.
#pragma once
#include <cstdint>
#include <string>

namespace marrow {

struct RunSummary {
  std::string path;  // of the page
  int64_t steps = 0;
  double loss = 0;             // of the last step; NaN where there is none
  double validation_loss = 0;  // the last one; NaN where there is none
};

// Writes the page; it needs no other file and no network. Errors: kUsage where the folder has no
// metrics.jsonl, kBadInput for a damaged line (a last line that was cut off is left out).
RunSummary write_run_report(const std::string& dir);

}  // namespace marrow
