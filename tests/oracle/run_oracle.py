"""A run as its user sees it: resume, signals, damage, full disk, divergence, bad input.

Every case checks the exit code, that the error names the thing and a fix, and what was left behind.
"""
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
MARROW = os.environ.get("MARROW", str(ROOT / "build/marrow"))
TINY = ROOT / "configs/models/qwen3-tiny.json"
WORK = Path(tempfile.mkdtemp())
checks = 0


def check(condition, text):
    global checks
    checks += 1
    if not condition:
        sys.exit(f"FAIL {text}  next: .venv/bin/python tests/oracle/run_oracle.py")


def marrow(*words, limit=None):
    before = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) if limit else None
    return subprocess.run([MARROW, *map(str, words)], capture_output=True, text=True, preexec_fn=before)


def toml(name, config=TINY, **settings):
    base = {"model.config": str(config), "data.train": [str(WORK / "corpus")], "data.seq_len": 32,
            "train.steps": 20, "train.global_batch": 4, "train.micro_batch": 2, "train.deterministic": True,
            "train.device": "cpu", "optimizer.lr": 1e-3, "optimizer.warmup_steps": 15, "log.dir": str(WORK / name)}
    base.update({key.replace("__", "."): value for key, value in settings.items()})
    path = WORK / f"{name}.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in base.items() if value is not None))
    return path


def metrics(name):
    lines = [json.loads(line) for line in (WORK / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for pattern in ("*.safetensors", "router_state.json") for path in sorted(Path(folder).glob(pattern))}


def refused(done, code, *words):
    check(done.returncode == code, f"exit {done.returncode}, not {code}: {done.stderr[-400:]}")
    check("fix: " in done.stderr, f"no fix in: {done.stderr[-400:]}")
    for word in words:
        check(word in done.stderr, f"{word!r} is not in: {done.stderr[-600:]}")


def make_corpus():
    text = WORK / "text"
    text.mkdir()
    rng = np.random.default_rng(3)
    for i in range(40):
        (text / f"{i}.txt").write_text(" ".join(f"word{w}" for w in rng.integers(0, 50, 60 + i)))
    for name in ("corpus", "other"):
        done = marrow("tokenize", "--tokenizer", "bytes", "--input", text, "--output", WORK / name)
        check(done.returncode == 0, done.stderr)
        (text / "0.txt").write_text("another text altogether " * 9)


def resume_is_exact():
    """20 steps in one go and 10 + 10: every number and every byte (warm-up still runs at step 10)."""
    for name, extra in [("adamw", {}), ("muon", {"optimizer__name": "muon"}), ("bf16", {"train__dtype": "bf16"}),
                        ("layer", {"train__recompute": "layer", "router__balance": "sequence"})]:
        whole, parts = toml(f"{name}-whole", **extra), toml(f"{name}-parts", **extra)
        done = marrow("pretrain", whole)
        check(done.returncode == 0, done.stderr)
        long = subprocess.Popen([MARROW, "pretrain", parts, "--set", "checkpoint.every=10"], stderr=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL)
        check(long.wait() == 0, "run with a checkpoint at step 10")
        shutil.rmtree(WORK / f"{name}-parts/checkpoints/step-00000020")
        done = marrow("pretrain", parts, "--set", "log.every=3")
        check(re.search(rf"^{TINY}, 4 layers, on cpu in (fp32|bf16): pp 1 x .*{name}-parts$", done.stderr, re.M), done.stderr)
        check(done.returncode == 0 and "at step 10, with other settings: " in done.stderr and
              re.search(r"settings: (checkpoint.every = \d+, )?log.every = 3$", done.stderr, re.M), done.stderr)
        one, two = metrics(f"{name}-whole"), metrics(f"{name}-parts")
        check([line["step"] for line in two] == list(range(1, 21)), "a line for each step")
        for a, b in zip(one, two):
            for key in ("loss", "grad_norm", "lr", "balance_loss_per_layer", "expert_load_max_over_mean"):
                check(a[key] == b[key], f"{name}: step {a['step']}: {key} {a[key]} and {b[key]}")
        check(hashes(WORK / f"{name}-whole/checkpoints/step-00000020") ==
              hashes(WORK / f"{name}-parts/checkpoints/step-00000020"), f"{name}: bytes of the last checkpoint")
        check(one[-1]["loss"] < one[0]["loss"], f"{name}: the loss falls")


def layouts_agree():
    """Micro-batch size and recomputation change no loss beyond rounding."""
    check(marrow("pretrain", toml("layout-1", train__micro_batch=4)).returncode == 0, "micro_batch 4")
    check(marrow("pretrain", toml("layout-2", train__micro_batch=1, train__recompute="layer")).returncode == 0,
          "micro_batch 1")
    for a, b in zip(metrics("layout-1")[:10], metrics("layout-2")[:10]):
        check(abs(a["loss"] - b["loss"]) <= 1e-5 * a["loss"], f"losses {a['loss']} and {b['loss']}")


def recomputation_changes_no_bit():
    for dtype in ("fp32", "bf16"):
        seen = []
        for recompute in ("none", "cheap", "layer"):
            name = f"recompute-{dtype}-{recompute}"
            done = marrow("pretrain", toml(name, train__dtype=dtype, train__recompute=recompute))
            check(done.returncode == 0, done.stderr)
            seen.append(([(line["loss"], line["grad_norm"]) for line in metrics(name)],
                         hashes(WORK / f"{name}/checkpoints/step-00000020")))
        check(seen[1] == seen[0] and seen[2] == seen[0], f"{dtype}: none, cheap and layer differ")


def signals_save():
    """SIGTERM, SIGINT and SIGHUP save and end a run; SIGHUP does not where it is ignored, as under nohup."""
    for name, number, ignored in (("term", signal.SIGTERM, False), ("int", signal.SIGINT, False),
                                  ("hup", signal.SIGHUP, False), ("nohup", signal.SIGTERM, True)):
        action = signal.SIG_IGN if ignored else signal.SIG_DFL
        run = subprocess.Popen([MARROW, "pretrain", toml(name, train__steps=100000)], stderr=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGHUP, action))
        while not (WORK / name / "metrics.jsonl").exists() or len(metrics(name)) < 3:
            time.sleep(0.05)
        if ignored:
            steps = len(metrics(name))
            run.send_signal(signal.SIGHUP)
            while len(metrics(name)) < steps + 5:
                check(run.poll() is None, "an ignored SIGHUP stays ignored")
                time.sleep(0.05)
        run.send_signal(number)
        check(run.wait(60) == 0, f"{name}: exit {run.returncode}")
        last = metrics(name)[-1]["step"]
        check((WORK / name / f"checkpoints/step-{last:08}/COMPLETE").exists(), f"{name}: step {last} was saved")


def signals_end_a_validation():
    """Between its batches, on all ranks at the same one; the step before it is saved, without a validation loss."""
    text = WORK / "long.txt"
    text.write_text("a validation of minutes, so that a signal comes within it " * 100_000)
    check(marrow("tokenize", "--tokenizer", "bytes", "--input", text, "--output", WORK / "long").returncode == 0, "corpus")
    for name, words in (("validation", ()), ("validation-2", ("--processes", "2"))):
        run = subprocess.Popen([MARROW, "pretrain", toml(name, data__validation=[str(WORK / "long")],
                                                         data__validate_every=1, data__validate_sequences=10**6,
                                                         train__micro_batch=1), *words], stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)
        for line in run.stderr:
            if line.startswith("evaluate "):
                break
        run.send_signal(signal.SIGTERM)
        _, err = run.communicate(timeout=60)
        check(run.returncode == 0 and "evaluate" not in err, f"{name}: exit {run.returncode}: {err}")
        check((WORK / name / "checkpoints/step-00000001/COMPLETE").exists(), f"{name}: step 1 was saved")
        check("validation_loss" not in (WORK / name / "metrics.jsonl").read_text(), f"{name}: no loss of a part")


def damage_is_passed_over():
    path = toml("damage", checkpoint__every=5, checkpoint__keep=0)
    check(marrow("pretrain", path).returncode == 0, "run")
    newest = WORK / "damage/checkpoints/step-00000020"
    victim = next(newest.glob("model-*.safetensors"))
    os.truncate(victim, victim.stat().st_size - 100)
    done = marrow("pretrain", path)
    check(done.returncode == 0 and "step-00000020" in done.stderr and "step-00000015" in done.stderr,
          f"the damaged one is named, the previous one used: {done.stderr[-500:]}")
    refused(marrow("eval", newest.parent / "step-00000010" / "config.json", "--data", WORK / "corpus"), 2)


def paths_of_no_such_thing():
    """2 where nothing is at a path, or not what the command takes; 3 where a file is damaged."""
    newest = WORK / "damage/checkpoints/step-00000020"
    (newest.parent / "step-00000099").mkdir()
    for command in (("eval", "--data", WORK / "corpus"), ("export", "--output", WORK / "never"), ("generate", "--prompt", "a"),
                    ("inspect",)):
        missing = marrow(command[0], newest.parent / "step-00000042", *command[1:])
        refused(missing, 2, "step-00000042 does not exist", "the newest one beside it is", "step-00000020")
        for odd in (WORK / "text", WORK / "corpus.json"):  # no model at all; inspect takes a file as a tokenizer.json
            if command[0] != "inspect" or odd.is_dir():
                refused(marrow(command[0], odd, *command[1:]), 2)
    refused(marrow("import", WORK / "text", "--output", WORK / "never"), 2)
    refused(marrow("report", WORK / "text"), 2)
    refused(marrow("plan", WORK / "damage.toml", "--output", WORK / "nowhere/plan.svg"), 2, "mkdir -p")
    refused(marrow("eval", newest, "--data", WORK / "corpus", "--seq-len", "99999"), 2, "max_position_embeddings", "or less")
    marker = newest / "COMPLETE"
    marker.write_text(marker.read_text().replace('"format": 3', '"format": 9'))
    refused(marrow("eval", newest, "--data", WORK / "corpus"), 3, "format 9", "reads 3", "marrow import")


def full_disk():
    path = toml("disk", checkpoint__every=10, train__steps=10, optimizer__warmup_steps=0)
    check(marrow("pretrain", path).returncode == 0, "run")
    before = hashes(WORK / "disk/checkpoints/step-00000010")
    refused(marrow("pretrain", path, "--set", "train.steps=20", limit=200_000), 4, "bytes")
    check(hashes(WORK / "disk/checkpoints/step-00000010") == before, "the earlier checkpoint is whole")
    left = sorted(p.name for p in (WORK / "disk/checkpoints").iterdir())
    check(left == ["lock", "step-00000010"], f"left behind: {left}")


def divergence():
    path = toml("nan", optimizer__lr=1e30, optimizer__clip_norm=0, optimizer__warmup_steps=0)
    refused(marrow("pretrain", path), 5, "must be finite", "skip_nonfinite")
    done = marrow("pretrain", path, "--set", "train.skip_nonfinite=2")
    refused(done, 5, "3 such steps")
    check(done.stderr.count("update skipped") == 2, "two skips are told")


def changed_runs():
    check(marrow("pretrain", toml("same", train__steps=5, optimizer__warmup_steps=0)).returncode == 0, "run")
    for key, value, word in (("train__seed", 1, "seed"), ("data__seq_len", 16, "seq_len"),
                             ("data__train", [str(WORK / "other")], "data.train")):
        refused(marrow("pretrain", toml("same", train__steps=8, optimizer__warmup_steps=0, **{key: value})), 2, word)
    config = json.loads(TINY.read_text())
    config["rms_norm_eps"] = 1e-5
    (WORK / "changed.json").write_text(json.dumps(config))
    refused(marrow("pretrain", toml("same", config=WORK / "changed.json", train__steps=8, optimizer__warmup_steps=0)), 2,
            "rms_norm_eps")


def new_runs_keep_apart():
    """init_from another model or tokenizer, a fresh run over old checkpoints, two runs in one folder."""
    base = toml("first", train__steps=4, optimizer__warmup_steps=0)
    check(marrow("pretrain", base).returncode == 0, "run")
    refused(marrow("pretrain", base, "--set", "checkpoint.resume=false"), 2, "checkpoint.resume")
    told = (WORK / "first/run.toml").read_text()
    done = marrow("pretrain", base, "--set", "optimizer.lr=0.5")
    check(done.returncode == 0 and "lr = 0.5" in done.stderr and "nothing to train: " in done.stderr, done.stderr)
    check((WORK / "first/run.toml").read_text() == told, "run.toml tells how the steps were made")
    tiny = json.loads(TINY.read_text())
    (WORK / "theta.json").write_text(json.dumps(tiny | {"rope_theta": 5.0}))
    new = {"model__init_from": str(WORK / "first"), "train__steps": 4, "optimizer__warmup_steps": 0}
    refused(marrow("pretrain", toml("second", config=WORK / "theta.json", **new)), 2, "rope_theta", "5", "config.json of")
    further = {"max_position_embeddings": 2 * tiny["max_position_embeddings"], "router_aux_loss_coef": 0.5}
    (WORK / "further.json").write_text(json.dumps(tiny | further | {"pretraining_tp": 1}))
    done = marrow("pretrain", toml("further", config=WORK / "further.json", **new))
    check(done.returncode == 0, f"longer positions and another coefficient: {done.stderr}")
    (WORK / "note.json").write_text(json.dumps(tiny | {"note": "x"}))
    refused(marrow("pretrain", toml("second", config=WORK / "note.json", **new)), 2, "remove note", "absent")
    done = marrow("pretrain", toml("second", **new))
    check(done.returncode == 0 and "initial weights from" in done.stderr, done.stderr)
    check(metrics("second")[0]["loss"] < metrics("first")[0]["loss"], "it starts from the trained weights")
    (WORK / "both.json").write_text(json.dumps(tiny | {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}))
    refused(marrow("pretrain", toml("bad", config=WORK / "both.json")), 2, "rope_theta")
    (WORK / "deep.json").write_text('{"model_type":' + "[" * 100000 + "]" * 100000 + "}")
    refused(marrow("pretrain", toml("bad", config=WORK / "deep.json")), 2, "nested")
    for change in (dict(num_hidden_layers=2**62), dict(rms_norm_eps=-1), dict(rope_theta=0), dict(num_experts=2**40),
                   dict(initializer_range=-1), dict(head_dim=0), dict(partial_rotary_factor=0.5), dict(num_experts=513),
                   dict(layer_types=["sliding_attention"] * tiny["num_hidden_layers"])):
        (WORK / "odd.json").write_text(json.dumps(tiny | change))
        refused(marrow("pretrain", toml("bad", config=WORK / "odd.json")), 2, "odd.json")
    refused(marrow("pretrain", base, "--set", "train.seed=9"), 2, "train.seed")
    check("seed = 9" not in (WORK / "first/run.toml").read_text(), "a refused run leaves run.toml alone")
    refused(marrow("pretrain", toml("late", checkpoint__dir=str(WORK / "corpus.bin"))), 4, "corpus.bin")
    shutil.copytree(WORK / "first", WORK / "spoilt")
    for state in (WORK / "spoilt/checkpoints").glob("*/trainer_state.json"):
        state.write_text("{}")
    refused(marrow("pretrain", toml("spoilt", train__steps=9, optimizer__warmup_steps=0)), 3, "no checkpoint in")
    check(len(metrics("spoilt")) == 4, "its metrics are kept")
    refused(marrow("pretrain", toml("bad", optimizer__name="muon", optimizer__state_dtype="bf16")), 2, "state_dtype")
    done = marrow("pretrain", toml("auto", mesh__ep="auto", mesh__dp=1, train__steps=1, optimizer__warmup_steps=0))
    check(done.returncode == 0, f"ep = auto: {done.stderr}")
    run = subprocess.Popen([MARROW, "pretrain", toml("twice", train__steps=100000)], stderr=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL)
    while not (WORK / "twice/metrics.jsonl").exists():
        time.sleep(0.05)
    refused(marrow("pretrain", WORK / "twice.toml"), 2, "another run holds")
    refused(marrow("pretrain", toml("third", checkpoint__dir=str(WORK / "twice/checkpoints"))), 2, "another run holds",
            "checkpoint.dir")
    run.kill()
    run.wait()


def small_updates_survive():
    """Norm weights of 1.0 move by less than bf16 can tell from 1.0: the masters are fp32."""
    from safetensors.numpy import load_file
    done = marrow("pretrain", toml("small", train__dtype="bf16", train__steps=3, optimizer__warmup_steps=0,
                                   optimizer__lr=1e-4))
    check(done.returncode == 0, done.stderr)
    for file in (WORK / "small/checkpoints/step-00000003").glob("model-*.safetensors"):
        for name, values in load_file(file).items():
            if "norm" in name:
                check(0 < np.abs(values - 1).max() < 2**-10, f"{name} moved by {np.abs(values - 1).max()}")


def bad_models():
    tiny = json.loads(TINY.read_text())
    for change, word in ((dict(model_type="mamba"), "mamba"), (dict(hidden_size=None), "hidden_size"),
                         (dict(attention_bias=True), "attention_bias"), (dict(rope_scaling={"type": "yarn"}), "rope_scaling"),
                         (dict(num_experts_per_tok=99), "num_experts_per_tok"), (dict(vocab_size=200), "vocab")):
        (WORK / "bad.json").write_text(json.dumps({k: v for k, v in (tiny | change).items() if v is not None}))
        refused(marrow("pretrain", toml("bad", config=WORK / "bad.json")), 3 if "vocab_size" in change else 2, word)
    refused(marrow("pretrain", toml("bad", data__seq_len=10**6)), 2, "max_position_embeddings", "data.seq_len at ", "bad.toml:3:16")
    (WORK / "text/short.txt").write_text("too short")
    marrow("tokenize", "--tokenizer", "bytes", "--input", WORK / "text/short.txt", "--output", WORK / "short")
    refused(marrow("pretrain", toml("bad", data__train=[str(WORK / "short")])), 3, "short", "10 tokens", "seq_len")
    refused(marrow("pretrain", toml("bad", train__global_batch=5)), 2, "global_batch")
    refused(marrow("pretrain", toml("bad", mesh__ep=3, train__global_batch=6)), 2, "experts do not divide by mesh.ep = 3", "divisor of")
    refused(marrow("pretrain", toml("bad", mesh__ep=3)), 2, "experts do not divide by mesh.ep = 3", "set mesh.ep to a divisor of 8: set [mesh] to pp 1 x dp 1 x cp 1 x ep 1")
    for words in ((), ("--processes", "3")):
        refused(marrow("pretrain", toml("bad", mesh__ep=3), *words), 2, "experts do not divide", "mesh.ep at ")
    refused(subprocess.run([MARROW, "pretrain", "/dev/stdin", "--processes", "2"], text=True, capture_output=True,
                           input=toml("bad").read_text()), 2, "/dev/stdin", "to a file")
    refused(marrow("pretrain", toml("bad", mesh__dp=2)), 2, "mesh")
    (WORK / "tied.json").write_text(json.dumps(tiny | {"tie_word_embeddings": True}))
    refused(marrow("pretrain", toml("bad", config=WORK / "tied.json", mesh__pp=2, mesh__schedule="1f1b",
                                    train__micro_batch=1)), 2, "1f1b", "tied", "dualpipev")
    refused(marrow("estimate", WORK / "bad.toml"), 2, "1f1b", "tied")
    refused(marrow("plan", WORK / "bad.toml", "--output", WORK / "bad.svg"), 2, "1f1b", "tied")
    check(not (WORK / "bad.svg").exists(), "no plan was drawn")
    refused(marrow("pretrain", toml("bad", train__dtype="fp16")), 2, "fp16", "fp8")
    refused(marrow("pretrain", toml("bad", router__balance="bias")), 2, "bias")
    check(not (WORK / "bad/checkpoints").exists(), "nothing was written")
    shutil.copy(WORK / "corpus.bin", WORK / "cut.bin")
    shutil.copy(WORK / "corpus.idx", WORK / "cut.idx")
    os.truncate(WORK / "cut.bin", 100)
    refused(marrow("pretrain", toml("bad", data__train=[str(WORK / "cut")])), 3, "cut.bin")
    for suffix in (".bin", ".idx"):  # cut while a run has it mapped
        shutil.copy(WORK / "corpus.bin", WORK / "cut.bin")
        shutil.copy(WORK / "corpus.idx", WORK / "cut.idx")
        config = toml(f"mapped-{suffix[1:]}", data__train=[str(WORK / "cut")], data__mask_documents=True, train__steps=10**6)
        run = subprocess.Popen([MARROW, "pretrain", config], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not (WORK / f"mapped-{suffix[1:]}/metrics.jsonl").exists() and run.poll() is None:
            time.sleep(0.05)
        os.truncate(WORK / f"cut{suffix}", 100)
        text = run.communicate(timeout=120)[1]
        refused(subprocess.CompletedProcess(run.args, run.returncode, stderr=text), 3, f"cut{suffix}", "while it was in use")


def odd_words_and_files():
    """Odd values on the command line, odd inputs, another tokenizer's corpus, and what --json prints."""
    check(marrow("pretrain", toml("odd", train__steps=2, optimizer__warmup_steps=0)).returncode == 0, "run")
    refused(marrow("export", WORK / "odd", "--output", ""), 2, "--output")
    refused(marrow("tokenize", "--tokenizer", "bytes", "--input", WORK / "text", "--output="), 2, "--output")
    refused(marrow("eval", "", "--data", WORK / "corpus"), 2, "CHECKPOINT|HF_DIR")
    os.mkfifo(WORK / "fifo")
    refused(marrow("tokenize", "--tokenizer", "bytes", "--input", WORK / "fifo", "--output", WORK / "new"), 2, "fifo", "pipe")
    check(not list(WORK.glob("new.*")), "nothing was written")
    exported = WORK / "exported"
    check(marrow("export", WORK / "odd", "--output", exported).returncode == 0, "export")
    for words in (["--prompt", "--x"], ["--prompt=--x"], ["--prompt", "-"], ["--prompt", ""]):
        done = marrow("generate", exported, *words, "--max-tokens", "2", "--json")
        check(done.returncode == 0 and len(json.loads(done.stdout)["ids"]) <= 2, f"{words}: {done.stderr}")
    refused(marrow("generate", exported, "--prompt", "--cpu"), 2, "--prompt=")

    foreign = WORK / "foreign"
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{WORK / 'corpus'}{suffix}", f"{foreign}{suffix}")
    done = marrow("eval", exported, "--data", foreign, "--json")
    check(done.returncode == 0 and done.stderr == "", f"standard error stays empty: {done.stderr}")
    check("foreign.json" in json.loads(done.stdout)["warnings"][0], "the warning is in the result")
    done = marrow("pretrain", toml("odd-json", data__train=[str(foreign)], train__global_batch=2, optimizer__lr=1e30,
                                   optimizer__clip_norm=0, optimizer__warmup_steps=0), "--json")
    check(done.returncode == 5 and done.stderr.count("\n") == 1, f"one line: {done.stderr}")
    check(set(json.loads(done.stderr)["error"]) >= {"what", "where", "tensors", "who", "fix"}, done.stderr)

    info = json.loads((WORK / "corpus.json").read_text())
    other = info | {"tokenizer": "elsewhere/tokenizer.json", "tokenizer_hash": "0123abcd"}
    Path(f"{foreign}.json").write_text(json.dumps(other))
    for model in (exported, WORK / "odd"):
        refused(marrow("eval", model, "--data", foreign), 3, "elsewhere/tokenizer.json", "0123abcd", "trained with bytes")
    Path(f"{foreign}.json").write_text(json.dumps(info))
    check(marrow("eval", exported, "--data", foreign).returncode == 0, "the same tokenizer")
    Path(f"{foreign}.json").write_text(json.dumps(info | {"vocab_size": -1}))
    refused(marrow("eval", exported, "--data", foreign), 3, "foreign.json: vocab_size")
    Path(f"{foreign}.json").write_text(json.dumps(info))
    with open(f"{foreign}.bin", "r+b") as tokens:
        tokens.seek(100)
        tokens.write(b"\x07")
    refused(marrow("pretrain", toml("odd-bin", data__train=[str(foreign)])), 3, "foreign.bin", "CRC-32")


def masks_drop_targets():
    """With masks, the last token of a document is not trained on the next document's first."""
    done = marrow("pretrain", toml("masked", data__mask_documents=True, train__steps=5, optimizer__warmup_steps=0))
    check(done.returncode == 0, done.stderr)
    results = [json.loads(marrow("eval", WORK / "masked", "--data", WORK / "corpus", "--seq-len", "64", "--json", *extra).stdout)
               for extra in ([], ["--mask-documents"])]
    check(results[1]["tokens"] < results[0]["tokens"], "a document's last token has no target")


def odd_entries_are_damage():
    """A folder or a pipe in the place of a checkpoint's file: the checkpoint before it is taken."""
    config = toml("odd-entries", train__steps=4, checkpoint__every=2, checkpoint__keep=0,
                  optimizer__warmup_steps=0)
    check(marrow("pretrain", config).returncode == 0, "a run of 4 steps")
    newest = WORK / "odd-entries/checkpoints/step-00000004/trainer_state.json"
    for make in (Path.mkdir, os.mkfifo):
        newest.unlink()
        make(newest)
        again = marrow("pretrain", config, "--set", "checkpoint.every=0", limit=None)
        check(again.returncode == 0 and "step-00000002 at step 2" in again.stderr, again.stderr)
    # Two runs that save in one place.
    first = subprocess.Popen([MARROW, "pretrain", toml("place-1", train__steps=1000000), "--set",
                              f'checkpoint.dir="{WORK}/place"'], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not (WORK / "place-1/metrics.jsonl").exists():
        time.sleep(0.1)
    refused(marrow("pretrain", toml("place-2"), "--set", f'checkpoint.dir="{WORK}/place"'), 2, "checkpoint.dir")
    first.kill()
    first.wait()


def evaluation_shows_progress():
    """A long evaluation says how far it is, but not under --json; both are ended once that is known."""
    words = [MARROW, "eval", WORK / "masked", "--data", WORK / "long", "--seq-len", "32", "--micro-batch", "1"]
    start = time.time()
    run = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    check(any(line.startswith("evaluate ") for line in run.stderr), "progress of a long evaluation")
    run.kill()
    run = subprocess.Popen([*words, "--json"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(time.time() - start + 1)
    run.kill()
    _, err = run.communicate()
    check(run.returncode == -signal.SIGKILL and err == "", f"standard error stays empty: {err}")


def long_step():
    """A run that has been stopped for a while in the middle of a step, at the end of whose silence it says where it is."""
    log = open(WORK / "long-step.txt", "w")
    run = subprocess.Popen([MARROW, "pretrain", toml("long-step", train__global_batch=2**20, log__every=1000)],
                           stdout=subprocess.DEVNULL, stderr=log)
    while not (WORK / "long-step/run.toml").exists():
        time.sleep(0.05)
    run.send_signal(signal.SIGSTOP)
    return run, time.time()


def long_steps_are_told(run, since):
    time.sleep(max(0, since + 30 - time.time()))
    run.send_signal(signal.SIGCONT)
    text = ""
    while "step 1  micro-batch " not in text and time.time() < since + 200:
        time.sleep(0.2)
        text = (WORK / "long-step.txt").read_text()
    run.send_signal(signal.SIGINT)
    while "\nasked to stop: " not in text and time.time() < since + 260:
        time.sleep(0.2)
        text = (WORK / "long-step.txt").read_text()
    run.kill()
    run.wait()
    check(re.search("^step 1  micro-batch .* of 524288\n(.*\n)*asked to stop: ", text, re.M), f"a long step: {text}")


def main():
    make_corpus()
    stopped_run = long_step()
    for case in (resume_is_exact, layouts_agree, recomputation_changes_no_bit, signals_save, signals_end_a_validation, damage_is_passed_over, paths_of_no_such_thing, full_disk, divergence, changed_runs,
                 new_runs_keep_apart, small_updates_survive, bad_models, odd_words_and_files, masks_drop_targets,
                 evaluation_shows_progress, odd_entries_are_damage):
        start = time.time()
        case()
        print(f"{case.__name__}: {time.time() - start:.1f} s", flush=True)
    long_steps_are_told(*stopped_run)
    shutil.rmtree(WORK)
    print(f"PASS {checks} checks")


main()
