// marrow doctor: what this machine and this build can do, and what stands in the way.
#include <torch/headeronly/version.h>

#include <filesystem>
#include <thread>

#ifdef MARROW_CUDA
#include <cuda_runtime_api.h>
#endif

#include "app/command_line.h"
#include "base/files.h"
#include "ops/device.h"

namespace marrow {
namespace {

struct Finding {
  std::string name, value;
  std::string next = {};  // what to do; empty where all is well
  bool fatal = false;     // marrow cannot do its work
};

// The runtime's view of the GPUs; `fatal` where this build cannot use what is there.
Finding check_gpu() {
#ifdef MARROW_CUDA
  int count = 0;
  if (const cudaError_t fault = cudaGetDeviceCount(&count); fault != cudaSuccess || count == 0) {
    return {"gpu", fmt::format("none to use ({})", cudaGetErrorString(fault)),
            "check nvidia-smi and CUDA_VISIBLE_DEVICES; the CPU path works"};
  }
  cudaDeviceProp device{};
  int driver = 0, runtime = 0;
  cudaGetDeviceProperties(&device, 0);
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  const GpuSupport support = gpu_support(device.major, device.minor);
  return {"gpu",
          fmt::format("{} x {}, {:.0f} GB, sm_{}{}, driver CUDA {}.{}, runtime {}.{}", count, device.name,
                      1e-9 * static_cast<double>(device.totalGlobalMem), device.major, device.minor, driver / 1000,
                      driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10),
          support == GpuSupport::kTuned ? ""
          : support == GpuSupport::kPlain
              ? "compiled for sm_100, and never run there: run test_ops first; experts' products are libtorch's, no fp8"
              : "the CUDA kernels are built for sm_90 (H100, H200) and sm_100 (B200): set train.device = \"cpu\"",
          support == GpuSupport::kNone};
#else
  const bool present = std::filesystem::exists("/dev/nvidia0");
  return {"gpu", present ? "there is one, but this build has no CUDA kernels" : "none; this build has no CUDA kernels",
          present ? "run ./dev build with nvcc installed" : "", present};
#endif
}

int run_doctor(const CommandLine& args) {
  const bool fast = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const double memory = 1e-9 * static_cast<double>(available_memory_bytes(at::kCPU));
  const double disk = 1e-9 * static_cast<double>(free_disk_bytes("."));
  const at::Tensor threes = at::eye(64) * 3;
  const bool right = at::mm(threes, threes).equal(at::eye(64) * 9);
  const std::vector<Finding> findings = {
      {"processor",
       fmt::format("{} cores, AVX2 and FMA {}", std::thread::hardware_concurrency(), fast ? "present" : "missing"),
       fast ? "" : "use a processor of the x86-64-v3 level (2013 or later)", !fast},
      {"memory", fmt::format("{:.1f} GB free", memory), memory < 2 ? "end other programs: a small run needs 2 GB" : ""},
      {"disk", fmt::format("{:.1f} GB free in the working folder", disk),
       disk < 5 ? "free 5 GB, or set [checkpoint] dir to another disk" : ""},
      {"libtorch", fmt::format("{}, {} threads", TORCH_VERSION, at::get_num_threads()),
       right ? "" : "run ./dev setup: libtorch computes a wrong product", !right},
      check_gpu()};
  std::string text;
  JsonWriter checks;
  const Finding* worst = nullptr;
  for (const Finding& finding : findings) {
    const char* mark = finding.fatal ? "FAIL" : finding.next.empty() ? "ok" : "note";
    text += fmt::format("{:<5} {:<10} {}\n", mark, finding.name, finding.value);
    if (!finding.next.empty()) text += fmt::format("{:<16} -> {}\n", "", finding.next);
    checks.raw(finding.name, JsonWriter().field("status", mark, "value", finding.value, "next", finding.next).text());
    if (finding.fatal && worst == nullptr) worst = &finding;
  }
  text += worst == nullptr ? fmt::format("PASS marrow can train on the {}", gpu_available() ? "GPU" : "CPU")
                           : fmt::format("FAIL {}: {} next: {}", worst->name, worst->value, worst->next);
  args.print(text, JsonWriter().field("pass", worst == nullptr).raw("checks", checks.text()));
  return static_cast<int>(worst == nullptr ? ExitCode::kDone : ExitCode::kDeviceFault);
}

}  // namespace

Subcommand doctor_command() {
  return {.name = "doctor",
          .summary = "what this machine can do; the last line is PASS or FAIL",
          .example = "marrow doctor",
          .run = run_doctor};
}

}  // namespace marrow
