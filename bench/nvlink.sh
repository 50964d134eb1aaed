#!/usr/bin/env bash
# Dispatch by kernels into the other GPUs' memory beside today's, with the bundle: bench/nvlink.sh [RANKS]
# Windows by NCCL, then by CUDA's handles; a minute. The last line is PASS or FAIL.
set -uo pipefail
BUNDLE=$(dirname "$(dirname "$(readlink -f "$0")")")/bundle
source "$BUNDLE/tools/gpu_env.sh"
run() {
  NCCL_NVLS_ENABLE=0 timeout -k 5 160 mpirun --allow-run-as-root --bind-to none --mca pml ob1 --mca btl self,vader,tcp \
    -n "$ranks" "$BUNDLE/bin/bench_nvlink" "$@" 2>&1
}
ranks=${1:-2}
run && run ipc
