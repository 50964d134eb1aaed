#!/usr/bin/env bash
# Full-size models on 4 or 8 GPUs of one host: bench/full_size.sh GROUP [OUT_FOLDER [NAMES]]; each run gets 110 s (of
# shared 140), so that a group takes under 10 minutes (loss 11), and writes OUT_FOLDER/NAME.json a run. On a machine
# with the bundle, or with $MARROW and its libraries at hand.
#   estimate          no GPU: the memory of every run below; FAIL where one does not fit
#   natural, forced   8 GPUs: Qwen3-30B-A3B with 48 layers on ep 8, pp 2 x ep 4, pp 4 x ep 2, dp 8 by layers
#   muon              the same with Muon, natural routing
#   families          8 GPUs, ep 8: DeepSeek-V2-Lite, Moonlight-16B-A3B, GPT-OSS-20B
#   four              4 GPUs, Qwen3 with 16 layers: pp 2 x ep 2 and cp 4 at 131,072 tokens, and the same on 1 and 2
#   loss              8 GPUs: 50 steps of 8 layers on each mesh against one GPU
#   shared            1 GPU, which 8 ranks share, or 4 (root; slow, 6 minutes): 12 steps of a narrow model on each mesh
#                     against one process; with NAMES, such as 'ep8|cp4', on these alone
set -uo pipefail
cd "$(dirname "$(dirname "$(readlink -f "$0")")")"
group=${1:-} out=${2:-full-size-results} names=${3:-.*}
RUN=configs/runs/gpu-30b-4layers.toml
MESHES=("ep8 mesh.ep=8" "pp2-ep4 mesh.pp=2 mesh.ep=4" "pp4-ep2 mesh.pp=4 mesh.ep=2"
  'dp8-layer mesh.dp=8 mesh.shard="layer"')
fail() { echo "FAIL $1  next: $2"; exit 1; }
if [[ -z ${MARROW:-} ]]; then
  export BUNDLE=$PWD/bundle
  source bundle/tools/gpu_env.sh
fi
MARROW=${MARROW:-bundle/bin/marrow} PYTHON=${PYTHON:-python3}
if [[ $group != estimate && $group != shared ]]; then
  [[ -f /tmp/zipf100k.bin ]] || "$PYTHON" bench/zipf_corpus.py /tmp/zipf100k 9000000 100000
fi
missed=0
mkdir -p "$out"

layers_of() {  # MODEL LAYERS: the path of its config with the first layers alone, and room for long sequences
  local path=/tmp/$1-$2layers.json
  sed -E "s/(\"num_hidden_layers\": *)[0-9]+/\1$2/; s/(\"max_position_embeddings\": *)[0-9]+/\1262144/" \
    "configs/models/$1.json" > "$path"
  echo "$path"
}
# measure NAME PROCESSES STEPS MODEL_CONFIG KEY=VALUE…
measure() {
  local name=$1 processes=$2 steps=$3 settings=() done_with=0
  for setting in "model.config=\"$4\"" 'data.train=["/tmp/zipf100k"]' train.micro_batch=1 "${@:5}"; do
    settings+=(--set "$setting")
  done
  ((processes > 1)) && settings=(--processes "$processes" "${settings[@]}")
  if [[ $group == estimate ]]; then
    "$MARROW" estimate "$RUN" "${settings[@]}" --json > "$out/$name.estimate.json" &&
      "$PYTHON" - "$name" "$out/$name.estimate.json" <<'PYTHON' || missed=$((missed + 1))
import json, sys
said = json.load(open(sys.argv[2]))
most = max(rank["total"] for rank in said["ranks"]) / 1e9
print(f"| {sys.argv[1]} | {len(said['ranks'])} | {most:.1f} GB |")
sys.exit(not said["fits"] or most > 139 * 1.0737)
PYTHON
    return
  fi
  {
    CUDA_VISIBLE_DEVICES=$(seq -s , 0 $((processes - 1))) timeout 110 \
      "$PYTHON" bench/train_speed.py "$MARROW" "$RUN" "$steps" "${settings[@]}" > "$out/$name.json"
  } || done_with=$?
  ((done_with == 0)) || missed=$((missed + 1))
  echo "$name: exit $done_with, $(head -c 400 "$out/$name.json")"
}
every_mesh() {  # PREFIX STEPS MODEL_CONFIG KEY=VALUE…
  local mesh words
  for mesh in "${MESHES[@]}"; do
    read -ra words <<< "$mesh"
    measure "$1-${words[0]}" 8 "$2" "$3" "${words[@]:1}" "${@:4}"
  done
}
natural() { every_mesh qwen3-natural 8 configs/models/qwen3-30b-a3b.json train.global_batch=128; }
forced() { every_mesh qwen3-forced 8 configs/models/qwen3-30b-a3b.json train.global_batch=128 router.forced=true; }
muon() { every_mesh qwen3-muon 8 configs/models/qwen3-30b-a3b.json train.global_batch=128 'optimizer.name="muon"'; }
families() {
  for model in deepseek-v2-lite moonlight-16b-a3b gpt-oss-20b; do
    measure "$model-ep8" 8 8 "configs/models/$model.json" mesh.ep=8 train.global_batch=128
  done
}
four() {
  local qwen3
  qwen3=$(layers_of qwen3-30b-a3b 16)
  measure four-pp2-ep2 4 8 "$qwen3" mesh.pp=2 mesh.ep=2 train.global_batch=64
  measure two-ep2 2 6 "$(layers_of qwen3-30b-a3b 8)" mesh.ep=2 train.global_batch=32
  measure one 1 6 "$(layers_of qwen3-30b-a3b 4)" train.global_batch=16
  measure four-cp4-128k 4 6 "$(layers_of qwen3-30b-a3b 8)" mesh.cp=4 data.seq_len=131072 train.global_batch=2
  measure two-cp2-64k 2 6 "$(layers_of qwen3-30b-a3b 8)" mesh.cp=2 data.seq_len=65536 train.global_batch=2
  measure one-32k 1 6 "$(layers_of qwen3-30b-a3b 4)" data.seq_len=32768 train.global_batch=2
}
loss() {
  local model
  model=$(layers_of qwen3-30b-a3b 8)
  measure loss-one 1 50 "$model" train.global_batch=16
  every_mesh loss 50 "$model" train.global_batch=16
  [[ $group == estimate ]] || compare_losses loss
}
compare_losses() {  # PREFIX
  "$PYTHON" - "$out" "$1" <<'PYTHON' || missed=$((missed + 1))
import glob, json, sys
read = lambda path: json.load(open(path))["losses"][:50]
one, bad = read(f"{sys.argv[1]}/{sys.argv[2]}-one.json"), 0
for path in sorted(set(glob.glob(f"{sys.argv[1]}/{sys.argv[2]}-*.json")) - set(glob.glob(f"{sys.argv[1]}/*.estimate.json"))):
    losses = read(path)
    apart = max(abs(a - b) / b for a, b in zip(losses, one))
    bad += apart > 1e-2 or len(losses) != len(one)
    print(f"{path}: in {len(losses)} of {len(one)} steps at most {apart:.2e} of one GPU's loss apart")
sys.exit(bad > 0)
PYTHON
}

shared() {
  local mesh words name narrow=/tmp/narrow-8layers.json
  "$PYTHON" - configs/models/qwen3-30b-a3b.json "$narrow" <<'PYTHON'
import json, sys
config = json.load(open(sys.argv[1]))
config |= {"num_hidden_layers": 8, "hidden_size": 1024, "moe_intermediate_size": 256, "num_experts": 16, "vocab_size": 8192,
           "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
json.dump(config, open(sys.argv[2], "w"))
PYTHON
  [[ -f /tmp/zipf8k.bin ]] || "$PYTHON" bench/zipf_corpus.py /tmp/zipf8k 1000000 8192
  rm -f "$out"/shared-*.json
  for mesh in "one 1" "${MESHES[@]/ / 8 }" "pp2-ep2 4 mesh.pp=2 mesh.ep=2" "cp4 4 mesh.cp=4"; do
    read -ra words <<< "$mesh"
    [[ ${words[0]} == one || ${words[0]} =~ ^(${names})$ ]] || continue
    name=shared-${words[0]}
    local ranks=${words[1]} settings=() launcher=() done_with=0
    for setting in "model.config=\"$narrow\"" 'data.train=["/tmp/zipf8k"]' data.seq_len=512 train.steps=12 \
      train.global_batch=16 train.micro_batch=1 checkpoint.every=0 "log.dir=\"$out/$name\"" "${words[@]:2}"; do
      settings+=(--set "$setting")
    done
    ((ranks == 1)) || launcher=(mpirun --allow-run-as-root --bind-to none -n "$ranks" tools/gpu_rank.sh)
    rm -rf "${out:?}/$name" "$out/$name.json"
    timeout 140 "${launcher[@]}" "$MARROW" pretrain "$RUN" "${settings[@]}" > "$out/$name.log" 2>&1 || done_with=$?
    ((done_with == 0)) || missed=$((missed + 1))
    echo "$name: exit $done_with"
    "$PYTHON" - "$out/$name" <<'PYTHON'
import json, sys
lines = [json.loads(line) for line in open(f"{sys.argv[1]}/metrics.jsonl")]
json.dump({"losses": [line["loss"] for line in lines if "loss" in line]}, open(f"{sys.argv[1]}.json", "w"))
PYTHON
    rm -rf "${out:?}/$name"
  done
  [[ ${name:-} != shared-one ]] || fail "no mesh '$names'" "bench/full_size.sh shared $out 'ep8|cp4'"
  compare_losses shared
}

case $group in
  natural | forced | muon | families | four | loss | shared) "$group" ;;
  estimate) natural; forced; muon; families; four; loss ;;
  *) fail "no group '$group'" "bench/full_size.sh estimate" ;;
esac
((missed == 0)) || fail "$missed runs" "bench/full_size.sh estimate; then cat $out/*.json"
echo "PASS $group: $out/"
