#include "app/failure.h"

#include <filesystem>
#include <new>

#include "ops/pch.h"

namespace marrow {
namespace {

constexpr const char* kUseLessMemory =
    "lower train.micro_batch or data.seq_len, set train.recompute = \"cheap\" or \"layer\", or end other programs; "
    "marrow doctor shows what is free";

Error fault(const std::string& what, const char* fix) {
  return {ExitCode::kDeviceFault, what, Fix(fix), __FILE__, __LINE__};
}

}  // namespace

Error current_error() {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const c10::OutOfMemoryError& error) {
    return fault(error.what_without_backtrace(), kUseLessMemory);
  } catch (const c10::Error& error) {
    return fault(std::string("libtorch: ") + error.what_without_backtrace(),
                 "run marrow doctor; for a CUDA fault run again with CUDA_LAUNCH_BLOCKING=1 to see the failing call");
  } catch (const std::filesystem::filesystem_error& error) {
    return fault(error.what(), "check that the path exists, is a folder, and may be written");
  } catch (const std::bad_alloc&) {
    return fault("the machine's memory is exhausted", kUseLessMemory);
  } catch (const std::exception& error) {
    return fault(std::string("unexpected: ") + error.what(),
                 "run marrow doctor; if it passes, this is a defect of marrow");
  }
}

}  // namespace marrow
