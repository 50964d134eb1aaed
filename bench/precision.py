"""`./dev bench precision`: a lower precision trains like fp32. precision.py [STEPS] [LAST] [DTYPE] [AGAINST]

The quickstart's model on real text (this Python's own sources), 32 sequences a step, AdamW at 5e-4, on this machine's GPU, or on
the CPU without one: STEPS (200) steps in each dtype (bf16 against fp32). Fails where the mean losses of the LAST (50) steps
are more than 0.5 % apart. precision.py 500 100 fp8 bf16: every product in fp8, on a GPU of a model whose sizes allow it.
$MARROW is the binary.
"""
import json
import os
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARROW = os.environ.get("MARROW", str(ROOT / "build/marrow"))
CORPUS, LIMIT = "/tmp/marrow-precision", 0.005


def marrow(*words):
    done = subprocess.run([MARROW, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"FAIL marrow {words[0]}: {done.stderr[-2000:]}  next: marrow {words[0]} --help")


def model(wide):
    config = json.loads((ROOT / "configs/models/qwen3-quickstart.json").read_text())
    if wide:
        config |= {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_attention_heads": 16,
                   "num_key_value_heads": 4, "head_dim": 64}
    path = Path(f"/tmp/marrow-precision-{os.getpid()}.json")
    path.write_text(json.dumps(config))
    return path


def losses(dtype, steps, wide):
    folder = f"/tmp/marrow-precision-{dtype}-{os.getpid()}"
    device = "gpu" if os.path.exists("/dev/nvidia0") else "cpu"
    settings = [f'model.config="{model(wide)}"', f'data.train=["{CORPUS}"]', "data.validation=[]", "data.validate_every=0",
                f"train.steps={steps}", "train.global_batch=32", f"train.micro_batch={32 if wide else 8}",
                f'train.device="{device}"', f'train.dtype="{dtype}"', 'optimizer.name="adamw"', "optimizer.lr=5e-4",
                f"optimizer.decay_steps={steps // 5}", f'log.dir="{folder}"', f'checkpoint.dir="{folder}/checkpoints"']
    if dtype == "fp8":
        settings.append("train.fp8_at_any_size=true")
    marrow("pretrain", "configs/runs/quickstart.toml", *(word for s in settings for word in ("--set", s)))
    lines = map(json.loads, Path(f"{folder}/metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def main(steps="200", last="50", low="bf16", high="fp32"):
    sources = [path for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if path.stat().st_size > 5000]
    marrow("tokenize", "--tokenizer", "bytes", "--output", CORPUS, "--overwrite", "--on-error", "skip",
           *(word for path in sources for word in ("--input", path)))
    wide = "fp8" in (low, high) and os.path.exists("/dev/nvidia0")
    runs = {dtype: losses(dtype, int(steps), wide) for dtype in (high, low)}
    means = {dtype: statistics.mean(run[-int(last):]) for dtype, run in runs.items()}
    apart = abs(means[low] - means[high]) / means[high]
    print(f"loss of step 1, mean of the last {last} of {steps}: " +
          ", ".join(f"{dtype} {runs[dtype][0]:.5f}, {means[dtype]:.5f}" for dtype in runs) + f"; {100 * apart:.3f} % apart")
    if not apart <= LIMIT or not means[high] < runs[high][0] - 1:
        sys.exit(f"FAIL at most {100 * LIMIT} % is allowed, and both must learn  next: test_ops on this machine")
    print(f"PASS {low} trains like {high}")


if __name__ == "__main__":
    main(*sys.argv[1:])
