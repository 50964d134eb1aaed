#!/usr/bin/env bash
# profile.sh [RUN.toml] [--processes N] [--set key=value ...]: traces the fifth step of a run on this machine's GPU. The
# last lines are the three heaviest kernels as CSV and PASS or FAIL. See SKILL.md.
set -uo pipefail
ROOT=$(realpath "$(dirname "$(readlink -f "$0")")/../../..")
MARROW=${MARROW:-$ROOT/build-gpu/marrow} PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
if [[ ${1:-} == *.toml ]]; then
  run=$1  # its paths are from here
  shift
else
  cd "$ROOT" || exit 1
  run=configs/runs/gpu-30b-4layers.toml
fi
fail() { echo "FAIL $1  next: $2"; exit 1; }
[[ -x $MARROW ]] || fail "no $MARROW" "./dev build --gpu"
if grep -q /tmp/zipf "$run" && [[ ! -f /tmp/zipf.bin ]]; then "$PYTHON" "$ROOT/bench/zipf_corpus.py" /tmp/zipf 9000000; fi
result=$("$PYTHON" "$ROOT/bench/train_speed.py" "$MARROW" "$run" 6 "$@" --set 'log.trace=[5]') ||
  fail "the run, see above" "$MARROW pretrain $run"
folder=$(sed -E 's/.*"folder": "([^"]*)".*/\1/' <<< "$result")
echo "$(grep -oE '"(tokens_per_second|tflops_per_gpu|peak_memory_gb)": [0-9.]+' <<< "$result" | tr '\n' ' ')"
trace=$(find "$folder" -name 'trace-00000005*.json' | sort | head -n 1)
[[ -n $trace ]] || fail "no trace in $folder" "$MARROW pretrain --help"
echo "trace: $trace (ui.perfetto.dev, or bench/trace_top.py for more kernels)"
"$PYTHON" "$ROOT/bench/trace_top.py" "$trace" 3
