#!/usr/bin/env bash
# who_waits.sh RUN_DIR: how old a run's last step is, which marrow processes run, the first error. Ends in PASS (nobody waits long) or FAIL … next: COMMAND.
set -uo pipefail
run=${1:?usage: who_waits.sh RUN_DIR}
[[ -d $run ]] || { echo "FAIL $run is no folder  next: ls runs"; exit 1; }
if [[ -s $run/ranks/first-error ]]; then
  tail -n +2 "$run/ranks/first-error"
  echo "FAIL a rank failed, see above  next: tail -n 20 $run/log-rank-*.txt"
  exit 1
fi
newest=$(stat -c %Y "$run/metrics.jsonl" 2> /dev/null || echo 0)
age=$(($(date +%s) - newest))
echo "last step: $(grep -o '"step": *[0-9]*' "$run/metrics.jsonl" 2> /dev/null | tail -n 1), $age s ago"
for process in $(pgrep -f -- "pretrain" || true); do
  tr '\0' ' ' < "/proc/$process/cmdline" 2> /dev/null | grep -q -- "pretrain" || continue
  printf 'process %s  %s  %s\n' "$process" "$(sed -n 's/^State:\t//p' "/proc/$process/status" 2> /dev/null)" \
    "$(tr '\0' ' ' < "/proc/$process/cmdline" 2> /dev/null | cut -c 1-80)"
done
((age < 300)) || { echo "FAIL no step for $age s  next: wait for the watchdog's table, or kill -TERM a rank to save"; exit 1; }
echo "PASS a step $age s ago"
