#!/usr/bin/env bash
# Runs every test program of the bundle on this machine's GPUs: ./run_gpu_tests.sh [GTEST_FILTER]. With two
# GPUs those of several ranks too. The last line is PASS or FAIL; test programs take $PYTHON's torch.
set -uo pipefail
BUNDLE=$(dirname "$(readlink -f "$0")")
source "$BUNDLE/tools/gpu_env.sh"
cd "$BUNDLE"
failed="" passed=0
run() {  # name, command…: counts what GoogleTest passed, or one
  local name=$1 status=0 count
  shift
  "$@" > "$name.log" 2>&1 || status=$?
  count=$(sed -nE 's/^\[  PASSED  \] ([0-9]+) tests?\..*/\1/p; s/^PASS [0-9]+ processes: ([0-9]+) runs.*/\1/p' "$name.log" | head -n 1)
  echo "$name: exit $status, ${count:-0} passed"
  passed=$((passed + ${count:-0}))
  ((status == 0)) || { failed+=" $name"; grep -E -A 8 'Failure|FAILED|WRONG|error|fix:' "$name.log" | head -n 40; }
}
for program in bin/test_*; do
  name=$(basename "$program")
  [[ $name == test_mpi || $name == test_mesh ]] || run "$name" "$program" --gtest_brief=1 --gtest_filter="${1:-*}"
done
if (($(nvidia-smi -L | wc -l) >= 2)); then
  two=(mpirun --allow-run-as-root --bind-to none -n 2)
  run test_mpi timeout 300 "${two[@]}" bin/test_mpi --gtest_brief=1
  run test_mesh timeout 300 "${two[@]}" bin/test_mesh "" gpu
fi
echo "$passed passed, $(wc -w <<< "$failed") failed"
[[ -z $failed ]] || { echo "FAIL$failed  next: cat *.log"; exit 1; }
((passed > 0)) || { echo "FAIL no test ran  next: ./run_gpu_tests.sh '*'"; exit 1; }
echo "PASS $passed tests"
