"""train.dtype = "fp8" on real text (this Python's own sources), emulated where there is no GPU: a tiny Qwen3-MoE trains
like in fp32, also after a resume, and on two processes like on one. It learns slowly: at higher rates small differences
decide when the loss falls, and bf16 is as far from fp32."""
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MARROW = os.environ.get("MARROW", str(ROOT / "build/marrow"))
WORK = Path(tempfile.mkdtemp())
STEPS, LAST, LIMIT = 100, 20, 0.005


SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 320, "rms_norm_eps": 1e-6,
         "max_position_embeddings": 256, "initializer_range": 0.05, "num_experts_per_tok": 2, "rope_theta": 10000.0}
FAMILIES = [  # latent attention, a dense layer and shared experts; biases and experts stored the other way round
    {"model_type": "deepseek_v3", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
     "v_head_dim": 12, "intermediate_size": 96, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4,
     "n_shared_experts": 1, "topk_group": 2, "topk_method": "noaux_tc", "norm_topk_prob": True,
     "routed_scaling_factor": 1.5, "moe_intermediate_size": 48},
    {"model_type": "gpt_oss", "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8, "intermediate_size": 48,
     "sliding_window": 10, "attention_bias": True, "layer_types": ["sliding_attention", "full_attention"],
     "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False}}]


def check(condition, text):
    if not condition:
        sys.exit(f"FAIL {text}  next: .venv/bin/python tests/oracle/fp8_oracle.py")


def marrow(*words):
    done = subprocess.run([MARROW, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    check(done.returncode == 0, f"marrow {words[0]}: {done.stderr[-2000:]}")
    return done.stdout


def losses(name, dtype="fp8", steps=STEPS, processes=1, **settings):
    base = {"model.config": str(ROOT / "configs/models/qwen3-tiny.json"), "data.train": [str(WORK / "corpus")],
            "data.seq_len": 64, "train.global_batch": 16, "train.micro_batch": 4,
            "train.device": "cpu", "train.dtype": dtype, "train.deterministic": True, "optimizer.lr": 5e-4,
            "optimizer.schedule": "constant", "optimizer.warmup_steps": 10, "log.dir": str(WORK / name),
            "train.steps": steps} | {key.replace("__", "."): value for key, value in settings.items()}
    path = WORK / f"{name}.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in base.items()))
    marrow("pretrain", path, "--processes", processes)
    lines = map(json.loads, (WORK / name / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def main():
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-f]*.py"))
    marrow("tokenize", "--tokenizer", "bytes", "--output", WORK / "corpus", "--on-error", "skip",
           *(word for path in sources for word in ("--input", path)))
    fp32, fp8 = losses("fp32", "fp32"), losses("fp8")
    means = [statistics.mean(run[-LAST:]) for run in (fp32, fp8)]
    apart = abs(means[1] / means[0] - 1)
    check(fp32[-1] < fp32[0] - 1, f"fp32 learns: {fp32[0]} to {fp32[-1]}")
    check(fp8[0] != fp32[0], "the runs are different")
    check(apart <= LIMIT, f"means of the last {LAST} losses {means}: {apart} apart")

    losses("resumed", steps=10)
    check(losses("resumed", steps=20) == fp8[:20], "a resumed run is the same to the bit")
    spread = 0
    for name, mesh in (("dp", {"mesh__dp": 2}), ("ep", {"mesh__ep": 2}), ("pp", {"mesh__pp": 2})):
        two = losses(name, steps=20, processes=2, **mesh)
        check(abs(two[0] / fp8[0] - 1) < 1e-5, f"{name}: first loss {two[0]}, of one process {fp8[0]}")
        spread = max(spread, *(abs(a / b - 1) for a, b in zip(two, fp8)))
        check(spread < 2e-3, f"{name}: losses {two} of one process {fp8[:20]}")
    for family in FAMILIES:
        name = family["model_type"]
        (WORK / f"{name}.json").write_text(json.dumps(SMALL | family))
        settings = {"model__config": str(WORK / f"{name}.json"), "optimizer__warmup_steps": 1, "steps": 20}
        exact, rough = losses(f"{name}-fp32", "fp32", **settings), losses(f"{name}-fp8", **settings)
        apart_here = max(abs(a / b - 1) for a, b in zip(rough, exact))
        check(rough[0] != exact[0] and apart_here < 2 * LIMIT, f"{name}: losses {rough}, in fp32 {exact}")
        check(exact[-1] < exact[0] - 0.3, f"{name} learns: {exact}")
    text = marrow("estimate", WORK / "fp8.toml", "--set", "train.device=gpu")
    check("in fp8 from" in text and " in fp8, " in text, text)
    shutil.rmtree(WORK)
    print(f"PASS fp8 {means[1]:.4f}, fp32 {means[0]:.4f}: {100 * apart:.2f} % apart; two processes within {spread:.1e}")


if __name__ == "__main__":
    main()
