"""Runs `marrow pretrain` for some steps and prints what it reached, as one JSON line.

train_speed.py MARROW RUN.toml STEPS [--set key=value ...]

Seconds from launch to the first step, then the median of all but the first third of the steps. The
run is ended by SIGKILL after its last step, since a checkpoint of such a model takes minutes.
"""
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time


def read_lines(path):
    if not os.path.exists(path):
        return []
    with open(path) as file:
        lines = file.read().splitlines()
    return [json.loads(line) for line in lines if '"loss"' in line]


def main(marrow, config, steps, *options):
    steps = int(steps)
    folder = tempfile.mkdtemp()
    start = time.time()
    process = subprocess.Popen(
        [marrow, "pretrain", config, "--json", "--set", f'log.dir="{folder}"', "--set",
         f'checkpoint.dir="{folder}/checkpoints"', "--set", "checkpoint.every=0",  # of nobody else's run
         "--set", f"train.steps={steps + 1000}", *options], stdout=subprocess.DEVNULL)
    first = None
    while process.poll() is None and len(read_lines(f"{folder}/metrics.jsonl")) < steps:
        if first is None and read_lines(f"{folder}/metrics.jsonl"):
            first = time.time() - start
        time.sleep(0.02)
    if process.poll() is not None:
        sys.exit(f"FAIL marrow ended early with code {process.returncode}")
    process.send_signal(signal.SIGKILL)
    lines = read_lines(f"{folder}/metrics.jsonl")
    steady = lines[len(lines) // 3:]
    median = lambda key: statistics.median(line[key] for line in steady)
    print(json.dumps({
        "options": options, "steps": len(lines), "first_step_seconds": round(first or -1, 2),
        "tokens_per_second": round(median("tokens_per_second")),
        "tflops_per_gpu": round(median("tflops_per_gpu"), 1),
        "mfu": median("mfu") if steady[0]["mfu"] is not None else None,
        "peak_memory_gb": round(max(line["peak_memory_bytes"] for line in lines) / 1e9, 2),
        "expert_load_max_over_mean": round(median("expert_load_max_over_mean"), 2),
        "losses": [line["loss"] for line in lines], "norms": [line["grad_norm"] for line in lines],
        "folder": folder}), flush=True)


main(*sys.argv[1:])
