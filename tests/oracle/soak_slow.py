"""2,000 steps over four ranks, on another mesh after each of ten resumes, against one process uninterrupted.

Learning rates are equal to the bit, and so are the numbers of targets and tokens of each step; the first ten
losses after each resume are those of the same checkpoint resumed on one process (1e-4); every mean over 100
steps is that of the uninterrupted run within 1 %.
"""
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MARROW = os.environ.get("MARROW", str(ROOT / "build/marrow"))
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
STEPS, SEGMENTS = int(os.environ.get("SOAK_STEPS", "2000")), 11
MESHES = [dict(zip(("pp", "dp", "cp", "ep"), sizes)) for sizes in (
    (1, 4, 1, 1), (2, 2, 1, 1), (1, 1, 4, 1), (2, 1, 1, 2), (1, 2, 2, 1), (1, 1, 1, 4), (4, 1, 1, 1), (1, 1, 2, 2),
    (2, 1, 2, 1), (1, 2, 1, 2), (1, 4, 1, 1))]


def run(scratch, folder, steps, mesh=None):
    sets = [f'log.dir="{folder}"', f"train.steps={steps}", *(f"mesh.{k}={v}" for k, v in (mesh or {}).items())]
    command = [MARROW, "pretrain", scratch / "run.toml", *[word for s in sets for word in ("--set", s)]]
    done = subprocess.run(command + (["--processes", "4"] if mesh else []), cwd=ROOT, env=ENVIRONMENT,
                          capture_output=True, text=True)
    assert done.returncode == 0, f"{mesh}: exit {done.returncode}\n{done.stderr[-3000:]}"


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}


def main(scratch):
    (scratch / "text").mkdir()
    for path in sorted((ROOT / "src").rglob("*.cpp")):
        (scratch / "text" / f"{path.parent.name}-{path.stem}.txt").write_text(path.read_text())
    subprocess.run([MARROW, "tokenize", "--tokenizer", "bytes", "--input", scratch / "text", "--output",
                    scratch / "corpus"], check=True, capture_output=True)
    (scratch / "run.toml").write_text(f"""
[model]
config = "{ROOT}/configs/models/qwen3-tiny.json"
[data]
train = ["{scratch}/corpus"]
seq_len = 32
mask_documents = true
[train]
global_batch = 8
cpu_threads = 1
[optimizer]
lr = 1e-3
warmup_steps = 150
schedule = "constant"
[checkpoint]
keep = 1
[log]
every = 100
""")
    model = json.loads((ROOT / "configs/models/qwen3-tiny.json").read_text())
    model["num_hidden_layers"] = 8  # two for each chunk of pp = 4
    (scratch / "model.json").write_text(json.dumps(model))
    text = (scratch / "run.toml").read_text().replace(f"{ROOT}/configs/models/qwen3-tiny.json", f"{scratch}/model.json")
    (scratch / "run.toml").write_text(text)
    run(scratch, scratch / "whole", STEPS)
    folder, worst_resume = scratch / "meshes", 0.0
    for segment, mesh in enumerate(MESHES):
        begin, end = STEPS * segment // SEGMENTS, STEPS * (segment + 1) // SEGMENTS
        if segment > 0:
            shutil.copytree(folder, scratch / "resumed")
            run(scratch, scratch / "resumed", begin + 10)
        run(scratch, folder, end, mesh)
        if segment > 0:
            ours, alone = metrics(folder), metrics(scratch / "resumed")
            for step in range(begin + 1, begin + 11):
                difference = abs(ours[step]["loss"] - alone[step]["loss"]) / alone[step]["loss"]
                worst_resume = max(worst_resume, difference)
                assert difference < 1e-4, (mesh, step, ours[step]["loss"], alone[step]["loss"])
            shutil.rmtree(scratch / "resumed")
        print(f"steps {begin + 1} to {end} on {mesh}", flush=True)
    ours, whole = metrics(folder), metrics(scratch / "whole")
    assert sorted(ours) == sorted(whole) == list(range(1, STEPS + 1))
    assert all(ours[s][key] == whole[s][key] for s in whole for key in ("lr", "tokens"))
    worst = 0.0
    for first in range(1, STEPS, 100):
        steps = range(first, min(first + 100, STEPS + 1))
        mean = lambda lines: sum(lines[s]["loss"] for s in steps) / len(steps)
        worst = max(worst, abs(mean(ours) - mean(whole)) / mean(whole))
    assert worst < 0.01, worst
    print(f"loss {whole[1]['loss']:.3f} -> {whole[STEPS]['loss']:.3f}; after resumes at most {worst_resume:.1e} from one "
          f"process; means over 100 steps at most {worst:.1e} from the uninterrupted run")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="marrow-soak-") as name:
        main(Path(name))
    print("PASS")
