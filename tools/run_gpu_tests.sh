#!/usr/bin/env bash
# Runs the bundle's test programs that have something to do on a GPU: ./run_gpu_tests.sh [GTEST_FILTER]. Those of several
# ranks on two GPUs, or where there is one, sharing it (gpu_rank.sh; slow, so that not every mesh is run with every
# setting). The last line is PASS or FAIL; test programs take $PYTHON's torch.
set -uo pipefail
BUNDLE=$(dirname "$(readlink -f "$0")")
source "$BUNDLE/tools/gpu_env.sh"
cd "$BUNDLE"
failed="" passed=0
run() {  # name, command…: counts what GoogleTest passed, or one
  local name=$1 status=0 count
  shift
  "$@" > "$name.log" 2>&1 || status=$?
  count=$(sed -nE 's/^\[  PASSED  \] ([0-9]+) tests?\..*/\1/p; s/^PASS [0-9]+ processes: ([0-9]+) runs.*/\1/p; s/^PASS no step.*/1/p' "$name.log" | head -n 1)
  echo "$name: exit $status, ${count:-0} passed"
  passed=$((passed + ${count:-0}))
  ((status == 0)) || { failed+=" $name"; grep -E -A 8 'Failure|FAILED|WRONG|error|fix:' "$name.log" | head -n 40; }
}
# The others need no GPU, and some the checkout's Python environment.
for name in test_ops test_models test_parallel test_pipeline; do
  run "$name" "bin/$name" --gtest_brief=1 --gtest_filter="${1:-*}"
done
run count_syncs ./count_syncs.sh
ranks=(mpirun --allow-run-as-root --bind-to none -n)
run test_mpi timeout 300 "${ranks[@]}" 2 tools/gpu_rank.sh bin/test_mpi --gtest_brief=1 --gtest_color=no
# Muon's products are bf16 on a GPU, whatever the dtype: only AdamW can be held to fp32's limits.
if (($(nvidia-smi -L | wc -l) >= 2)); then
  run test_mesh timeout 300 "${ranks[@]}" 2 bin/test_mesh adamw gpu
  run races timeout 300 "${ranks[@]}" 2 bin/test_mesh races 30 gpu
else
  run test_mesh timeout 300 "${ranks[@]}" 2 tools/gpu_rank.sh bin/test_mesh 'adamw global' gpu
  run test_mesh_ep4 timeout 300 "${ranks[@]}" 4 tools/gpu_rank.sh bin/test_mesh 'ep4 adamw global' gpu
fi
echo "$passed passed, $(wc -w <<< "$failed") failed"
[[ -z $failed ]] || { echo "FAIL$failed  next: cat *.log"; exit 1; }
((passed > 0)) || { echo "FAIL no test ran  next: ./run_gpu_tests.sh '*'"; exit 1; }
echo "PASS $passed tests"
