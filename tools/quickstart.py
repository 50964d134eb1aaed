"""The main job, text in and Hugging Face checkpoint out, on the CPU: `./dev quickstart`.

The corpus is the Python and Markdown sources of the packages in .venv, held-out files apart. Fails
unless the trained model beats the held-out tokens' own bigram entropy, resumes where it was stopped,
and loads in transformers with the same loss and the same greedy tokens.
"""
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARROW = os.environ.get("MARROW", str(ROOT / "build/marrow"))
DATA, RUN, CONFIG = Path("data/quickstart"), Path("runs/quickstart"), "configs/runs/quickstart.toml"
TRAIN_BYTES, HELDOUT_BYTES, STOP_AFTER = 32_000_000, 64_000, 15
START = time.perf_counter()


def say(text):
    print(f"[{time.perf_counter() - START:4.0f} s] {text}", flush=True)


def check(condition, text):
    if not condition:
        say(f"wrong: {text}")
        sys.exit(1)


def marrow(*words):
    """A subcommand's JSON result; its error as it is where it fails."""
    done = subprocess.run([MARROW, *map(str, words), "--json"], stdout=subprocess.PIPE, text=True)
    check(done.returncode == 0, f"marrow {' '.join(map(str, words))}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def gather_corpus():
    """Copies sources below DATA/text, in the order of their paths' hashes: the split is by file."""
    site = next((ROOT / ".venv/lib").glob("python3*/site-packages"))
    files = [p for suffix in ("py", "md") for p in site.rglob(f"*.{suffix}") if 200 <= p.stat().st_size <= 60_000]
    files.sort(key=lambda p: hashlib.sha256(p.relative_to(site).as_posix().encode()).digest())
    shutil.rmtree(DATA, ignore_errors=True)
    for part, size in (("heldout", HELDOUT_BYTES), ("train", TRAIN_BYTES)):
        total = count = 0
        while files and total < size:
            source = files.pop()
            target = DATA / "text" / part / source.relative_to(site)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            total, count = total + source.stat().st_size, count + 1
        say(f"{part}: {count} source files, {total / 1e6:.1f} MB")
        check(total >= size, f"only {total} bytes of .py and .md in .venv, {size} needed")


def read_tokens(prefix):
    import numpy
    code = (Path(f"{prefix}.idx").read_bytes()[17])
    return numpy.fromfile(f"{prefix}.bin", {4: numpy.int32, 8: numpy.uint16}[code]).astype(numpy.int64)


def bigram_entropy(tokens):
    """H(next | current) in nats of these very tokens: no bigram model can do better on them."""
    import numpy
    pairs = numpy.bincount(tokens[:-1] * 257 + tokens[1:], minlength=257 * 257).reshape(257, 257)
    current = pairs.sum(1, keepdims=True)
    with numpy.errstate(divide="ignore", invalid="ignore"):
        return float(-numpy.nansum(pairs * numpy.log(pairs / current)) / pairs.sum())


def metrics():
    path = RUN / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_done():
    return [m["step"] for m in metrics() if "loss" in m]


def pretrain():
    """Trains in two parts: the first is stopped as Ctrl-C would, the second resumes by itself."""
    command = [MARROW, "pretrain", CONFIG]
    # The early validation is the first number of the closing line.
    first = subprocess.Popen([*command, "--set", "data.validate_every=10"])
    while first.poll() is None and len(steps_done()) < STOP_AFTER:
        time.sleep(0.2)
    check(first.poll() is None, f"pretrain ended by itself: exit code {first.returncode}")
    first.send_signal(signal.SIGINT)
    check(first.wait() == 0, f"an interrupted run saves and exits 0, not {first.returncode}")
    stopped = len(steps_done())
    say(f"stopped after step {stopped}; resuming")
    check(subprocess.run(command).returncode == 0, "pretrain failed on resume")
    done = steps_done()
    check(done == list(range(1, len(done) + 1)) and len(done) > stopped, f"steps are not 1, 2, 3 …: {done}")
    return RUN / "checkpoints" / f"step-{len(done):08d}"


def compare_with_transformers(folder, tokens, windows, seq_len, prompt, greedy):
    """Loss of all windows and greedy tokens, as transformers computes them from the export."""
    import torch
    import transformers
    transformers.utils.logging.disable_progress_bar()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True)
    check(not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), f"keys: {info}")
    total = 0.0
    with torch.inference_mode():
        for begin in range(0, windows, 16):
            rows = range(begin, min(windows, begin + 16))
            batch = torch.tensor(tokens[[range(i * seq_len, (i + 1) * seq_len + 1) for i in rows]])
            logits = model(batch[:, :-1]).logits
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
        ids = list(prompt)
        for _ in greedy:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return total / (windows * seq_len), ids[len(prompt):]


def main():
    os.chdir(ROOT)
    gather_corpus()
    for part in ("heldout", "train"):
        result = marrow("tokenize", "--tokenizer", "bytes", "--on-error", "skip", "--input", DATA / "text" / part,
                        "--output", DATA / part)
        say(f"tokenized {part}: {result['documents']} documents, {result['tokens']} tokens, "
            f"{result['skipped']} skipped, {result['bytes'] / 1e6 / max(result['seconds'], 1e-9):.0f} MB/s")
    shutil.rmtree(RUN, ignore_errors=True)
    checkpoint = pretrain()
    validations = [m["validation_loss"] for m in metrics() if "validation_loss" in m]

    seq_len = 256
    tokens = read_tokens(DATA / "heldout")
    windows = (len(tokens) - 1) // seq_len
    entropy = bigram_entropy(tokens[: windows * seq_len + 1])
    result = marrow("eval", checkpoint, "--data", DATA / "heldout")
    say(f"eval: loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}, {result['tokens']} held-out tokens")
    check(result["tokens"] == windows * seq_len, f"eval saw {result['tokens']} tokens, not {windows * seq_len}")
    check(abs(result["loss"] - validations[-1]) < 1e-4, f"eval {result['loss']}, last validation {validations[-1]}")
    check(math.isclose(result["perplexity"], math.exp(result["loss"]), rel_tol=1e-3), "perplexity is not exp(loss)")

    export = RUN / "export"
    marrow("export", checkpoint, "--output", export)
    prompt = "def forward(self, "
    greedy = marrow("generate", export, "--prompt", prompt, "--max-tokens", 48)
    again = marrow("generate", checkpoint, "--prompt", prompt, "--max-tokens", 48)
    check(greedy["ids"] == again["ids"], "checkpoint and export generate different tokens")
    loss, ids = compare_with_transformers(export, tokens, windows, seq_len, prompt.encode(), greedy["ids"])
    say(f"transformers on the export: loss {loss:.6f}, marrow {result['loss']:.6f}, {len(ids)} greedy tokens")
    check(abs(loss - result["loss"]) < 1e-4, "the two losses differ")
    check(ids == greedy["ids"], f"greedy tokens differ: transformers {ids}, marrow {greedy['ids']}")

    sample = marrow("generate", checkpoint, "--prompt", prompt, "--max-tokens", 240, "--temperature", 0.7)
    print(f"---- a sample at temperature 0.7\n{prompt}{sample['text'].removeprefix(prompt)}\n----")
    report = RUN / "report.html"
    check(report.exists() and report.stat().st_size > 1000, f"{report} is missing")
    say(f"report: {ROOT / report}")
    say(f"Hugging Face checkpoint: {ROOT / export}")
    print(f"validation loss {validations[0]:.3f} -> {result['loss']:.3f} (bigram entropy {entropy:.3f})")
    check(result["loss"] < entropy, "the model does not beat the bigram entropy")


if __name__ == "__main__":
    main()
