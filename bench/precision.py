"""`./dev bench precision`: a lower precision trains like fp32. precision.py [STEPS] [LAST] [DTYPE] [AGAINST] [SEEDS]

The quickstart's model on real text (this Python's own sources), 32 sequences a step, AdamW at 1e-4, on this machine's GPU, or on
the CPU without one: STEPS (200) steps in each dtype (bf16 against fp32), with the same data and initial values, for each of
SEEDS (4) seeds. A pair of runs is apart by chance too, as two of one dtype are whose sums are in another order (up to 0.7 % at
2e-4 and 5e-4): so what counts is the mean over the seeds of how far the mean losses of the LAST (50) steps are apart. Fails where it is more than
0.5 %, or its standard error more than half of that. precision.py 500 100 fp8 bf16: every product in fp8, on a GPU of a
model whose sizes allow it. $MARROW is the binary.
"""
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARROW = os.environ.get("MARROW", str(ROOT / "build/marrow"))
CORPUS, LIMIT = "/tmp/marrow-precision", 0.5
STARTED, LOCK, OVER = [], threading.Lock(), threading.Event()


def marrow(*words):
    with LOCK:  # none starts after end_runs
        if OVER.is_set():
            sys.exit("a run failed")
        STARTED.append(subprocess.Popen([MARROW, *map(str, words)], cwd=ROOT, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, text=True))
        child = STARTED[-1]
    errors = child.communicate()[1]
    if child.returncode:
        sys.exit(f"FAIL marrow {words[0]}: {errors[-2000:]}  next: marrow {words[0]} --help")


def end_runs():
    with LOCK:
        OVER.set()
        for child in STARTED:
            child.kill()


def model(wide):
    config = json.loads((ROOT / "configs/models/qwen3-quickstart.json").read_text())
    if wide:
        config |= {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_attention_heads": 16,
                   "num_key_value_heads": 4, "head_dim": 64}
    path = Path(f"/tmp/marrow-precision-{os.getpid()}.json")
    path.write_text(json.dumps(config))
    return path


def last_losses(config, dtype, seed, steps, last, micro_batch):
    """The mean loss of the last steps of a run, and that of its first."""
    folder = f"/tmp/marrow-precision-{dtype}-{seed}-{os.getpid()}"
    device = "gpu" if os.path.exists("/dev/nvidia0") else "cpu"
    settings = [f'model.config="{config}"', f'data.train=["{CORPUS}"]', "data.validation=[]", "data.validate_every=0",
                f"train.seed={seed}", f"train.steps={steps}", "train.global_batch=32", f"train.micro_batch={micro_batch}",
                f'train.device="{device}"', f'train.dtype="{dtype}"', 'optimizer.name="adamw"', "optimizer.lr=1e-4",
                f"optimizer.decay_steps={steps // 5}", f'log.dir="{folder}"', f'checkpoint.dir="{folder}/checkpoints"']
    if dtype == "fp8":
        settings.append("train.fp8_at_any_size=true")
    marrow("pretrain", "configs/runs/quickstart.toml", *(word for s in settings for word in ("--set", s)))
    lines = map(json.loads, Path(f"{folder}/metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    return statistics.mean(losses[-last:]), losses[0]


def main(steps="200", last="50", low="bf16", high="fp32", seeds="4"):
    sources = [path for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if path.stat().st_size > 5000]
    marrow("tokenize", "--tokenizer", "bytes", "--output", CORPUS, "--overwrite", "--on-error", "skip",
           *(word for path in sources for word in ("--input", path)))
    wide = "fp8" in (low, high) and os.path.exists("/dev/nvidia0")
    config, apart = model(wide), []
    with ThreadPoolExecutor(4 if os.path.exists("/dev/nvidia0") else 1) as pool:
        def pair(seed):
            return [last_losses(config, dtype, seed, int(steps), int(last), 32 if wide else 8) for dtype in (high, low)]
        seed_of = {pool.submit(pair, seed): seed for seed in range(1, int(seeds) + 1)}
        try:
            for done in as_completed(seed_of):
                (of_high, first), (of_low, first_low) = done.result()
                apart.append(100 * (of_low - of_high) / of_high)
                print(f"seed {seed_of[done]}: loss of step 1, mean of the last {last} of {steps}: {high} {first:.5f}, "
                      f"{of_high:.5f}, {low} {first_low:.5f}, {of_low:.5f}; {apart[-1]:+.3f} %", flush=True)
                if not (of_high < first - 1 and of_low < first_low - 1):
                    sys.exit(f"FAIL {high} or {low} learns nothing  next: marrow pretrain with the settings above")
        except BaseException:  # the others end too
            pool.shutdown(wait=False, cancel_futures=True)
            end_runs()
            raise
    mean = statistics.mean(apart)
    error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("inf")
    text = f"{low} is {mean:+.3f} % from {high}, with a standard error of {error:.3f} %; at most {LIMIT} % is allowed"
    if not abs(mean) <= LIMIT or not error <= LIMIT / 2:
        sys.exit(f"FAIL {text}  next: test_ops on this machine, or more seeds")
    print(f"PASS {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
