"""lm-evaluation-harness scores an export of marrow as marrow and transformers do.

Its tasks are in lm_eval_tasks/, its data is made here; nothing is fetched. ./dev interop installs it.
"""
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

os.environ.setdefault("MARROW", str(Path(__file__).resolve().parents[2] / "build/marrow"))
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from interop_model import OFFLINE, PYTHON, ROOT, SEQ_LEN, heldout_text, marrow, train

CONTEXT, ANSWER, QUESTIONS = 96, 32, 40


def check(condition, text):
    if not condition:
        sys.exit(f"FAIL {text}  next: .venv/bin/python tests/oracle/lm_eval_slow.py")


def write_data(work):
    """rolling.jsonl and choice.jsonl; returns the questions."""
    text = heldout_text()
    (work / "rolling.jsonl").write_text(json.dumps({"text": text}) + "\n")
    random, questions = Random(1), []
    for i in range(QUESTIONS):
        middle = CONTEXT + i * (len(text) - CONTEXT - ANSWER) // QUESTIONS
        # lm_eval counts white space at a context's end to the answers: let there be none.
        while text[middle - 1].isspace():
            middle -= 1
        true = text[middle:middle + ANSWER]
        choices = ["".join(random.sample(true, ANSWER)) for _ in range(3)]
        choices.insert(i % 4, true)
        questions.append({"context": text[max(0, middle - CONTEXT):middle], "label": i % 4, "choices": choices})
    (work / "choice.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    return questions


def lm_eval(work, export):
    """Results by task, and the log likelihoods of every question's choices."""
    command = [PYTHON, "-m", "lm_eval", "--model", "hf", "--model_args",
               f"pretrained={export},dtype=float32,max_length={SEQ_LEN}", "--tasks", "heldout_rolling,heldout_choice",
               "--include_path", ROOT / "tests/oracle/lm_eval_tasks", "--device", "cpu", "--batch_size", "8",
               "--output_path", work / "scores", "--log_samples"]
    done = subprocess.run([*map(str, command)], cwd=work, capture_output=True, text=True,
                          env={**os.environ, **OFFLINE, "HF_HOME": str(work / "hf")})
    check(done.returncode == 0, f"lm_eval: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    results = json.loads(next((work / "scores").rglob("results_*.json")).read_text())["results"]
    samples = next((work / "scores").rglob("samples_heldout_choice_*.jsonl")).read_text().splitlines()
    samples = sorted((json.loads(line) for line in samples), key=lambda s: s["doc_id"])
    return results, [[float(answer[0]) for answer in s["filtered_resps"]] for s in samples]


@torch.inference_mode()
def likelihoods(export, questions):
    """transformers' own log likelihoods of every question's choices."""
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    scores = []
    for question in questions:
        ids = torch.tensor([list((question["context"] + choice).encode()) for choice in question["choices"]])
        logs = model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        scores.append(logs[:, -ANSWER:].sum(1).tolist())
    return scores


def main(work):
    logging.disable_progress_bar()
    _, export, heldout = train(work, 300)
    questions = write_data(work)
    results, theirs = lm_eval(work, export)

    ours = marrow("eval", export, "--data", heldout, "--seq-len", SEQ_LEN)
    rolling = results["heldout_rolling"]
    loss = rolling["bits_per_byte,none"] * math.log(2)
    print(f"loss: lm_eval {loss:.7f}, marrow eval {ours['loss']:.7f} over {ours['tokens']} tokens")
    check(ours["tokens"] == len(heldout_text()), f"marrow eval saw {ours['tokens']} of {len(heldout_text())} tokens")
    check(abs(loss - ours["loss"]) < 1e-5, "the two losses differ")
    check(math.isclose(rolling["byte_perplexity,none"], ours["perplexity"], rel_tol=1e-5), "the perplexities differ")

    scores = likelihoods(export, questions)
    worst = max(abs(a - b) for mine, other in zip(scores, theirs, strict=True) for a, b in zip(mine, other, strict=True))
    right = sum(max(range(4), key=row.__getitem__) == q["label"] for row, q in zip(scores, questions)) / QUESTIONS
    accuracy = results["heldout_choice"]["acc,none"]
    print(f"{QUESTIONS} questions: accuracy lm_eval {accuracy}, transformers {right}; log likelihoods differ by {worst:.1e}")
    check(worst < 1e-3, "lm_eval's log likelihoods are not transformers'")
    check(accuracy == right, "the accuracies differ")
    check(accuracy >= 0.75, "a trained model tells the true continuation from its shuffled letters")
    print("PASS lm_eval_slow")


if __name__ == "__main__":
    if not (ROOT / ".venv-interop/stamp").exists():
        sys.exit("FAIL no lm-evaluation-harness in .venv-interop  next: ./dev interop")
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
