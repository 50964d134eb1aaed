#!/usr/bin/env bash
# On a GPU, from the bundle: no step of a run waits for the device. Runs 6 and 16 steps with sync_counter preloaded;
# ten more steps may add ten waits for an event (each reads the numbers of the step before, which is done while the
# next one runs) and nothing else. And no step is told to have taken no time. The last line is PASS or FAIL.
set -uo pipefail
BUNDLE=$(dirname "$(readlink -f "$0")")
source "$BUNDLE/tools/gpu_env.sh"
cd "$BUNDLE"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
bin/marrow tokenize --tokenizer bytes --input configs --output "$folder/corpus" > /dev/null || exit 1
cat > "$folder/run.toml" << TOML
[model]
config = "configs/models/qwen3-tiny.json"
[data]
train = ["$folder/corpus"]
seq_len = 64
[train]
steps = 6
global_batch = 8
micro_batch = 2
[optimizer]
lr = 1e-3
[checkpoint]
every = 0
TOML
for steps in 6 16; do
  MARROW_SYNC_COUNTS=$folder/$steps LD_PRELOAD=$BUNDLE/lib/libsync_counter.so bin/marrow pretrain "$folder/run.toml" \
    --set train.steps=$steps --set "log.dir=\"$folder/run-$steps\"" "$@" > "$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
done
"$PYTHON" - "$folder/run-16/metrics.jsonl" << 'PYTHON' || exit 1
import json, statistics, sys
times = [line["step_seconds"] for line in map(json.loads, open(sys.argv[1])) if "step_seconds" in line][2:]
if len(times) != 14 or min(times) < statistics.median(times) / 4:  # a host that launches slowly must not be what is timed
    print(f"FAIL steps took {times} s  next: look at how PretrainLoop::report takes step_seconds")
    sys.exit(1)
PYTHON
join "$folder/6" "$folder/16" | awk '
  {more = $3 - $2; printf "%s: %d more in 10 steps\n", $1, more; if (more != ($1 == "cudaEventSynchronize" ? 10 : 0)) bad = 1; seen += $3}
  END {if (seen == 0) bad = 1; print bad ? "FAIL a step waits for the device  next: log.trace" : "PASS no step waits for the device"; exit bad}'
