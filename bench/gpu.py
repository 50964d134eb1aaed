"""`./dev bench gpu`: training steps on this machine's GPUs, as a table with ratios to the goals. gpu.py [STEPS]

Qwen3-30B-A3B's width, sequences of 4,096, 131,072 tokens a step, zipf tokens, random weights: one GPU with 4 layers at
several micro-batches and with forced balance; with two GPUs also ep 2, and pp 2 with 8 layers. $MARROW is the binary.
Fails where the best row of a group is below what it must reach.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARROW = os.environ.get("MARROW", str(ROOT / "build-gpu/marrow"))
EIGHT_LAYERS = 'model.config="configs/models/qwen3-30b-a3b-8layers.json"'
# group: GPUs, settings of all its rows, rows, goal and least tokens/s
GROUPS = {
    "one GPU": (1, [], [[f"train.micro_batch={n}"] for n in (1, 2, 4, 8)] +
                [["train.micro_batch=4", 'optimizer.state_dtype="bf16"']], 130_000, 120_000),
    "one GPU, forced balance": (1, ["router.forced=true"], [["train.micro_batch=4"]], 130_000, 120_000),
    "ep 2": (2, ["mesh.ep=2"], [[f"train.micro_batch={n}"] for n in (1, 2, 4)], 240_000, 240_000),
    "pp 2, 8 layers": (2, ["mesh.pp=2", EIGHT_LAYERS], [[f"train.micro_batch={n}"] for n in (1, 2)], 130_000, 130_000),
}


def gpus_present():
    listed = subprocess.run("nvidia-smi -L", shell=True, capture_output=True, text=True).stdout
    present = sum(line.startswith("GPU ") for line in listed.splitlines())
    if not present:
        sys.exit("FAIL no GPU on this machine  next: marrow doctor")
    return present


def make_corpus(prefix, tokens, *more):
    if not os.path.exists(prefix + ".bin"):
        subprocess.run([sys.executable, str(ROOT / "bench/zipf_corpus.py"), prefix, str(tokens), *more], check=True)


def measure(gpus, settings, steps):
    options = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, str(ROOT / "bench/train_speed.py"), MARROW, "configs/runs/gpu-30b-4layers.toml",
               str(steps), *(["--processes", str(gpus)] if gpus > 1 else []), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(f"{' '.join(settings)}: {(done.stderr or done.stdout).strip().splitlines()[-1]}", flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main(steps="30"):
    present = gpus_present()
    make_corpus("/tmp/zipf", 9_000_000)
    print("| run | micro_batch, settings | tokens/s | of the goal | TFLOP/s | MFU | memory of a rank | "
          "expert load, max / mean | launch → first step | loss of the last step |\n|" + "---|" * 10)
    missed = []
    for name, (gpus, common, rows, goal, least) in GROUPS.items():
        if gpus > present:
            continue
        best = 0
        for row in rows:
            r = measure(gpus, common + row, steps)
            if r is None:
                continue
            best = max(best, r["tokens_per_second"])
            settings = ", ".join(row).replace("train.micro_batch=", "")
            print(f"| {name} | {settings} | {r['tokens_per_second']:,} | {r['tokens_per_second'] / goal:.2f} | "
                  f"{r['tflops_per_gpu']:.0f} | {100 * (r['mfu'] or 0):.1f} % | {r['peak_memory_gb']:.1f} GB | "
                  f"{r['expert_load_max_over_mean']:.1f} | {r['first_step_seconds']:.1f} s | {r['losses'][-1]:.4f} |",
                  flush=True)
        if best < least:
            missed.append(f"{name}: {best:,} of {least:,} tokens/s")
    if missed:
        sys.exit(f"FAIL {'; '.join(missed)}  next: .agents/skills/profile-step/profile.sh")
    print("PASS every group of rows reaches what it must")


if __name__ == "__main__":
    main(*sys.argv[1:])
