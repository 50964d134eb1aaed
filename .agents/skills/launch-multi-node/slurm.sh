#!/usr/bin/env bash
#SBATCH --job-name=marrow
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@120
# sbatch slurm.sh RUN.toml: two minutes before the time limit the run saves and exits 0; submit it again to go on.
set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
exec srun --kill-on-bad-exit=1 "${MARROW:-build-gpu/marrow}" pretrain "$@"
