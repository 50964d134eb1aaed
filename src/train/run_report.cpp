#include "ops/pch.h"

#include "train/run_report.h"

#include <filesystem>
#include <limits>

#include "base/files.h"
#include "base/json.h"

namespace marrow {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kWidth = 560, kHeight = 240, kLeft = 58, kRight = 20, kTop = 10, kBottom = 26;

struct Point {
  double x, y;
};
struct Series {
  std::string label;
  std::vector<Point> points;
};
struct Chart {
  std::string title;
  bool from_zero;
  std::vector<Series> series;
};

constexpr const char* kStyle = R"(
:root{color-scheme:light dark;--page:#f9f9f7;--card:#fcfcfb;--ink:#0b0b0b;--soft:#52514e;
--muted:#898781;--grid:#e1e0d9;--axis:#c3c2b7;--s0:#2a78d6;--s1:#eb6834}
@media(prefers-color-scheme:dark){:root{--page:#0d0d0d;--card:#1a1a19;--ink:#fff;--soft:#c3c2b7;
--grid:#2c2c2a;--axis:#383835;--s0:#3987e5;--s1:#d95926}}
body{margin:0 auto;max-width:1200px;padding:24px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;margin:0}h2{font-size:14px;margin:0 0 4px}p{color:var(--soft);margin:4px 0 16px}
.tiles,.charts{display:grid;gap:12px;margin-bottom:12px}
.tiles{grid-template-columns:repeat(auto-fit,minmax(150px,1fr))}
.charts{grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr))}
.card{background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:12px}
.tiles b{display:block;font-size:20px}.tiles span,.legend{color:var(--soft);font-size:13px}
.legend i{display:inline-block;width:12px;height:3px;border-radius:2px;margin:0 5px 3px 12px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--muted);font-size:11px}
svg .read{fill:var(--ink);font-size:12px}.grid{stroke:var(--grid)}.axis{stroke:var(--axis)}
.line{fill:none;stroke-width:1.5;stroke-linejoin:round}
pre{overflow:auto;font-size:13px}summary{cursor:pointer;color:var(--soft)}
)";

// On hover: the nearest point of each series, by the x of the pointer.
constexpr const char* kScript = R"(
for(const s of document.querySelectorAll("svg[data-series]")){
const d=JSON.parse(s.dataset.series),r=JSON.parse(s.dataset.range),t=s.querySelector(".read"),
c=s.querySelector(".cross"),num=v=>Math.abs(v)>=1e4||(v&&Math.abs(v)<1e-3)?v.toExponential(3):
String(+v.toPrecision(5));
s.onpointerleave=()=>{t.textContent="";c.setAttribute("visibility","hidden")};
s.onpointermove=e=>{const b=s.getBoundingClientRect(),px=(e.clientX-b.left)/b.width*r[4],
x=r[0]+(px-r[2])/(r[3]-r[2])*(r[1]-r[0]),near=p=>p.reduce((a,q)=>Math.abs(q[0]-x)<Math.abs(a[0]-x)?q:a);
const hit=d.filter(q=>q[1].length).map(q=>[q[0],near(q[1])]);if(!hit.length)return;
const sx=r[2]+(hit[0][1][0]-r[0])/((r[1]-r[0])||1)*(r[3]-r[2]);c.setAttribute("x1",sx);
c.setAttribute("x2",sx);c.setAttribute("visibility","visible");
t.textContent=hit.map(h=>h[0]+" "+num(h[1][1])+" at step "+h[1][0]).join("   ")}}
)";

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    out += c == '<'   ? "&lt;"
           : c == '>' ? "&gt;"
           : c == '&' ? "&amp;"
           : c == '"' ? "&quot;"
                      : std::string(1, c);
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
    auto [low, high] =
        std::minmax_element(first, last, [](const Point& a, const Point& b) { return a.y < b.y; });
    if (low > high) std::swap(low, high);
    out.push_back(*low);
    if (low != high) out.push_back(*high);
  }
  return out;
}

// A step of 1, 2 or 5 times a power of ten that cuts `range` into at most `count` parts.
double nice_step(double range, int count) {
  const double power = std::pow(10.0, std::floor(std::log10(range / count)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (range / (factor * power) <= count) return factor * power;
  }
  return 10 * power;
}

std::string svg(const Chart& chart) {
  double x_low = 1, x_high = 1, y_low = HUGE_VAL, y_high = -HUGE_VAL;
  for (const Series& series : chart.series) {
    for (const Point& point : series.points) {
      x_high = std::max(x_high, point.x);
      y_low = std::min(y_low, point.y);
      y_high = std::max(y_high, point.y);
    }
  }
  if (y_low > y_high) return "<p>no values</p>";
  if (chart.from_zero) y_low = std::min(y_low, 0.0);
  if (y_high - y_low <= 1e-9 * std::abs(y_high)) {
    const double margin = y_high == 0 ? 1.0 : 0.1 * std::abs(y_high);
    y_low -= chart.from_zero ? 0 : margin;
    y_high += margin;
  }
  if (x_high <= x_low) x_high = x_low + 1;
  const auto sx = [&](double x) {
    return kLeft + (x - x_low) / (x_high - x_low) * (kWidth - kLeft - kRight);
  };
  const auto sy = [&](double y) {
    return kHeight - kBottom - (y - y_low) / (y_high - y_low) * (kHeight - kTop - kBottom - 14);
  };
  std::string body;
  const double y_step = nice_step(y_high - y_low, 5);
  for (double y = std::ceil(y_low / y_step) * y_step; y <= y_high + 1e-9 * y_step; y += y_step) {
    const double label = std::abs(y) < 1e-9 * y_step ? 0.0 : y;
    body += fmt::format(
        R"(<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/><text x="{}" y="{:.1f}" text-anchor="end">{:.6g}</text>)",
        kLeft, kWidth - kRight, sy(y), sy(y), kLeft - 6, sy(y) + 4, label);
  }
  const double x_step = std::max(1.0, nice_step(x_high - x_low, 7));
  for (double x = std::ceil(x_low / x_step) * x_step; x <= x_high; x += x_step) {
    body += fmt::format(R"(<text x="{:.1f}" y="{}" text-anchor="middle">{:.0f}</text>)", sx(x),
                        kHeight - 8, x);
  }
  body += fmt::format(R"(<line class="axis" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>)", kLeft,
                      kWidth - kRight, kHeight - kBottom);
  std::string data;
  for (size_t i = 0; i < chart.series.size(); ++i) {
    std::string path, values;
    for (const Point& point : thinned(chart.series[i].points)) {
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", sx(point.x), sy(point.y));
      values += fmt::format("{}[{:.0f},{:.7g}]", values.empty() ? "" : ",", point.x, point.y);
      if (chart.series[i].points.size() <= 40) {  // few points: each is a dot too
        body += fmt::format(R"svg(<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="var(--s{})"/>)svg",
                            sx(point.x), sy(point.y), i);
      }
    }
    body += fmt::format(R"svg(<path class="line" stroke="var(--s{})" d="{}"/>)svg", i, path);
    data +=
        fmt::format("{}[{},[{}]]", i == 0 ? "" : ",", json_quote(chart.series[i].label), values);
  }
  return fmt::format(
      R"(<svg viewBox="0 0 {} {}" role="img" aria-label="{}" data-series="{}" data-range="[{},{},{},{},{}]">{}<line class="cross axis" visibility="hidden" y1="{}" y2="{}"/><text class="read" x="{}" y="12"></text></svg>)",
      kWidth, kHeight, escaped(chart.title), escaped("[" + data + "]"), x_low, x_high, kLeft,
      kWidth - kRight, kWidth, body, kTop + 6, kHeight - kBottom, kLeft);
}

std::string card(const Chart& chart) {
  std::string legend;
  for (size_t i = 0; chart.series.size() > 1 && i < chart.series.size(); ++i) {
    legend += fmt::format(R"svg(<i style="background:var(--s{})"></i>{})svg", i,
                          escaped(chart.series[i].label));
  }
  return fmt::format("<div class=\"card\"><h2>{}<span class=\"legend\">{}</span></h2>{}</div>\n",
                     chart.title, legend, svg(chart));
}

std::string shown(double value, int digits) {
  return std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : "none";
}

std::string tile(const std::string& name, const std::string& value) {
  return fmt::format("<div class=\"card\"><b>{}</b><span>{}</span></div>", value, name);
}

std::vector<Json> read_lines(const std::string& path) {
  const std::string text = read_text_file(path, ExitCode::kUsage);
  std::vector<Json> lines;
  for (size_t start = 0; start < text.size();) {
    const size_t end = text.find('\n', start);
    if (end == std::string::npos) break;
    lines.push_back(Json::parse(std::string_view(text).substr(start, end - start),
                                fmt::format("{}:{}", path, lines.size() + 1)));
    start = end + 1;
  }
  return lines;
}

// The values of `name` over the steps, times `scale`; lines without it, or with null, are left out.
Series series_of(const std::vector<Json>& lines, const std::string& label, const std::string& name,
                 double scale = 1.0) {
  Series series{label, {}};
  for (const Json& line : lines) {
    const double value = line.double_or(name, kNan) * scale;
    if (std::isfinite(value)) series.points.push_back({line.at("step").as_double(), value});
  }
  return series;
}

double last_value(const Series& series) {
  return series.points.empty() ? kNan : series.points.back().y;
}

double median(const Series& series) {
  std::vector<double> values;
  for (const Point& point : series.points) values.push_back(point.y);
  if (values.empty()) return kNan;
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

}  // namespace

RunSummary write_run_report(const std::string& dir) {
  const std::string metrics = dir + "/metrics.jsonl";
  MARROW_CHECK(std::filesystem::is_regular_file(metrics), ExitCode::kUsage,
               Fix("give the folder of a run: [log] dir, by default runs/NAME"),
               "{} does not exist", metrics);
  const std::vector<Json> lines = read_lines(metrics);
  const Series loss = series_of(lines, "training", "loss");
  const Series validation = series_of(lines, "validation", "validation_loss");
  const Series speed = series_of(lines, "tokens/s", "tokens_per_second");
  const Series memory = series_of(lines, "GB", "peak_memory_bytes", 1e-9);
  const std::vector<Chart> charts = {
      {"Loss", false, {loss, validation}},
      {"Tokens per second", true, {speed}},
      {"Gradient norm before clipping", true, {series_of(lines, "norm", "grad_norm")}},
      {"Learning rate", true, {series_of(lines, "lr", "lr")}},
      {"Busiest expert's load over the mean",
       true,
       {series_of(lines, "load", "expert_load_max_over_mean")}},
      {"Balance loss (1 = balanced)", false, {series_of(lines, "balance", "balance_loss")}},
      {"Peak memory (GB)", true, {memory}},
      {"Model TFLOP/s per device", true, {series_of(lines, "TFLOP/s", "tflops_per_gpu")}}};
  RunSummary summary{dir + "/report.html", 0, last_value(loss), last_value(validation)};
  double tokens = 0, seconds = 0;
  for (const Json& line : lines) {
    summary.steps = std::max(summary.steps, line.at("step").as_int());
    tokens += line.double_or("tokens", 0);
    seconds += line.double_or("step_seconds", 0);
  }
  std::string body = tile("steps", fmt::format("{}", summary.steps)) +
                     tile("training loss, last step", shown(summary.loss, 4)) +
                     tile("validation loss, last", shown(summary.validation_loss, 4)) +
                     tile("tokens", fmt::format("{:.3g} M", tokens / 1e6)) +
                     tile("tokens per second, median", shown(median(speed), 0)) +
                     tile("hours of steps", fmt::format("{:.2f}", seconds / 3600)) +
                     tile("peak memory, GB", shown(last_value(memory), 2));
  body = "<div class=\"tiles\">" + body + "</div>\n<div class=\"charts\">\n";
  for (const Chart& chart : charts) body += card(chart);
  body += "</div>\n";
  const std::string config = dir + "/run.toml";
  if (std::filesystem::exists(config)) {
    body += "<details class=\"card\"><summary>run.toml, resolved</summary><pre>" +
            escaped(read_text_file(config)) + "</pre></details>\n";
  }
  const std::string name = escaped(std::filesystem::path(dir).lexically_normal().string());
  write_text_file_atomically(
      summary.path,
      fmt::format("<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta "
                  "name=\"viewport\" content=\"width=device-width\"><title>{0}</title><style>{1}"
                  "</style></head><body>\n<h1>{0}</h1><p>from metrics.jsonl; x is the step</p>\n"
                  "{2}<script>{3}</script></body></html>\n",
                  name, kStyle, body, kScript));
  return summary;
}

}  // namespace marrow
