"""Random GPT-OSS models against transformers, in fp32, from import to export.

Reads $MARROW. For each configuration: import, one training step on eight sequences (loss, every parameter's gradient,
which the first moment holds) and every parameter after it, export that transformers loads whole with the logits of its
own step, evaluation of both forms, greedy generation with the cache past the sliding window. Then MXFP4 stacks against transformers' dequantisation, and options
that are refused.
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
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ROOT = Path(__file__).resolve().parent.parent.parent
MARROW = os.environ.get("MARROW", str(ROOT / "build/marrow"))
SEQ_LEN, SEQUENCES, BETA1, TOKENS = 48, 8, 0.9, 30
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 32}
CASES = {
    "published": {},  # as the published models, but small
    "truncated": {"rope_parameters": {**YARN, "truncate": True, "rope_theta": 1e4, "beta_fast": 4.0}, "sliding_window": 5,
                  "num_key_value_heads": 4, "num_experts_per_tok": 3},
    "magnitudes": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, "tie_word_embeddings": True,
                   "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "num_hidden_layers": 3},
    "attention_factor": {"rope_parameters": {**YARN, "attention_factor": 1.1}, "attention_bias": False,
                         "sliding_window": 1, "intermediate_size": 96, "num_experts_per_tok": 4, "num_local_experts": 5},
    "unscaled": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "head_dim": 24,
                 "layer_types": ["full_attention"] * 4, "num_attention_heads": 6},
}


def marrow(*words, code=0):
    done = subprocess.run([MARROW, *map(str, words)], capture_output=True, text=True)
    if done.returncode != code:
        sys.exit(f"marrow {' '.join(map(str, words))}: exit {done.returncode}, not {code}\n{done.stdout[-1000:]}{done.stderr}")
    return done.stdout + done.stderr


def toy(folder, **changes):
    """A model whose parameters are all far from 0 and from each other; gates and ups beyond the limit occur."""
    sizes = dict(num_hidden_layers=4, num_local_experts=8, vocab_size=261, hidden_size=64, intermediate_size=40, head_dim=16,
                 num_attention_heads=4, num_key_value_heads=2, sliding_window=11, max_position_embeddings=256,
                 num_experts_per_tok=2, rope_parameters=dict(YARN))
    torch.manual_seed(7)
    config = GptOssConfig(**{**sizes, **changes})
    config._attn_implementation = "eager"
    model = GptOssForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.add_(noise * 0.1)
            elif name.endswith(("sinks", "router.bias")):
                parameter.copy_(noise * 0.5)
            elif "gate_up_proj" in name:
                parameter.copy_(noise * (2.0 if name.endswith("bias") else 0.4))
            else:
                parameter.copy_(noise * (0.3 if "router" in name else 0.08))
    model.save_pretrained(folder)
    return model.train()


def tensors_of(folder, pattern="model*.safetensors"):
    return {name: t for file in sorted(Path(folder).glob(pattern)) for name, t in load_file(file).items()}


def relative(ours, theirs):
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()


def load(folder, dtype=torch.float32):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager",
                                                       output_loading_info=True)
    faults = {key: value for key, value in info.items() if value}
    assert not faults, faults
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


def run_case(name, changes, folder):
    problems = []

    def compare(what, ours, theirs, limit):
        error = relative(ours, theirs)
        if not error <= limit:  # NaN fails too
            problems.append(f"{name}: {what}: relative difference {error:.2e}")
        return error

    model = toy(folder / "hub", **changes)
    marrow("import", folder / "hub", "--output", folder / "imported")
    text = folder / "text.txt"
    text.write_bytes(bytes(torch.randint(97, 123, (SEQ_LEN * SEQUENCES,)).tolist()))
    marrow("tokenize", "--tokenizer", "bytes", "--input", text, "--output", folder / "corpus")
    raw = torch.tensor(list(text.read_bytes()) + [256])  # the end-of-document token is the last target
    tokens = torch.stack([raw[i * SEQ_LEN:(i + 1) * SEQ_LEN + 1] for i in range(SEQUENCES)])
    run = {"model.config": f"{folder}/hub/config.json", "model.init_from": f"{folder}/imported",
           "data.train": [f"{folder}/corpus"], "data.seq_len": SEQ_LEN, "train.steps": 1,
           "train.global_batch": SEQUENCES, "train.micro_batch": 4, "train.dtype": "fp32", "train.device": "cpu",
           "optimizer.lr": 1e-2, "optimizer.schedule": "constant", "optimizer.eps": 1e-3, "optimizer.beta1": BETA1,
           "optimizer.clip_norm": 0.0, "optimizer.weight_decay": 0.1, "router.balance": "none", "log.dir": f"{folder}/run"}
    (folder / "run.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in run.items()))

    model.zero_grad()
    loss = F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    marrow("pretrain", folder / "run.toml")
    line = json.loads((folder / "run/metrics.jsonl").read_text().splitlines()[0])
    compare("loss", line["loss"], loss.item(), 1e-5)
    compare("gradient norm", line["grad_norm"], torch.stack([g.norm() for g in gradients.values()]).norm(), 1e-5)
    last = folder / "run/checkpoints/step-00000001"
    moments = tensors_of(last, "optimizer*.safetensors")
    worst = 0.0
    for key, gradient in gradients.items():
        if f"{key}.exp_avg" not in moments:
            problems.append(f"{name}: no first moment of {key}; there are {sorted(moments)[:4]}")
            continue
        if gradient.norm() == 0:
            problems.append(f"{name}: the gradient of {key} is 0, so it proves nothing")
        worst = max(worst, compare(f"gradient of {key}", moments[f"{key}.exp_avg"] / (1 - BETA1), gradient, 1e-4))

    # The step itself: which parameters decay.
    kept = ("norm", "bias", "sinks")
    groups = [{"params": [p for n, p in model.named_parameters() if any(k in n for k in kept) == bare],
               "weight_decay": 0.0 if bare else 0.1} for bare in (False, True)]
    torch.optim.AdamW(groups, lr=1e-2, betas=(BETA1, 0.95), eps=1e-3).step()
    marrow("export", last, "--output", folder / "export")
    exported = load(folder / "export")
    for key, parameter in exported.named_parameters():
        compare(f"{key} after the step", parameter.detach(), model.get_parameter(key).detach(), 1e-5)
    saved = tensors_of(last)
    for key, stored in tensors_of(folder / "export").items():
        if not torch.equal(stored, saved[key]):
            problems.append(f"{name}: the export's bytes of {key} differ from the checkpoint's")
    with torch.no_grad():
        compare("logits of the export", exported(tokens[:, :-1]).logits, model.eval()(tokens[:, :-1]).logits, 1e-4)

    # Both forms, by evaluation: a whole sequence, and one token at a time past the window.
    for source in (last, folder / "export"):
        result = json.loads(marrow("eval", source, "--data", folder / "corpus", "--seq-len", SEQ_LEN, "--json").splitlines()[-1])
        compare(f"eval of {source.name}", result["loss"], eval_loss(exported, tokens), 1e-5)
    prompts = [f"sinks and windows {i}" for i in range(30)]
    prompt, theirs = max(((prompt, greedy(exported, prompt)) for prompt in prompts), key=lambda pair: len(pair[1]))
    ours = json.loads(marrow("generate", folder / "export", "--prompt", prompt, "--max-tokens", TOKENS, "--cpu",
                             "--json").splitlines()[-1])["ids"]
    if ours != theirs or len(ours) < 10:
        problems.append(f"{name}: generate gives {ours}, transformers {theirs}")
    marrow("export", last, "--output", folder / "bf16", "--dtype", "bf16")
    for key, parameter in load(folder / "bf16", torch.bfloat16).state_dict().items():
        if not torch.equal(parameter.bfloat16(), exported.state_dict()[key].bfloat16()):
            problems.append(f"{name}: {key} in bf16 is not the rounded fp32")
    print(f"{name}: {len(gradients)} parameters, worst gradient {worst:.1e}, {len(ours)} tokens generated", flush=True)
    return problems


def check_mxfp4(folder):
    """Stacks as blocks and scales, under the config style of the published folders."""
    model = toy(folder / "plain", hidden_size=96, intermediate_size=64)
    tensors = tensors_of(folder / "plain")
    config = json.loads((folder / "plain/config.json").read_text())
    expected = {}
    for key in [k for k in tensors if k.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = tensors.pop(key).shape
        blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        scales = torch.randint(119, 127, (experts, columns, rows // 32), dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        expected[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float()
        assert expected[key].shape == (experts, rows, columns), expected[key].shape
    rope = config.pop("rope_parameters")
    config.update(rope_theta=rope.pop("rope_theta"), rope_scaling=rope, torch_dtype="bfloat16", swiglu_limit=7.0,
                  experts_per_token=2, initial_context_length=32,
                  quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    (folder / "packed").mkdir()
    (folder / "packed/config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "packed/model.safetensors", {"format": "pt"})
    marrow("import", folder / "packed", "--output", folder / "unpacked")
    stored = tensors_of(folder / "unpacked")
    problems = [f"mxfp4: {key} differs" for key, value in expected.items() if not torch.equal(stored[key], value)]
    marrow("export", folder / "unpacked", "--output", folder / "written")
    written = load(folder / "written")
    model.load_state_dict({**model.state_dict(), **expected})
    ids = torch.arange(96).view(2, 48) * 7 % 261
    with torch.no_grad():
        if not torch.equal(written(ids).logits, model.eval()(ids).logits):
            problems.append("mxfp4: the export's logits differ")
    exported = json.loads((folder / "written/config.json").read_text())
    if "quantization_config" in exported or written.config.rope_parameters != GptOssConfig(**config).rope_parameters:
        problems.append(f"mxfp4: config.json of the export is {exported}")
    print(f"mxfp4: {len(expected)} stacks", flush=True)
    return problems


def check_refusals(folder):
    toy(folder / "hub")
    path = folder / "hub/config.json"
    sound = json.loads(path.read_text())
    for key, value in {"hidden_act": "gelu", "attention_dropout": 0.1, "swiglu_limit": 5.0, "layer_types": ["x"] * 4,
                       "sliding_window": None, "rope_parameters": {**YARN, "rope_type": "longrope"},
                       "quantization_config": {"quant_method": "fp8"}}.items():
        path.write_text(json.dumps({**sound, key: value}))
        text = marrow("import", folder / "hub", "--output", folder / "never", code=2)
        assert key in text and "fix:" in text, text
    path.write_text(json.dumps(sound))
    tensors = tensors_of(folder / "hub")
    for key in ("self_attn.sinks", "mlp.router.bias", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj"):
        name = f"model.layers.1.{key}"
        save_file({k: v for k, v in tensors.items() if k != name}, folder / "hub/model.safetensors", {"format": "pt"})
        text = marrow("import", folder / "hub", "--output", folder / "never", code=3)
        assert name in text and "missing" in text, text
    return []


def check_published(folder):
    for size, ranks in ("20b", 8), ("120b", 16):
        (folder / "run.toml").write_text(f'model.config = "{ROOT}/configs/models/gpt-oss-{size}.json"\n'
                                         'data.train = ["unread"]\ndata.seq_len = 4096\ntrain.steps = 1\n'
                                         'train.global_batch = 32\noptimizer.lr = 1e-4\n'
                                         f'train.device = "gpu"\ntrain.dtype = "bf16"\nmesh.ep = {ranks}\n')
        estimate = json.loads(marrow("estimate", folder / "run.toml", "--json").splitlines()[-1])
        assert len(estimate["ranks"]) == ranks, estimate
    return []


def main():
    chosen = sys.argv[1:] or list(CASES)
    problems = []
    with tempfile.TemporaryDirectory() as root:
        for name, changes in CASES.items():
            if name not in chosen:
                continue
            (Path(root) / name).mkdir()
            problems += run_case(name, changes, Path(root) / name)
        for check in (check_mxfp4, check_refusals, check_published):
            (Path(root) / check.__name__).mkdir()
            problems += check(Path(root) / check.__name__)
    print("\n".join(problems[:40]))
    print(f"FAIL {len(problems)} differences  next: ./dev test --filter gpt_oss" if problems else
          f"PASS gpt_oss_oracle: {len(chosen)} models equal transformers")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
