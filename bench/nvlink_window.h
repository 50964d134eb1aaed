// Memory of every rank that all ranks of a host can write: NCCL's windows, or CUDA's handles between processes. Neither
// takes part in multicast.
#pragma once
#include <string>
#include <vector>

#include "nvlink_dispatch.h"

struct ncclComm;
struct ncclWindow_vidmem;

namespace marrow::nvlink {

// Zeroed windows; every rank calls these with the same sizes. Afterwards windows[r] is rank r's, or the process ends.
class NcclWindow {
 public:
  void open(const std::string& identity, Exchange& exchange, int64_t bytes);  // identity: a ncclUniqueId
  void close();

 private:
  ncclComm* comm_ = nullptr;
  ncclWindow_vidmem* window_ = nullptr;
  void* memory_ = nullptr;
};

class IpcWindow {
 public:
  std::string allocate(int64_t bytes);                                     // the handle for the others
  void open(const std::vector<std::string>& handles, Exchange& exchange);  // of all ranks
  void close(const Exchange& exchange);                                    // before any rank frees its own

 private:
  void* memory_ = nullptr;
};

}  // namespace marrow::nvlink
