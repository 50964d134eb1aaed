#!/usr/bin/env bash
# fp8 against bf16 on this machine's GPU with the bundle, at two widths, about 2 minutes: bench/fp8_speed.sh [STEPS [WIDTH]]
set -uo pipefail
cd "$(dirname "$(dirname "$(readlink -f "$0")")")" || exit 1
BUNDLE=$PWD/bundle
source "$BUNDLE/tools/gpu_env.sh"
MARROW="$BUNDLE/bin/marrow" exec "$PYTHON" bench/fp8.py "$@"
