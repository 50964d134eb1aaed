"""Training steps of marrow against transformers and torch, from the same initial model, in fp32.

Eight sequences make one epoch and one global batch, so that every step sees the same eight whatever
their order. Compares each step's loss, balance loss and gradient norm before clipping, and after the
last step every parameter by its Hub name. Clipping acts, and Adam's epsilon is large enough that a
gradient on a wrong scale changes the parameters. The balance terms follow their formula:
L = E * sum_i f_i * P_i per layer, f without gradient.
"""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent.parent
MARROW = os.environ.get("MARROW", str(ROOT / "build/marrow"))
SEQ_LEN, SEQUENCES, LR, EPS, DECAY, CLIP, COEF = 32, 8, 1e-2, 1e-3, 0.1, 0.5, 0.3
CASES = [  # name, steps, settings beyond the common ones
    ("plain", 1, {"router.balance": '"none"', "train.micro_batch": 2}),
    ("sequence", 3, {"router.balance": '"sequence"', "train.micro_batch": 4}),
    ("micro", 2, {"router.balance": '"micro"', "train.micro_batch": 8}),
    ("global", 4, {"router.balance": '"global"', "train.micro_batch": 1}),
    ("z_loss", 2, {"router.balance": '"none"', "train.micro_batch": 2, "router.z_loss": 0.05}),
    ("tied", 2, {"router.balance": '"global"', "train.micro_batch": 4}),
]


def marrow(*words):
    done = subprocess.run([MARROW, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"marrow {' '.join(map(str, words))}: exit {done.returncode}\n{done.stdout[-1000:]}{done.stderr}")


def toy(folder, tied):
    config = transformers.AutoConfig.for_model(**json.loads((ROOT / "configs/models/qwen3-tiny.json").read_text()))
    config.tie_word_embeddings = tied
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():  # weights far from each other: routing has no ties, gradients are not tiny
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.3 if ".gate.weight" in name else 0.06))
    model.save_pretrained(folder)
    return model.train()


class RouterTap:
    """The router's logits of each layer, [T, E] with their graph, recomputed from its input."""

    def __init__(self, model):
        self.logits = []
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_pre_hook(
                lambda gate, inputs: self.logits.append(F.linear(inputs[0].flatten(0, -2).float(), gate.weight)))


def shares(logits, top_k):
    """f: the share of the chosen (token, expert) pairs that went to each expert; sums to 1."""
    chosen = logits.softmax(-1).topk(top_k, -1).indices
    return F.one_hot(chosen, logits.shape[-1]).sum((0, 1)).float() / chosen.numel()


def balance_terms(mode, logits, top_k, previous):
    """(term of the objective, logged value) of one layer. logits [B * S, E]."""
    experts, probabilities = logits.shape[-1], logits.softmax(-1)
    logged = experts * (shares(logits, top_k) * probabilities.mean(0)).sum()
    if mode == "sequence":
        rows = zip(logits.split(SEQ_LEN), probabilities.split(SEQ_LEN))
        term = torch.stack([experts * (shares(l, top_k) * p.mean(0)).sum() for l, p in rows]).mean()
        return term, term
    if mode == "micro":
        return logged, logged
    if mode == "global":
        term = experts * (previous * probabilities.mean(0)).sum() if previous is not None else logged * 0
        return term, logged
    return logged * 0, logged


def reference(model, tokens, steps, mode, z_loss):
    """Trains `model` in place; returns each step's numbers."""
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    others = [p for n, p in model.named_parameters() if "norm" in n]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
                                  lr=LR, betas=(0.9, 0.95), eps=EPS)
    tap, top_k = RouterTap(model), model.config.num_experts_per_tok
    previous, records = [None] * len(model.model.layers), []
    for _ in range(steps):
        tap.logits.clear()
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        terms = [balance_terms(mode, l, top_k, f) for l, f in zip(tap.logits, previous)]
        objective = loss + COEF * sum(term for term, _ in terms)
        objective = objective + z_loss * sum(l.logsumexp(-1).square().mean() for l in tap.logits)
        objective.backward()
        norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, CLIP / norm.item()))
        optimizer.step()
        previous = [shares(l.detach(), top_k) for l in tap.logits]
        records.append({"loss": loss.item(), "grad_norm": norm.item(),
                        "balance_loss_per_layer": [value.item() for _, value in terms]})
    return records


def hub_tensors(model, folder):
    """The model's tensors under the Hub's names, one per expert."""
    model.save_pretrained(folder)
    return {name: t for file in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(file).items()}


def relative(ours, theirs):
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()


def run_case(name, steps, settings, folder):
    model = toy(folder / "hub", tied=name == "tied")
    marrow("import", folder / "hub", "--output", folder / "imported")
    text = folder / "text.txt"
    text.write_bytes(bytes(torch.randint(97, 123, (SEQ_LEN * SEQUENCES,)).tolist()))
    marrow("tokenize", "--tokenizer", "bytes", "--input", text, "--output", folder / "corpus")
    raw = torch.tensor(list(text.read_bytes()) + [256])  # the end-of-document token is the last target
    tokens = torch.stack([raw[i * SEQ_LEN:(i + 1) * SEQ_LEN + 1] for i in range(SEQUENCES)])
    (folder / "run.toml").write_text(f"""
[model]
config = "{folder}/hub/config.json"
init_from = "{folder}/{'hub' if name == 'micro' else 'imported'}"
[data]
train = ["{folder}/corpus"]
seq_len = {SEQ_LEN}
[train]
steps = {steps}
global_batch = {SEQUENCES}
dtype = "fp32"
device = "cpu"
[optimizer]
lr = {LR}
schedule = "constant"
eps = {EPS}
weight_decay = {DECAY}
clip_norm = {CLIP}
[router]
coef = {COEF}
[log]
dir = "{folder}/run"
""")
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    marrow("pretrain", folder / "run.toml", *sets)
    ours = [m for m in map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines()) if "loss" in m]
    theirs = reference(model, tokens, steps, settings["router.balance"].strip('"'), settings.get("router.z_loss", 0.0))
    problems = []

    def compare(what, a, b, limit=1e-5):
        error = relative(a, b)
        if not error <= limit:  # NaN fails too
            problems.append(f"{name}: {what}: relative difference {error:.2e}: marrow {a}, transformers {b}")
        return error

    if [m["step"] for m in ours] != list(range(1, steps + 1)):
        return [f"{name}: metrics hold steps {[m['step'] for m in ours]}, not 1..{steps}"]
    for m, r in zip(ours, theirs):
        for key in ("loss", "grad_norm", "balance_loss_per_layer"):
            compare(f"step {m['step']} {key}", m[key], r[key])
        layers = m["balance_loss_per_layer"]
        compare(f"step {m['step']} balance_loss", m["balance_loss"], sum(layers) / len(layers))
    if not all(r["grad_norm"] > CLIP for r in theirs):
        problems.append(f"{name}: clipping did not act: {[r['grad_norm'] for r in theirs]}")
    last = folder / f"run/checkpoints/step-{steps:08d}"
    expected = hub_tensors(model, folder / "expected")
    saved = {k: v for file in sorted(last.glob("*.safetensors")) for k, v in load_file(file).items()}
    missing = [k for k in expected if k not in saved]
    if missing:
        problems.append(f"{name}: {last} lacks {missing[:5]}; it has {list(saved)[:5]}")
    start = load_file(folder / "hub/model.safetensors")
    worst = 0.0
    for key in set(expected) - set(missing):
        worst = max(worst, compare(key, saved[key], expected[key], 1e-5))
        if torch.equal(expected[key], start[key]):
            problems.append(f"{name}: {key} did not move, so it proves nothing")
    marrow("export", last, "--output", folder / "export")
    exported = {k: v for f in sorted((folder / "export").glob("*.safetensors")) for k, v in load_file(f).items()}
    if set(exported) != set(expected):
        problems.append(f"{name}: the export's names differ: {sorted(set(exported) ^ set(expected))[:5]}")
    elif not all(torch.equal(exported[k], saved[k]) for k in expected):
        problems.append(f"{name}: the export's bytes differ from the checkpoint's")
    print(f"{name}: {steps} steps, {len(expected)} tensors, worst parameter {worst:.1e}", flush=True)
    return problems


def main():
    problems = []
    for name, steps, settings in CASES:
        with tempfile.TemporaryDirectory() as folder:
            problems += run_case(name, steps, settings, Path(folder))
    print("\n".join(problems[:40]))
    print(f"FAIL {len(problems)} differences  next: ./dev test --filter pretrain" if problems else
          f"PASS {len(CASES)} runs equal transformers")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
