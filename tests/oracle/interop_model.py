"""A small Qwen3-MoE that marrow trains for some steps and exports: what other programs then read.

Its text is Python's own standard library, so every machine has it. Each step is in fp32 on the CPU.
"""
import json
import os
import subprocess
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".venv-interop/bin/python"
SEQ_LEN, HELDOUT_WINDOWS, END_OF_DOCUMENT = 128, 24, 256
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
           "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "2"}


def marrow(*words):
    """A subcommand's JSON result."""
    done = subprocess.run([os.environ["MARROW"], *map(str, words), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, f"marrow {' '.join(map(str, words))}: exit {done.returncode}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


def heldout_text():
    """ASCII of HELDOUT_WINDOWS whole windows, so that bytes, characters and tokens are the same."""
    text = (Path(os.__file__).parent / "textwrap.py").read_bytes().decode("ascii", "ignore")
    size = SEQ_LEN * HELDOUT_WINDOWS
    assert len(text) >= size, len(text)
    return text[:size]


def train(work, steps):
    """Trains and exports in `work`; returns the checkpoint, the export and the held-out corpus."""
    texts = work / "train"
    texts.mkdir()
    for name in ("argparse", "ast", "cmd", "csv", "dataclasses", "difflib", "enum", "functools", "inspect", "optparse",
                 "pathlib", "pprint", "random", "shutil", "string", "tempfile", "typing", "zipfile"):
        source = Path(os.__file__).parent / f"{name}.py"
        if source.exists():
            (texts / source.name).write_bytes(source.read_bytes())
    (work / "heldout.txt").write_text(heldout_text())
    for name, source in (("corpus", texts), ("heldout", work / "heldout.txt")):
        marrow("tokenize", "--tokenizer", "bytes", "--input", source, "--output", work / name)
    # The end-of-document token goes from the end to the front: others start a text with it.
    tokens = np.fromfile(work / "heldout.bin", dtype=np.uint16)
    assert tokens[-1] == END_OF_DOCUMENT and len(tokens) == SEQ_LEN * HELDOUT_WINDOWS + 1, tokens
    np.roll(tokens, 1).tofile(work / "heldout.bin")

    config = json.loads((ROOT / "configs/models/qwen3-tiny.json").read_text())
    config.update(hidden_size=128, head_dim=32, moe_intermediate_size=64, num_hidden_layers=3)
    (work / "config.json").write_text(json.dumps(config))
    run = {"model.config": str(work / "config.json"), "data.train": [str(work / "corpus")], "data.seq_len": SEQ_LEN,
           "train.steps": steps, "train.global_batch": 8, "train.micro_batch": 8, "train.device": "cpu",
           "train.dtype": "fp32", "optimizer.name": "muon", "optimizer.lr": 5e-3, "optimizer.warmup_steps": 5,
           "log.dir": str(work / "run")}
    (work / "run.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in run.items()))
    marrow("pretrain", work / "run.toml")
    checkpoint, export = work / "run/checkpoints" / f"step-{steps:08d}", work / "export"
    marrow("export", checkpoint, "--output", export)
    return checkpoint, export, work / "heldout"
