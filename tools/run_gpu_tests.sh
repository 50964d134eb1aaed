#!/usr/bin/env bash
# Runs every test program of the bundle on this machine's GPU: ./run_gpu_tests.sh [GTEST_FILTER].
# The last line is PASS or FAIL; test programs take $PYTHON's torch.
set -uo pipefail
BUNDLE=$(dirname "$(readlink -f "$0")")
source "$BUNDLE/tools/gpu_env.sh"
cd "$BUNDLE"
failed="" passed=0
for program in bin/test_*; do
  name=$(basename "$program")
  "$program" --gtest_brief=1 --gtest_filter="${1:-*}" > "$name.log" 2>&1
  status=$?
  count=$(sed -nE 's/^\[  PASSED  \] ([0-9]+) tests?\..*/\1/p' "$name.log")
  echo "$name: exit $status, ${count:-0} passed"
  passed=$((passed + ${count:-0}))
  ((status == 0)) || { failed+=" $name"; grep -E -A 8 'Failure|FAILED|error|fix:' "$name.log" | head -n 40; }
done
echo "$passed passed, $(wc -w <<< "$failed") failed"
[[ -z $failed ]] || { echo "FAIL$failed  next: cat *.log"; exit 1; }
((passed > 0)) || { echo "FAIL no test ran  next: ./run_gpu_tests.sh '*'"; exit 1; }
echo "PASS $passed tests"
