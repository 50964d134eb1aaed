#!/usr/bin/env bash
# check_mesh.sh RUN.toml PROCESSES [HOSTFILE]. Ends in PASS or "FAIL … next: COMMAND". See SKILL.md.
set -uo pipefail
fail() { echo "FAIL $1  next: $2"; exit 1; }
[[ $# -ge 2 && -f $1 ]] || fail "usage: check_mesh.sh RUN.toml PROCESSES [HOSTFILE]" "ls configs/runs"
run=$(readlink -f "$1") processes=$2 hosts=${3:+--hostfile $3}
cd "$(dirname "$(readlink -f "$0")")/../../.."
MARROW=${MARROW:-$([[ -x build-gpu/marrow ]] && echo build-gpu/marrow || echo build/marrow)}
[[ -x $MARROW ]] || fail "no binary" "./dev build"
out=runs/check-mesh
rm -rf "$out" && mkdir -p "$out/text"
cp README.md AGENTS.md docs/*.md "$out/text/"
"$MARROW" tokenize --tokenizer bytes --input "$out/text" --output "$out/corpus" > "$out/tokenize.log" 2>&1 ||
  fail "tokenize" "cat $out/tokenize.log"
# The mesh of the run, on a model and batches small enough for one rank.
.venv/bin/python - "$run" "$processes" "$out" << 'PYTHON' || fail "the mesh of $1" "marrow estimate $1 --processes $processes"
import json, re, sys
from pathlib import Path
run, processes, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
section, mesh = "", {}
for line in Path(run).read_text().splitlines():
    line = line.split("#")[0].strip()
    if line.startswith("["):
        section = line
    elif section == "[mesh]" and "=" in line:
        key, value = (part.strip() for part in line.split("=", 1))
        mesh[key] = value
size = {k: int(mesh.get(k, "1").strip('"').replace("auto", "0")) for k in ("pp", "dp", "cp", "ep")}
size["dp"] = int(mesh["dp"]) if mesh.get("dp", "auto").isdigit() else 0
for key in size:
    if size[key] == 0:
        rest = 1
        for other in size:
            rest *= size[other] or 1
        size[key] = processes // rest
model = json.loads(Path("configs/models/qwen3-tiny.json").read_text())
model["num_hidden_layers"] = max(4, 2 * size["pp"])
model["num_experts"] = max(8, size["ep"])
Path(out, "model.json").write_text(json.dumps(model))
batch = size["dp"] * size["ep"] * max(2 * size["pp"], 2)
text = f"""[model]
config = "{out}/model.json"
[data]
train = ["{out}/corpus"]
seq_len = {max(64, 2 * size["cp"] * 8)}
[train]
steps = 4
global_batch = {batch}
dtype = "fp32"
[optimizer]
lr = 1e-3
eps = 1e-3
[log]
watchdog_seconds = 120
"""
Path(out, "one.toml").write_text(text)
Path(out, "mesh.toml").write_text(text + "[mesh]\n" + "".join(f"{k} = {v}\n" for k, v in {**mesh, **size}.items()))
PYTHON
"$MARROW" pretrain "$out/one.toml" --set "log.dir=\"$out/one\"" > "$out/one.log" 2>&1 ||
  fail "one rank: $(grep -m1 error "$out/one.log")" "cat $out/one.log"
if [[ -n $hosts || $processes -gt 64 ]]; then
  # shellcheck disable=SC2086
  mpirun $hosts -n "$processes" --bind-to none -x PATH -x LD_LIBRARY_PATH "$MARROW" pretrain "$out/mesh.toml" \
    --set "log.dir=\"$out/mesh\"" > "$out/mesh.log" 2>&1
else
  "$MARROW" pretrain "$out/mesh.toml" --processes "$processes" --set "log.dir=\"$out/mesh\"" > "$out/mesh.log" 2>&1
fi || fail "the mesh: $(grep -m1 error "$out/mesh.log")" "cat $out/mesh.log"
.venv/bin/python - "$out" << 'PYTHON' || fail "loss or norm differ from one rank's" "cat $out/mesh/metrics.jsonl $out/one/metrics.jsonl"
import json, sys
from pathlib import Path
read = lambda name: [json.loads(l) for l in Path(sys.argv[1], name, "metrics.jsonl").read_text().splitlines() if '"loss"' in l]
for ours, theirs in zip(read("mesh"), read("one"), strict=True):
    for key in ("loss", "grad_norm"):
        difference = abs(ours[key] - theirs[key]) / theirs[key]
        if not difference < 1e-4:
            sys.exit(f"step {ours['step']}: {key} {ours[key]} on the mesh, {theirs[key]} on one rank")
PYTHON
echo "PASS $processes ranks train as one does"
