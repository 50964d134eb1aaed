#include "ops/pch.h"

#include "train/run_report.h"

#include <filesystem>

#include "train/metrics.h"

namespace marrow {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kWidth = 560, kHeight = 230, kLeft = 58, kTop = 10, kBottom = 24;

struct Point {
  double x, y;
};
bool lower(const Point& a, const Point& b) { return a.y < b.y; }

struct Chart {
  const char* title;
  const char* metric;
  bool from_zero = true;
  double scale = 1;
};
constexpr Chart kCharts[] = {{"Loss", "loss", false},
                             {"Validation loss", "validation_loss", false},
                             {"Tokens per second", "tokens_per_second"},
                             {"Gradient norm before clipping", "grad_norm"},
                             {"Learning rate", "lr"},
                             {"Busiest expert's load over the mean", "expert_load_max_over_mean"},
                             {"Balance loss (1 = balanced)", "balance_loss", false},
                             {"Peak memory (GB)", "peak_memory_bytes", true, 1e-9},
                             {"Model TFLOP/s per device", "tflops_per_gpu"}};

constexpr const char* kStyle = R"(
:root{color-scheme:light dark}
body{margin:0 auto;max-width:1200px;padding:24px;font:15px/1.5 system-ui,sans-serif}
h2{font-size:14px;margin:0}.grid{display:grid;gap:12px;margin-bottom:12px}
.tiles{grid-template-columns:repeat(auto-fit,minmax(150px,1fr))}
.charts{grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr))}
.card{border:1px solid #8886;border-radius:8px;padding:12px}.tiles b{display:block;font-size:20px}
svg{width:100%;display:block}svg text{fill:#888;font-size:11px}svg line{stroke:#8884}
polyline{fill:none;stroke:#2a78d6;stroke-width:1.5;stroke-linejoin:round}pre{overflow:auto;font-size:13px}
)";

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const bool special = c == '<' || c == '>' || c == '&' || c == '"';
    out += special ? fmt::format("&#{};", static_cast<int>(c)) : std::string(1, c);
  }
  return out;
}

// At most 600 points that keep every spike: the lowest and highest of each bucket.
std::vector<Point> thinned(const std::vector<Point>& points) {
  constexpr size_t kBuckets = 300;
  if (points.size() <= 2 * kBuckets) return points;
  std::vector<Point> out;
  for (size_t bucket = 0; bucket < kBuckets; ++bucket) {
    const auto first = points.begin() + bucket * points.size() / kBuckets;
    const auto last = points.begin() + (bucket + 1) * points.size() / kBuckets;
    const auto [low, high] = std::minmax_element(first, last, lower);
    out.push_back(*std::min(low, high));
    if (low != high) out.push_back(*std::max(low, high));
  }
  return out;
}

// `unit` names x, which starts at 1 (steps) or 0.
std::string svg(const std::vector<Point>& points, bool from_zero, double x_low = 1, const char* unit = "step") {
  if (points.empty()) return "<p>no values</p>";
  const auto [lowest, highest] = std::minmax_element(points.begin(), points.end(), lower);
  const double y_low = from_zero ? std::min(lowest->y, 0.0) : lowest->y;
  const double y_high = std::max(highest->y, y_low + std::max(1e-9, 0.01 * std::abs(y_low)));
  const double x_high = std::max(points.back().x, x_low + 1);
  const auto sx = [&](double x) { return kLeft + (x - x_low) / (x_high - x_low) * (kWidth - kLeft); };
  const auto sy = [&](double y) { return kTop + (y_high - y) / (y_high - y_low) * (kHeight - kTop - kBottom); };
  std::string body;
  double y_step = std::pow(10.0, std::floor(std::log10((y_high - y_low) / 2)));
  if ((y_high - y_low) / y_step > 8) y_step *= 5;
  for (double i = std::ceil(y_low / y_step); i * y_step <= y_high; ++i) {
    body += fmt::format(R"(<line x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/><text x="4" y="{2:.1f}">{3:.6g}</text>)",
                        kLeft, kWidth, sy(i * y_step), i * y_step);
  }
  body += fmt::format(R"(<text x="{}" y="{}" text-anchor="end">{} {:.0f}</text>)", kWidth, kHeight - 6, unit, x_high);
  std::string line;
  for (const Point& point : thinned(points)) line += fmt::format("{:.1f},{:.1f} ", sx(point.x), sy(point.y));
  return fmt::format(R"(<svg viewBox="0 0 {} {}">{}<polyline points="{}"/></svg>)", kWidth, kHeight, body, line);
}

std::string tile(const std::string& name, double value, int digits) {
  const std::string text = std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : "none";
  return fmt::format("<div class=\"card\"><b>{}</b>{}</div>", text, name);
}

// The values of a metric over the steps; lines without it, or with null, are left out.
std::vector<Point> points_of(const std::vector<Json>& lines, const char* metric, double scale = 1) {
  std::vector<Point> points;
  for (const Json& line : lines) {
    const double value = line.double_or(metric, kNan) * scale;
    if (std::isfinite(value)) points.push_back({line.at("step").as_double(), value});
  }
  return points;
}

// GB that a traced step's allocations and frees left in use, by the milliseconds since the first of them; on a GPU its
// own. Empty where the trace has none (log.memory_trace).
std::vector<Point> memory_of(const std::string& trace) {
  std::map<int64_t, std::vector<Point>> of_device;  // by its type: 0 is the host
  for (const Json& event : Json::read_file(trace).at("traceEvents").elements()) {
    if (event.string_or("name", "") != "[memory]") continue;
    const Json& facts = event.at("args");
    std::vector<Point>& points = of_device[facts.at("Device Type").as_int()];
    const double ms = event.at("ts").as_double() / 1e3, first = points.empty() ? ms : points[0].x;
    points.push_back({points.empty() ? ms : ms - first, facts.at("Total Allocated").as_double() / 1e9});
  }
  if (of_device.empty()) return {};
  std::vector<Point> points = std::move(of_device.rbegin()->second);
  points[0].x = 0;
  return points;
}

double last_value(const std::vector<Point>& points) { return points.empty() ? kNan : points.back().y; }

}  // namespace

RunSummary write_run_report(const std::string& dir) {
  const std::string metrics = dir + "/metrics.jsonl";
  MARROW_CHECK(std::filesystem::is_regular_file(metrics), ExitCode::kUsage,
               Fix("give the folder of a run: [log] dir, by default runs/NAME"), "{} does not exist", metrics);
  std::vector<Json> lines;
  read_metrics(metrics, [&](const std::string&, const Json& line) { lines.push_back(line); });
  RunSummary summary{dir + "/report.html", 0, last_value(points_of(lines, "loss")),
                     last_value(points_of(lines, "validation_loss"))};
  double tokens = 0, seconds = 0;
  for (const Json& line : lines) {
    summary.steps = std::max(summary.steps, line.at("step").as_int());
    tokens += line.double_or("tokens", 0);
    seconds += line.double_or("step_seconds", 0);
  }
  std::string body = "<div class=\"grid tiles\">" + tile("steps", static_cast<double>(summary.steps), 0) +
                     tile("training loss, last step", summary.loss, 4) +
                     tile("validation loss, last", summary.validation_loss, 4) +
                     tile("million tokens", tokens / 1e6, 2) + tile("tokens per second, mean", tokens / seconds, 0) +
                     tile("peak memory, GB", last_value(points_of(lines, "peak_memory_bytes", 1e-9)), 2) +
                     "</div>\n<div class=\"grid charts\">\n";
  for (const Chart& chart : kCharts) {
    body += fmt::format("<div class=\"card\"><h2>{}</h2>{}</div>\n", chart.title,
                        svg(points_of(lines, chart.metric, chart.scale), chart.from_zero));
  }
  const std::string config = dir + "/run.toml";
  const std::string settings = std::filesystem::exists(config) ? read_text_file(config) : "";
  std::set<std::string> traces;  // read only where they tell of memory: they are large
  if (settings.find("memory_trace = true") != std::string::npos) {
    for (const auto& entry : std::filesystem::directory_iterator(dir)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("trace-") && name.ends_with(".json")) traces.insert(entry.path().string());
    }
  }
  for (const std::string& trace : traces) {
    std::string chart;
    try {
      chart = svg(memory_of(trace), true, 0, "ms");
    } catch (const Error& error) {  // the run is done: a damaged trace must not fail it
      chart = "<p>" + escaped(error.what()) + "</p>";
    }
    body += fmt::format("<div class=\"card\"><h2>Memory in use (GB), {}</h2>{}</div>\n",
                        escaped(std::filesystem::path(trace).filename().string()), chart);
  }
  body += "</div>\n";
  if (!settings.empty()) {
    body += "<details><summary>run.toml, resolved</summary><pre>" + escaped(settings) + "</pre></details>\n";
  }
  write_text_file_atomically(summary.path, fmt::format("<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">"
                                                       "<title>{0}</title><style>{1}</style>\n<h1>{0}</h1>"
                                                       "<p>from metrics.jsonl; x is the step</p>\n{2}</html>\n",
                                                       escaped(dir), kStyle, body));
  return summary;
}

}  // namespace marrow
