#!/usr/bin/env bash
# mpirun -n N tools/gpu_rank.sh COMMAND…: one rank, started as torchrun does it. Where there are fewer GPUs than ranks, all
# share the first: NCCL refuses that to ranks of one host, so that each gets a host name of its own, and they speak through
# sockets. Needs root.
set -euo pipefail
export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE
export MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29531}
unset OMPI_COMM_WORLD_SIZE PMI_SIZE PMIX_RANK
if (($(nvidia-smi -L | wc -l) >= WORLD_SIZE)); then exec "$@"; fi
export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo
# shellcheck disable=SC2016
exec unshare --uts bash -c 'hostname "gpu-rank-$RANK"; exec "$@"' bash "$@"
