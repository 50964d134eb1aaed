"""What the oracles of model families share: one model, as transformers saved it, from import to export.

Reads $MARROW and $MARROW_BUILD. run_case: import, logits, one training step on eight sequences (loss, every parameter's
gradient, which the first moment holds) and every parameter after it, export that transformers loads whole with the
logits of its own step, evaluation of both forms, greedy generation with the cache, an export in bf16; a step in bf16, and
one after a resume.
"""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent.parent
MARROW = os.environ.get("MARROW", str(ROOT / "build/marrow"))
BUILD = Path(os.environ.get("MARROW_BUILD", ROOT / "build"))
SEQ_LEN, SEQUENCES, BETA1, TOKENS = 48, 8, 0.9, 30
# Standard deviations of random parameters, by the first of these parts that a name has; else 0.08.
SPREADS = {"norm": 0.1, "A_log": 1.0, "dt_bias": 1.0, "correction_bias": 0.05, "bias": 0.5, "sinks": 0.5, "conv1d": 0.4,
           "router": 0.3, ".gate.weight": 0.3}


def marrow(*words, code=0):
    done = subprocess.run([MARROW, *map(str, words)], capture_output=True, text=True)
    if done.returncode != code:
        sys.exit(f"marrow {' '.join(map(str, words))}: exit {done.returncode}, not {code}\n{done.stdout[-1000:]}{done.stderr}")
    return done.stdout + done.stderr


def tensors_of(folder, pattern="model*.safetensors"):
    return {name: t for file in sorted(Path(folder).glob(pattern)) for name, t in load_file(file).items()}


def by_expert(tensors):
    """Stacks [E, 2I, H] and [E, H, I] of experts as the Hub's tensors of each expert."""
    out = {}
    for name, tensor in tensors:
        stem, _, last = name.rpartition("experts.")
        if last == "gate_up_proj":
            for e, (gate, up) in enumerate(expert.chunk(2) for expert in tensor):
                out[f"{stem}experts.{e}.gate_proj.weight"], out[f"{stem}experts.{e}.up_proj.weight"] = gate, up
        elif last == "down_proj":
            out |= {f"{stem}experts.{e}.down_proj.weight": expert for e, expert in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def relative(ours, theirs):
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()


@torch.no_grad()
def scatter(model, **spreads):
    """Parameters far from 0 and from each other: routing has no ties, no gradient is tiny. spreads: before SPREADS."""
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
    for name, parameter in [*model.named_parameters(), *biases]:
        std = next((std for part, std in (spreads | SPREADS).items() if part in name), 0.08)
        start = parameter.clone() if "norm" in name else -2.0 if name.endswith("A_log") else 0.0
        parameter.copy_(start + torch.randn_like(parameter) * std)


def make(config, seed=7, **spreads):
    """A random model of a config, or of a config.json's fields."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**config) if isinstance(config, dict) else config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    scatter(model, **spreads)
    return model.train()


def decays(name, parameter):
    """Weight decay: on matrices of linear layers, experts, embedding and head."""
    return parameter.ndim > 1 and "bias" not in name and "conv" not in name


def load(folder, dtype=torch.float32):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager",
                                                       output_loading_info=True)
    faults = [f"{len(names)} {key}, such as {sorted(map(str, names))[:3]}" for key, names in info.items() if names]
    assert not faults, f"transformers loads {folder} with {'; '.join(faults)}"
    return model.eval()


@torch.no_grad()
def eval_loss(model, tokens):
    """Mean over all targets, [n, SEQ_LEN + 1] ids."""
    return F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


@torch.no_grad()
def greedy(model, prompt):
    """Up to TOKENS ids among those of the `bytes` tokenizer, without a cache; the end of a document ends them."""
    ids = list(prompt.encode())
    while len(ids) < len(prompt) + TOKENS:
        best = int(model(torch.tensor([ids]), use_cache=False).logits[0, -1, :257].argmax())
        if best == 256:
            break
        ids.append(best)
    return ids[len(prompt):]


def logits_problems(model, folder):
    """Of the import, at each position of a sequence, in marrow: tests/train/logits_test.cpp."""
    config = model.config.get_text_config()
    ids = torch.randint(0, config.vocab_size, (min(2 * SEQ_LEN, config.max_position_embeddings),))
    (folder / "logits").mkdir()
    (folder / "logits/model").symlink_to(folder / "imported")
    with torch.no_grad():
        save_file({"tokens": ids.int(), "positions": torch.arange(len(ids)), "logits": model(ids[None]).logits[0]},
                  folder / "logits/model.safetensors")
    done = subprocess.run([BUILD / "test_train", "--gtest_filter=Logits.*"], capture_output=True, text=True,
                          env=os.environ | {"MARROW_LOGITS": str(folder / "logits")})
    return [] if done.returncode == 0 else [f"logits of the import differ: {done.stdout[-1500:]}{done.stderr[-500:]}"]


def run_case(name, model, folder, import_flags=(), settings=None, routing=None):
    """`model`: saved in folder/hub. settings: of the run. routing(model): what the oracle knows of the router beside the
    model: objective() after the forward, what its loss adds; balance, each layer's; step(), its change besides AdamW's."""
    problems = []

    def compare(what, ours, theirs, limit):
        error = relative(ours, theirs)
        if not error <= limit:  # NaN fails too
            problems.append(f"{name}: {what}: relative difference {error:.2e}")
        return error

    marrow("import", folder / "hub", "--output", folder / "imported", *import_flags)
    text = folder / "text.txt"
    text.write_bytes(bytes(torch.randint(97, 123, (SEQ_LEN * SEQUENCES,)).tolist()))
    marrow("tokenize", "--tokenizer", "bytes", "--input", text, "--output", folder / "corpus")
    raw = torch.tensor(list(text.read_bytes()) + [256])  # the end-of-document token is the last target
    tokens = torch.stack([raw[i * SEQ_LEN:(i + 1) * SEQ_LEN + 1] for i in range(SEQUENCES)])
    problems += [f"{name}: {problem}" for problem in logits_problems(model, folder)]
    run = {"model.config": f"{folder}/hub/config.json", "model.init_from": f"{folder}/imported",
           "data.train": [f"{folder}/corpus"], "data.seq_len": SEQ_LEN, "train.steps": 1,
           "train.global_batch": SEQUENCES, "train.micro_batch": 4, "train.dtype": "fp32", "train.device": "cpu",
           "optimizer.lr": 1e-2, "optimizer.schedule": "constant", "optimizer.eps": 1e-3, "optimizer.beta1": BETA1,
           "optimizer.clip_norm": 0.0, "optimizer.weight_decay": 0.1, "router.balance": "none",
           "log.dir": f"{folder}/run"} | (settings or {})
    (folder / "run.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in run.items()))

    model.zero_grad()
    routed = routing(model) if routing else None
    loss = F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    (loss + (routed.objective() if routed else 0)).backward()
    marrow("pretrain", folder / "run.toml")
    last = folder / "run/checkpoints/step-00000001"
    moments = tensors_of(last, "optimizer*.safetensors")
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    if any(".experts.0." in key for key in moments):  # the Hub's experts are no stacks
        gradients = by_expert(gradients.items())
    line = json.loads((folder / "run/metrics.jsonl").read_text().splitlines()[0])
    compare("loss", line["loss"], loss.item(), 1e-5)
    compare("gradient norm", line["grad_norm"], torch.stack([g.norm() for g in gradients.values()]).norm(), 1e-5)
    worst = 0.0
    for key, gradient in gradients.items():
        if f"{key}.exp_avg" not in moments:
            problems.append(f"{name}: no first moment of {key}; there are {sorted(moments)[:4]}")
            continue
        if gradient.norm() == 0:
            problems.append(f"{name}: the gradient of {key} is 0, so it proves nothing")
        worst = max(worst, compare(f"gradient of {key}", moments[f"{key}.exp_avg"] / (1 - BETA1), gradient, 1e-4))

    # The step itself: which parameters decay.
    groups = [{"params": [p for n, p in model.named_parameters() if decays(n, p) == decayed],
               "weight_decay": 0.1 if decayed else 0.0} for decayed in (True, False)]
    torch.optim.AdamW(groups, lr=1e-2, betas=(BETA1, 0.95), eps=1e-3).step()
    if routed:
        compare("balance loss", line["balance_loss_per_layer"], torch.stack(routed.balance).detach(), 1e-5)
        routed.step()
    marrow("export", last, "--output", folder / "export")
    exported = load(folder / "export")
    for key, tensor in exported.state_dict().items():
        compare(f"{key} after the step", tensor, model.state_dict()[key], 1e-5)
    saved = tensors_of(last)
    for key, stored in tensors_of(folder / "export").items():
        if not torch.equal(stored, saved[key]):
            problems.append(f"{name}: the export's bytes of {key} differ from the checkpoint's")
    with torch.no_grad():
        logits = compare("logits of the export", exported(tokens[:, :-1]).logits, model.eval()(tokens[:, :-1]).logits, 1e-4)

    # Both forms, by evaluation: a whole sequence, and one token at a time.
    for source in (last, folder / "export"):
        result = json.loads(marrow("eval", source, "--data", folder / "corpus", "--seq-len", SEQ_LEN, "--json").splitlines()[-1])
        compare(f"eval of {source.name}", result["loss"], eval_loss(exported, tokens), 1e-5)
    prompts = [f"the quick brown fox {i}" for i in range(30)]
    prompt, theirs = max(((prompt, greedy(exported, prompt)) for prompt in prompts), key=lambda pair: len(pair[1]))
    ours = json.loads(marrow("generate", folder / "export", "--prompt", prompt, "--max-tokens", TOKENS, "--cpu",
                             "--json").splitlines()[-1])["ids"]
    if ours != theirs or len(ours) < 10:
        problems.append(f"{name}: generate gives {ours}, transformers {theirs}")
    marrow("export", last, "--output", folder / "bf16", "--dtype", "bf16")
    for key, parameter in load(folder / "bf16", torch.bfloat16).state_dict().items():
        if not torch.equal(parameter.bfloat16(), exported.state_dict()[key].bfloat16()):
            problems.append(f"{name}: {key} in bf16 is not the rounded fp32")
    lines = {}
    for log, settings in {"rounded": ["train.dtype=bf16"], "straight": ["train.steps=2"], "run": ["train.steps=2"]}.items():
        words = [w for setting in [*settings, f"log.dir={folder}/{log}"] for w in ("--set", setting)]
        marrow("pretrain", folder / "run.toml", *words)
        lines[log] = [json.loads(line) for line in (folder / log / "metrics.jsonl").read_text().splitlines()]
    compare("loss in bf16", lines["rounded"][0]["loss"], loss.item(), 1e-2)
    if [line["loss"] for line in lines["straight"]] != [line["loss"] for line in lines["run"]]:
        problems.append(f"{name}: after a resume the loss is another")
    straight, resumed = (tensors_of(folder / log / "checkpoints/step-00000002") for log in ("straight", "run"))
    problems += [f"{name}: {key} differs after a resume" for key in straight if not torch.equal(straight[key], resumed[key])]
    print(f"{name}: {len(gradients)} parameters, worst gradient {worst:.1e}, logits {logits:.1e}, "
          f"{len(ours)} tokens generated", flush=True)
    return problems


def check_estimate(folder, config, ranks):
    """The published model's memory on so many GPUs, experts split among them, can be estimated."""
    (folder / "run.toml").write_text(f'model.config = "{ROOT}/configs/models/{config}.json"\ndata.train = ["unread"]\n'
                                     'data.seq_len = 4096\ntrain.steps = 1\ntrain.global_batch = 32\noptimizer.lr = 1e-4\n'
                                     f'train.device = "gpu"\ntrain.dtype = "bf16"\nmesh.ep = {ranks}\n')
    estimate = json.loads(marrow("estimate", folder / "run.toml", "--json").splitlines()[-1])
    assert len(estimate["ranks"]) == ranks, estimate


def run_family(family, cases, checks):
    """A family's oracle: the cases that the command line names (else all), and what is checked besides. Each takes a
    folder of its own and returns its problems."""
    chosen, problems = sys.argv[1:] or list(cases), []
    with tempfile.TemporaryDirectory() as root:
        for name, run in [(name, cases[name]) for name in chosen] + [(check.__name__, check) for check in checks]:
            (Path(root) / name).mkdir()
            problems += run(Path(root) / name)
    print("\n".join(problems[:40]))
    print(f"FAIL {len(problems)} differences  next: ./dev test --filter {family}" if problems else
          f"PASS {family}: {len(chosen)} models equal transformers")
    sys.exit(bool(problems))
