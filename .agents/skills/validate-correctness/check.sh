#!/usr/bin/env bash
# Ends in PASS or "FAIL … next: COMMAND". See SKILL.md.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/../../.."
export OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0
here=.agents/skills/validate-correctness
out=runs/validate-correctness
fail() { echo "FAIL $1  next: $2"; exit 1; }

if [[ ${1:-} == --all ]]; then
  ./dev lint || fail "lint" "./dev lint"
  ./dev test --slow || fail "tests" "./dev test --slow"
  echo "PASS lint and all tests"
  exit 0
fi
./dev build > /dev/null || fail "the build" "./dev build"
./dev lint > /dev/null || fail "lint" "./dev lint"
./dev test --filter '^ops$' | tail -n 3 || fail "operators" "./dev test --filter '^ops$'"
./dev test --filter 'oracle$' | tail -n 3 || fail "transformers oracles" "./dev test --filter 'oracle$'"

# Layout, determinism and resume of whole runs on the tiny model.
rm -rf "$out" && mkdir -p "$out/text"
cp README.md AGENTS.md docs/architecture.md dev "$out/text/" && mv "$out/text/dev" "$out/text/dev.py"
build/marrow tokenize --tokenizer bytes --input "$out/text" --output "$out/corpus" > "$out/tokenize.log" 2>&1 ||
  fail "tokenize: $(tail -n 1 "$out/tokenize.log")" "cat $out/tokenize.log"
run() {  # name, settings…
  local name=$1 sets=()
  shift
  for setting in "$@"; do sets+=(--set "$setting"); done
  build/marrow pretrain $here/run.toml --set "log.dir=\"$out/$name\"" "${sets[@]}" > "$out/$name.log" 2>&1 ||
    fail "run $name: $(grep -m 1 . "$out/$name.log")" "cat $out/$name.log"
}
run one train.micro_batch=1
run four train.micro_batch=4
run again train.micro_batch=1
run resumed train.micro_batch=1 train.steps=4
run resumed train.micro_batch=1
.venv/bin/python $here/compare.py "$out" || fail "runs differ, see above" "less $here/SKILL.md"
echo "PASS operators, oracles, layout, determinism and resume"
