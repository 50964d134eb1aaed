#include "ops/pch.h"

#include "train/metrics.h"

#include <filesystem>

#include "base/json.h"

namespace marrow {
namespace {

std::string short_time(double seconds) {
  const auto total = static_cast<int64_t>(std::llround(std::clamp(seconds, 0.0, 1e9)));
  if (total >= 86400) return fmt::format("{}d{:02}h", total / 86400, total % 86400 / 3600);
  if (total >= 3600) return fmt::format("{}h{:02}m", total / 3600, total % 3600 / 60);
  if (total >= 60) return fmt::format("{}m{:02}s", total / 60, total % 60);
  return fmt::format("{}s", total);
}

std::string short_count(double value) {
  if (value >= 1e6) return fmt::format("{:.2f}M", value / 1e6);
  if (value >= 1e4) return fmt::format("{:.1f}k", value / 1e3);
  return fmt::format("{:.0f}", value);
}

// The lines of `path` up to `step`. A line without its newline was cut off by a kill.
std::string lines_up_to(const std::string& path, int64_t step) {
  if (!std::filesystem::exists(path)) return "";
  const std::string text = read_text_file(path);
  std::string kept;
  for (size_t start = 0, end; (end = text.find('\n', start)) != std::string::npos; start = end + 1) {
    const std::string line = text.substr(start, end - start + 1);
    if (Json::parse(line, path).at("step").as_int() <= step) kept += line;
  }
  return kept;
}

// Calls visit(group, name, value) for every field of a line, in its order. TensorBoard shows the
// groups apart; those of no group it does not show.
template <typename Visit>
void each_field(const StepMetrics& m, Visit visit) {
  visit("", "step", m.step);
  visit("train/", "loss", m.loss);
  visit("train/", "balance_loss", m.balance_loss);
  visit("train/", "balance_loss_per_layer", m.balance_loss_per_layer);
  visit("train/", "grad_norm", m.grad_norm);
  visit("train/", "lr", m.lr);
  visit("speed/", "tokens", m.tokens);
  visit("speed/", "step_seconds", m.step_seconds);
  visit("speed/", "tokens_per_second", m.tokens_per_second);
  visit("speed/", "tflops_per_gpu", m.tflops_per_gpu);
  visit("speed/", "mfu", m.mfu);
  visit("speed/", "peak_memory_bytes", m.peak_memory_bytes);
  visit("train/", "expert_load_max_over_mean", m.expert_load_max_over_mean);
  if (m.dispatch_rows_per_token > 0) visit("speed/", "dispatch_rows_per_token", m.dispatch_rows_per_token);
}

}  // namespace

std::string console_line(const StepMetrics& m, int64_t steps) {
  std::string line = fmt::format("step {}/{}  loss {:.4f}  balance {:.3f}  grad {:.3g}  lr {:.2e}  {} tokens/s", m.step,
                                 steps, m.loss, m.balance_loss, m.grad_norm, m.lr, short_count(m.tokens_per_second));
  if (std::isfinite(m.mfu)) line += fmt::format("  mfu {:.1f}%", 100 * m.mfu);
  line += fmt::format("  {:.2f} GB", static_cast<double>(m.peak_memory_bytes) / 1e9);
  return line + "  eta " + short_time(static_cast<double>(steps - m.step) * m.step_seconds);
}

std::string metrics_json(const StepMetrics& metrics) {
  JsonWriter json;
  each_field(metrics, [&](auto, const char* name, const auto& value) { json.field(name, value); });
  return json.text();
}

MetricsWriter::MetricsWriter(const std::string& dir, int64_t resumed_step)
    : file_([&] {
        std::filesystem::create_directories(dir);
        const std::string path = dir + "/metrics.jsonl";
        const std::string kept = lines_up_to(path, resumed_step);
        write_text_file_atomically(path, kept);
        size_ = static_cast<int64_t>(kept.size());
        return OutputFile(path, true);
      }()),
      tensorboard_(dir + "/tensorboard", resumed_step) {}

void MetricsWriter::append(const std::string& line) {
  const std::string text = line + "\n";
  file_.write_at(size_, std::as_bytes(std::span(text)));
  size_ += static_cast<int64_t>(text.size());
}

void MetricsWriter::write(const StepMetrics& m) {
  append(metrics_json(m));
  std::vector<TensorboardScalar> scalars;
  each_field(m, [&](const std::string& group, const char* name, const auto& value) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(value)>>) {
      const double number = static_cast<double>(value);
      if (!group.empty() && std::isfinite(number)) scalars.push_back({group + name, number});
    } else {
      for (size_t layer = 0; layer < value.size(); ++layer) {
        scalars.push_back({fmt::format("balance_loss/layer_{:02}", layer), value[layer]});
      }
    }
  });
  tensorboard_.write(m.step, scalars);
}

void MetricsWriter::write_validation(int64_t step, double loss) {
  append(JsonWriter().field("step", step).field("validation_loss", loss).text());
  tensorboard_.write(step, {{"validation/loss", loss}});
}

}  // namespace marrow
