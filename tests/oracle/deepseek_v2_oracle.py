"""DeepSeek-V2 and V3 against transformers, in fp32: import, one training step, export, generation.

Small random models (deepseek_v2_models.py). Compares loss, gradient norm, balance loss and every parameter's gradient
(from Adam's first moment, clipping off) and, after the step, every parameter; then the export in transformers: no
missing or unexpected keys, the same logits, the same greedy continuation from the cache. V3's bias of selection moves
by its rule alone. Logits far into a sequence: tests/train/deepseek_v2_logits_test.cpp.
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
from deepseek_v2_models import CONFIGS, VOCAB, make
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent.parent
MARROW = os.environ.get("MARROW", str(ROOT / "build/marrow"))
SEQ_LEN, SEQUENCES, LR, EPS, DECAY, COEF = 32, 8, 1e-2, 1e-3, 0.1, 0.3
LIMIT = 1e-4
CASES = {  # the mode of balance, and settings
    "lite": ("sequence", {}), "v2": ("none", {"train.recompute": '"layer"', "train.micro_batch": 4}),
    "v2-plain": ("micro", {"train.micro_batch": 8}), "moonlight": ("sequence", {"train.micro_batch": 2}),
    "v3": ("bias", {"train.micro_batch": 2}), "v3-unnormed": ("micro", {"train.micro_batch": 8}),
}
PUBLISHED = {"deepseek-v2-lite": 15_706_484_224, "moonlight-16b-a3b": 15_960_110_208}
problems = []


def marrow(*words, code=0):
    done = subprocess.run([MARROW, *map(str, words)], capture_output=True, text=True)
    if done.returncode != code:
        sys.exit(f"FAIL marrow {' '.join(map(str, words))}: exit {done.returncode}, not {code}\n"
                 f"{done.stdout[-1000:]}{done.stderr}")
    return done.stdout + done.stderr


def check(what, ours, theirs, limit=LIMIT):
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    error = ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()
    if not error <= limit:  # NaN fails too
        problems.append(f"{what}: relative difference {error:.2e}")
    return error


def by_hub_name(tensors):
    """The model's tensors under the Hub's names, one per expert."""
    out = {}
    for name, tensor in tensors:
        if ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
            for e, expert in enumerate(tensor):
                stem = name.rsplit(".", 1)[0] + f".{e}."
                if "gate_up" in name:
                    out[stem + "gate_proj.weight"], out[stem + "up_proj.weight"] = expert.chunk(2)
                else:
                    out[stem + "down_proj.weight"] = expert
        else:
            out[name] = tensor
    return out


def read_all(folder, prefix=""):
    return {k: v for f in sorted(Path(folder).glob(prefix + "*.safetensors")) for k, v in load_file(f).items()}


def reference_step(model, tokens, mode):
    """One step in place; what marrow should say of it, and the gradients."""
    routed = []  # logits and chosen experts of each layer
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [g.register_forward_hook(lambda _, __, out: routed.append((out[0], out[2]))) for g in gates]
    loss = F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    v3, experts, balance = model.config.model_type == "deepseek_v3", model.config.n_routed_experts, []
    for logits, chosen in routed:
        p = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True) if v3 else logits.softmax(-1)
        f = F.one_hot(chosen, experts).sum(1).float() / chosen.shape[1]
        parts = SEQUENCES if mode == "sequence" else 1
        rows = zip(f.chunk(parts), p.chunk(parts))
        balance.append(torch.stack([experts * (a.mean(0) * b.mean(0)).sum() for a, b in rows]).mean())
    objective = loss + (COEF * sum(balance) if mode in ("sequence", "micro") else 0)
    objective.backward()
    for hook in hooks:
        hook.remove()
    gradients = by_hub_name((n, p.grad.clone()) for n, p in model.named_parameters())
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    groups = [[p for n, p in model.named_parameters() if ("norm" in n) == norms] for norms in (False, True)]
    torch.optim.AdamW([{"params": groups[0], "weight_decay": DECAY}, {"params": groups[1], "weight_decay": 0.0}],
                      lr=LR, betas=(0.9, 0.95), eps=EPS).step()
    if mode == "bias":
        for gate, (_, chosen) in zip(gates, routed):
            counts = F.one_hot(chosen, experts).sum((0, 1)).double()
            bias = gate.e_score_correction_bias.double() + COEF * (counts.mean() - counts).sign()
            gate.e_score_correction_bias.copy_(bias - bias.mean())
    return loss.item(), norm.item(), [b.item() for b in balance], gradients


def train(folder, mode, settings, log="run"):
    (folder / "run.toml").write_text(f"""
[model]
config = "{folder}/hub/config.json"
init_from = "{folder}/imported"
[data]
train = ["{folder}/corpus"]
seq_len = {SEQ_LEN}
[train]
steps = 1
global_batch = {SEQUENCES}
dtype = "fp32"
device = "cpu"
[optimizer]
lr = {LR}
schedule = "constant"
eps = {EPS}
weight_decay = {DECAY}
clip_norm = 0.0
[router]
balance = "{mode}"
coef = {COEF}
[log]
dir = "{folder}/{log}"
""")
    marrow("pretrain", folder / "run.toml", *[w for k, v in settings.items() for w in ("--set", f"{k}={v}")])
    return json.loads((folder / log / "metrics.jsonl").read_text().splitlines()[0])


def load(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    faults = {k: v for k, v in info.items() if v}
    if faults:
        problems.append(f"{folder}: {faults}")
    return model.eval()


@torch.no_grad()
def logits(model, tokens):
    return model(tokens).logits


@torch.no_grad()
def continuation(model, text, length):
    ids = torch.tensor([list(text.encode())])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False,
                         pad_token_id=256, eos_token_id=256)
    return [i for i in out[0, ids.shape[1]:].tolist() if i != 256]


def run_case(name, mode, settings, folder):
    model = make(CONFIGS[name])
    model.save_pretrained(folder / "hub")
    marrow("import", folder / "hub", "--output", folder / "imported")
    marrow("export", folder / "imported", "--output", folder / "again")
    text = folder / "text.txt"
    text.write_bytes(bytes(torch.randint(97, 123, (SEQ_LEN * SEQUENCES,)).tolist()))
    marrow("tokenize", "--tokenizer", "bytes", "--input", text, "--output", folder / "corpus")
    raw = torch.tensor(list(text.read_bytes()) + [256])  # the end-of-document token is the last target
    tokens = torch.stack([raw[i * SEQ_LEN:(i + 1) * SEQ_LEN + 1] for i in range(SEQUENCES)])
    if not torch.equal(logits(load(folder / "again"), tokens), logits(model, tokens)):
        problems.append(f"{name}: import and export change the logits")

    ours = train(folder, mode, settings)
    start = by_hub_name((n, p.detach().clone()) for n, p in model.named_parameters())
    loss, norm, balance, gradients = reference_step(model, tokens, mode)
    check(f"{name}: loss", ours["loss"], loss, 1e-5)
    check(f"{name}: gradient norm", ours["grad_norm"], norm, 1e-5)
    check(f"{name}: balance loss", ours["balance_loss_per_layer"], balance, 1e-5)
    last = folder / "run/checkpoints/step-00000001"
    saved, moments = read_all(last), read_all(last, "optimizer-")
    expected = by_hub_name(list(model.named_parameters()) + [b for b in model.named_buffers() if "score" in b[0]])
    worst = 0.0
    for key, value in expected.items():
        check(f"{name}: {key} after the step", saved[key], value.detach(), 1e-5)
        if key not in gradients:
            continue
        gradient = moments[key + ".exp_avg"] / (1 - 0.9)
        worst = max(worst, check(f"{name}: gradient of {key}", gradient, gradients[key]))
        if gradients[key].norm() < 1e-6 or torch.equal(start[key], value):
            problems.append(f"{name}: {key} has no gradient, so it proves nothing")
    marrow("export", last, "--output", folder / "export")
    exported = load(folder / "export")
    check(f"{name}: logits after the step", logits(exported, tokens), logits(model, tokens))
    if set(read_all(folder / "export")) != set(expected) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set()):
        problems.append(f"{name}: the export's names are not the model's")
    said = json.loads(marrow("eval", folder / "export", "--data", folder / "corpus", "--seq-len", SEQ_LEN, "--json"))
    check(f"{name}: eval", said["loss"], F.cross_entropy(logits(exported, tokens[:, :-1]).flatten(0, 1),
                                                         tokens[:, 1:].flatten()), 1e-5)
    if mode == "bias":  # the bias of selection survives a resume, and bf16 runs
        train(folder, mode, settings | {"train.steps": 2})
        train(folder, mode, settings | {"train.steps": 2}, "straight")
        resumed, straight = (read_all(folder / f"{log}/checkpoints/step-00000002") for log in ("run", "straight"))
        problems.extend(f"{name}: {k} differs after a resume" for k in straight if not torch.equal(straight[k], resumed[k]))
        rounded = train(folder, mode, settings | {"train.dtype": '"bf16"'}, "bf16")
        check(f"{name}: loss in bf16", rounded["loss"], loss, 1e-2)
    prompt = "the quick brown fox "
    ids = json.loads(marrow("generate", folder / "export", "--prompt", prompt, "--max-tokens", 24, "--cpu", "--json"))
    theirs = continuation(exported, prompt, 24)
    if ids["ids"] != theirs or len(theirs) < 2:
        problems.append(f"{name}: marrow continues {ids['ids']}, transformers {theirs}")
    print(f"{name}: loss {loss:.4f}, {len(gradients)} gradients, the worst {worst:.1e}", flush=True)


def check_config_forms(folder):
    """The older style of config.json is the same model; a bf16 export keeps the bias; refusals name the key."""
    model = make(CONFIGS["v3"])
    model.save_pretrained(folder / "hub")
    path = folder / "hub/config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"], rope["type"] = rope.pop("rope_theta"), rope.pop("rope_type")
    config["rope_scaling"], config["num_nextn_predict_layers"] = rope, 1
    path.write_text(json.dumps(config))
    tokens = torch.arange(40)[None] % VOCAB
    marrow("import", folder / "hub", "--output", folder / "old")
    marrow("export", folder / "old", "--output", folder / "both", "--dtype", "bf16")
    both = json.loads((folder / "both/config.json").read_text())
    if both["rope_parameters"]["rope_type"] != "yarn" or both["num_nextn_predict_layers"] != 0:
        problems.append(f"the export's config: {both}")
    exported = load(folder / "both")
    check("an export of bf16", logits(exported, tokens), logits(model.bfloat16().float(), tokens), 0.05)
    for key, value in model.state_dict().items():
        if "score" in key and not torch.equal(read_all(folder / "both")[key], make(CONFIGS["v3"]).state_dict()[key]):
            problems.append(f"a bf16 export rounds {key}")
    config["rope_scaling"] = rope | {"attention_factor": 1.5}
    path.write_text(json.dumps(config))
    if "attention_factor" not in marrow("import", folder / "hub", "--output", folder / "never", code=2):
        problems.append("attention_factor is not named")


def check_published_counts():
    for name, count in PUBLISHED.items():
        values = json.loads((ROOT / f"configs/models/{name}.json").read_text())
        config = transformers.AutoConfig.for_model(**values)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
            biases = sum(b.numel() for n, b in model.named_buffers() if "score" in n)
        check(f"{name}: parameters", count, biases + sum(p.numel() for p in model.parameters()), 0)


def main():
    for name, (mode, settings) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            run_case(name, mode, settings, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        check_config_forms(Path(folder))
    check_published_counts()
    print("\n".join(problems[:40]))
    print(f"FAIL {len(problems)} differences  next: ./dev test --filter deepseek" if problems else
          f"PASS {len(CASES)} models equal transformers")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
