#include "ops/pch.h"

#include "train/metrics.h"

#include <nmmintrin.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>

namespace marrow {
namespace {

std::string short_time(double seconds) {
  const auto total = static_cast<int64_t>(std::llround(std::clamp(seconds, 0.0, 1e9)));
  if (total >= 3600) return fmt::format("{}h{:02}m", total / 3600, total % 3600 / 60);
  if (total >= 60) return fmt::format("{}m{:02}s", total / 60, total % 60);
  return fmt::format("{}s", total);
}

std::string short_count(double value) {
  return value >= 1e4 ? fmt::format("{:.1f}k", value / 1e3) : fmt::format("{:.0f}", value);
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

// Protobuf's encoding of one field: its number and wire type, then the value.
template <typename T>
std::string little_endian(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
std::string varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}
std::string varint_field(uint64_t field, uint64_t value) { return varint(field << 3) + varint(value); }
std::string double_field(uint64_t field, double value) { return varint(field << 3 | 1) + little_endian(value); }
std::string float_field(uint64_t field, float value) { return varint(field << 3 | 5) + little_endian(value); }
std::string bytes_field(uint64_t field, const std::string& content) {
  return varint(field << 3 | 2) + varint(content.size()) + content;
}

// Of tensorflow's event.proto: wall_time 1, step 2, file_version 3, summary 5, session_log 7.
std::string event_head(int64_t step) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  return double_field(1, now.count()) + varint_field(2, static_cast<uint64_t>(step));
}

uint32_t masked_crc(const std::string& bytes) {
  const uint32_t crc = crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
}

// Names sort by time, for readers take the files in that order; no two runs share one.
std::string new_event_file(const std::string& dir) {
  std::filesystem::create_directories(dir);
  char host[256] = "localhost";
  gethostname(host, sizeof host - 1);
  const auto now =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  return fmt::format("{}/events.out.tfevents.{}.{:03}.{}.{}", dir, now / 1000, now % 1000, host, getpid());
}

}  // namespace

std::string console_line(const StepMetrics& m, int64_t steps) {
  std::string line = fmt::format("step {}/{}  loss {:.4f}  balance {:.3f}  grad {:.3g}  lr {:.2e}  {} tokens/s", m.step,
                                 steps, m.loss, m.balance_loss, m.grad_norm, m.lr, short_count(m.tokens_per_second));
  if (std::isfinite(m.mfu)) line += fmt::format("  mfu {:.1f}%", 100 * m.mfu);
  line += fmt::format("  {:.2f} GB", static_cast<double>(m.peak_memory_bytes) / 1e9);
  return line + "  eta " + short_time(static_cast<double>(steps - m.step) * m.step_seconds);
}

void read_metrics(const std::string& path, const std::function<void(const std::string&, const Json&)>& visit) {
  const std::string text = read_text_file(path);
  int64_t number = 1;
  for (size_t start = 0, end; (end = text.find('\n', start)) != std::string::npos; start = end + 1) {
    const std::string line = text.substr(start, end - start + 1);
    try {
      visit(line, Json::parse(line, fmt::format("{}:{}", path, number)));
    } catch (const Error& error) {
      MARROW_THROW(ExitCode::kBadInput, Fix("remove that line, which no run needs: sed -i {}d {}", number, path), "{}",
                   error.what());
    }
    ++number;
  }
}

std::string metrics_json(const StepMetrics& metrics) {
  JsonWriter json;
  each_field(metrics, [&](auto, const char* name, const auto& value) { json.field(name, value); });
  return json.text();
}

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = _mm_crc32_u8(crc, static_cast<unsigned char>(c));
  return ~crc;
}

TensorboardWriter::TensorboardWriter(const std::string& dir, int64_t resumed_step) : file_(new_event_file(dir)) {
  append_record(event_head(0) + bytes_field(3, "brain.Event:2"));
  // session_log's status 1: START
  append_record(event_head(resumed_step + 1) + bytes_field(7, varint_field(1, 1)));
}

void TensorboardWriter::write(int64_t step, const std::vector<std::pair<std::string, double>>& scalars) {
  std::string summary;  // of values 1, each with tag 1 and simple_value 2
  for (const auto& [tag, value] : scalars) {
    summary += bytes_field(1, bytes_field(1, tag) + float_field(2, static_cast<float>(value)));
  }
  append_record(event_head(step) + bytes_field(5, summary));
}

void TensorboardWriter::append_record(const std::string& event) {
  const std::string length = little_endian(uint64_t{event.size()});
  file_.append(length + little_endian(masked_crc(length)) + event + little_endian(masked_crc(event)));
}

MetricsWriter::MetricsWriter(const std::string& dir, int64_t resumed_step)
    : file_([&] {
        std::filesystem::create_directories(dir);
        const std::string path = dir + "/metrics.jsonl";
        std::string kept;
        const auto keep = [&](const std::string& text, const Json& line) {
          if (line.at("step").as_int() <= resumed_step) kept += text;
        };
        if (std::filesystem::exists(path)) read_metrics(path, keep);
        write_text_file_atomically(path, kept);
        return OutputFile(path, true);
      }()),
      tensorboard_(dir + "/tensorboard", resumed_step) {}

void MetricsWriter::write(const StepMetrics& m) {
  file_.append(metrics_json(m) + "\n");
  std::vector<std::pair<std::string, double>> scalars;
  each_field(m, [&](const std::string& group, const char* name, const auto& value) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(value)>>) {
      const double number = static_cast<double>(value);
      if (!group.empty() && std::isfinite(number)) scalars.push_back({group + name, number});
    } else {
      for (size_t layer = 0; layer < value.size(); ++layer) {
        scalars.push_back({fmt::format("{}{}/layer_{:02}", group, name, layer), value[layer]});
      }
    }
  });
  tensorboard_.write(m.step, scalars);
}

void MetricsWriter::write_validation(int64_t step, double loss) {
  file_.append(JsonWriter().field("step", step, "validation_loss", loss).text() + "\n");
  tensorboard_.write(step, {{"validation/loss", loss}});
}

}  // namespace marrow
