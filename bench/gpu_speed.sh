#!/usr/bin/env bash
# Speed of training on this machine's GPU with the bundle: bench/gpu_speed.sh STEPS [--set key=value ...]
set -uo pipefail
BUNDLE=$(dirname "$(dirname "$(readlink -f "$0")")")/bundle
source "$BUNDLE/tools/gpu_env.sh"
[[ -f /tmp/zipf.bin ]] || "$PYTHON" bench/zipf_corpus.py /tmp/zipf 9000000
"$PYTHON" bench/train_speed.py "$BUNDLE/bin/marrow" configs/runs/gpu-30b-4layers.toml "$@"
