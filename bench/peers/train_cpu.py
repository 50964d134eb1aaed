"""`./dev bench train-cpu`: marrow beside transformers on the CPU, one and two threads.

Same model (configs/models/qwen3-bench-cpu.json), 8 x 256 tokens a step, AdamW, clipping, fp32. The
two alternate, so that a busy machine slows both. Fails where marrow is less than 1.3 times as fast.
"""
import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL, RUN = "configs/models/qwen3-bench-cpu.json", "configs/runs/bench-train-cpu.toml"
MARROW = os.environ.get("MARROW", str(ROOT / "build/marrow"))
GOAL = 1.3


def flops_per_token(seq_len):
    """Three times the forward's matrix products, causal attention at half."""
    c = json.loads((ROOT / MODEL).read_text())
    hidden, heads, head_size = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    projections = hidden * head_size * (2 * heads + 2 * c["num_key_value_heads"])
    attention = heads * head_size * seq_len  # (query·key + weights·value) / 2
    experts = 3 * hidden * c["moe_intermediate_size"] * c["num_experts_per_tok"]
    layer = projections + attention + experts + hidden * c["num_experts"]
    return 6 * (c["num_hidden_layers"] * layer + hidden * c["vocab_size"])


def run(command, **kwargs):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **kwargs)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def marrow(threads, steps):
    """Median tokens/s by the wall clock between the steps' own records."""
    shutil.rmtree(ROOT / "runs/bench-train-cpu", ignore_errors=True)
    run([MARROW, "pretrain", RUN, "--set", f"train.cpu_threads={threads}", "--set", f"train.steps={steps + 2}"])
    lines = (ROOT / "runs/bench-train-cpu/metrics.jsonl").read_text().splitlines()
    steps = [m for m in map(json.loads, lines) if "loss" in m][2:]
    return statistics.median(m["tokens_per_second"] for m in steps), steps[-1].get("expert_load_max_over_mean")


def peer(threads, steps, implementation=None):
    choice = ["--implementation", implementation] if implementation else []
    out = run([sys.executable, "bench/peers/transformers_train.py", "--config", MODEL, "--threads", str(threads),
               "--steps", str(steps), *choice])
    return json.loads(out.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    # Random text over all byte values that UTF-8 has, as the peer's ids are random: the same routing work.
    text = ROOT / "data/bench-train-cpu.txt"
    text.parent.mkdir(exist_ok=True)
    draw = random.Random(0)
    text.write_text("".join(chr(draw.choice((draw.randrange(32, 127), draw.randrange(0xA0, 0x800))))
                            for _ in range(8 * 256 * (args.steps + 4))))
    run([MARROW, "tokenize", "--tokenizer", "bytes", "--input", text, "--output", "data/bench-train-cpu", "--overwrite"])
    print("threads  transformers  marrow  ratio  sgemm GFLOP/s  share   (tokens/s, median of rounds)")
    worst = float("inf")
    for threads in args.threads:
        best, ours, theirs, gflops = None, [], [], []
        for _ in range(args.rounds):
            result = peer(threads, args.steps, best)
            if best is None:
                best = result["implementation"]
                print(f"         experts tried: {result['tried']}: {best}")
            rate, load = marrow(threads, args.steps)
            theirs.append(result["tokens_per_second"])
            ours.append(rate)
            gflops.append(result["gflops"])
        ratio = statistics.median(ours) / statistics.median(theirs)
        share = statistics.median(ours) * flops_per_token(256) / 1e9 / max(gflops)
        print(f"{threads:7d}  {statistics.median(theirs):12.0f}  {statistics.median(ours):6.0f}  {ratio:5.2f}"
              f"  {max(gflops):13.1f}  {share:5.1%}   rounds: {[round(x) for x in theirs]} {[round(x) for x in ours]}, "
              f"busiest expert {load:.2f} x mean")
        worst = min(worst, ratio)
    print(f"worst ratio {worst:.2f}, goal {GOAL}")
    return worst < GOAL


if __name__ == "__main__":
    sys.exit(main())
