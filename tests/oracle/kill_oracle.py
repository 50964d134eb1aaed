"""Real training on four ranks, killed again and again: a resume goes on exactly where it was.

SIGKILL of a random rank at random moments, also during saves, 20 times (KILLS), each time resumed; then the
losses, norms and learning rates of every step must be those of an uninterrupted run, bit for bit. SIGTERM to
one rank and Ctrl-C at the launcher save and exit 0.
"""
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MARROW = os.environ.get("MARROW", str(ROOT / "build/marrow"))
KILLS = int(os.environ.get("KILLS", "20"))
STEPS = 200
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


def command(folder, *sets, steps=STEPS):
    options = [f'log.dir="{folder}"', f"train.steps={steps}", "checkpoint.every=2", *sets]
    return [MARROW, "pretrain", CONFIG, "--processes", "4", *[word for o in options for word in ("--set", o)]]


def ranks(folder):
    """Processes of the ranks: they run under mpirun with the run's folder on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() not in (entry / "cmdline").read_bytes():
                continue
            parent = re.search(r"^PPid:\s*(\d+)", (entry / "status").read_text(), re.M).group(1)
            if Path(f"/proc/{parent}/comm").read_text().strip() == "mpirun":
                found.append(int(entry.name))
        except OSError:
            pass
    return found


def metrics(folder):
    path = Path(folder) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: tuple(line[k] for k in ("loss", "grad_norm", "lr", "balance_loss"))
            for line in lines if "loss" in line}


def start(folder, *sets, **kwargs):
    return subprocess.Popen(command(folder, *sets, **kwargs), cwd=ROOT, env=ENVIRONMENT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process, code, limit=120):
    out, err = process.communicate(timeout=limit)
    assert process.returncode == code, f"exit {process.returncode}, not {code}:\n{out[-1500:]}\n{err[-3000:]}"
    return err


def kill_and_resume(scratch):
    finish(start(scratch / "whole"), 0, 300)
    whole = metrics(scratch / "whole")
    assert sorted(whole) == list(range(1, STEPS + 1))
    draw, folder, kills, seen = random.Random(7), scratch / "killed", 0, 0
    while kills < KILLS:
        process = start(folder)
        # Each third one anywhere in the start-up, the others some steps later; saves are every second step.
        if kills % 3 == 0:
            time.sleep(draw.uniform(0.2, 3.0))
        else:
            wanted, deadline = max(metrics(folder), default=0) + draw.randint(1, 9), time.monotonic() + 60
            while process.poll() is None and max(metrics(folder), default=0) < wanted and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(draw.uniform(0, 0.2))
        while not (victims := ranks(folder)) and process.poll() is None:
            time.sleep(0.02)
        if process.poll() is not None or not victims:
            finish(process, 0)  # all steps done before a kill
            break
        os.kill(draw.choice(victims), signal.SIGKILL)
        begin = time.monotonic()
        err = finish(process, 4, 30)
        assert time.monotonic() - begin < 10, f"the other ranks took {time.monotonic() - begin:.1f} s to end"
        assert "rank" in err, err
        assert not ranks(folder), "a rank is left"
        kills += 1
        seen = max(seen, max(metrics(folder), default=0))
    finish(start(folder), 0, 300)
    killed = metrics(folder)
    assert killed == whole, [(s, killed.get(s), whole[s]) for s in whole if killed.get(s) != whole[s]][:3]
    print(f"{kills} kills up to step {seen}: all {len(whole)} steps as without a kill")
    assert kills >= KILLS // 2 and seen >= kills, f"{kills} kills hit a running rank, the last at step {seen}"


def signals_save(scratch):
    for name, send in (("sigterm", lambda p, f: os.kill(ranks(f)[-1], signal.SIGTERM)),
                       ("ctrl-c", lambda p, f: p.send_signal(signal.SIGINT))):
        folder = scratch / name
        process = start(folder, "checkpoint.every=0", steps=100000)
        deadline = time.monotonic() + 60
        while len(metrics(folder)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        send(process, folder)
        finish(process, 0, 30)
        last = max(metrics(folder))
        saved = sorted(p.name for p in (folder / "checkpoints").iterdir())
        assert saved == ["lock", f"step-{last:08}"], (saved, last)
        print(f"{name}: saved step {last}, exit 0")


def main(scratch):
    global CONFIG
    text = scratch / "text"
    text.mkdir()
    for name in ("README.md", "AGENTS.md", "docs/architecture.md"):
        (text / Path(name).name).write_text((ROOT / name).read_text())
    subprocess.run([MARROW, "tokenize", "--tokenizer", "bytes", "--input", text, "--output", scratch / "corpus"],
                   check=True, capture_output=True)
    CONFIG = str(scratch / "run.toml")
    Path(CONFIG).write_text(f"""
[model]
config = "{ROOT}/configs/models/qwen3-tiny.json"
[data]
train = ["{scratch}/corpus"]
seq_len = 64
[mesh]
pp = 2
ep = 2
[train]
global_batch = 8
deterministic = true
cpu_threads = 1
[optimizer]
lr = 1e-3
warmup_steps = 20
[log]
watchdog_seconds = 30
""")
    signals_save(scratch)
    kill_and_resume(scratch)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="marrow-kill-") as folder:
        main(Path(folder))
    print("PASS")
