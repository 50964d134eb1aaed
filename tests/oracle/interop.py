"""Other programs read marrow's export of each family: the same greedy tokens from vLLM, transformers and marrow.

Arguments: families, else all. `./dev interop` runs it with .venv's Python, after tools/interop.sh has made .venv-interop. SGLang has no
package for the CPU: the names that it and others go by are compared with the published models' instead.
"""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("MARROW", str(Path(__file__).resolve().parents[2] / "build/marrow"))
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from interop_families import FAMILIES, ROUNDED, train_family
from interop_model import END_OF_DOCUMENT, OFFLINE, PYTHON, ROOT, marrow, train

PROMPTS = ["def main(self, ", "import os\n", "class Error(", "    if not ", '    """Return ', "a", "for name in sorted("]
MAX_TOKENS = 64


def check(condition, text):
    if not condition:
        sys.exit(f"FAIL {text}  next: ./dev interop")


def vllm_tokens(work, export, dtype):
    (work / "requests.json").write_text(json.dumps({"prompts": PROMPTS, "max_tokens": MAX_TOKENS, "dtype": dtype}))
    # One process on two threads and little memory: the model has a megabyte.
    env = {**os.environ, **OFFLINE, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
           "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_TARGET_DEVICE": "cpu",
           "VLLM_CACHE_ROOT": str(work / "vllm"), "HF_HOME": str(work / "hf")}
    script = ROOT / "tests/oracle/interop_vllm.py"
    done = subprocess.run([PYTHON, script, export, work / "requests.json", work / "results.json"], env=env,
                          capture_output=True, text=True)
    check(done.returncode == 0, f"vLLM: exit {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-5000:]}")
    return json.loads((work / "results.json").read_text())


@torch.inference_mode()
def transformers_tokens(export):
    """Per prompt its greedy ids, and the least gap of any step between the best logit and the next."""
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    rows, gap = [], float("inf")
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False, output_logits=True,
                             return_dict_in_generate=True, pad_token_id=END_OF_DOCUMENT)
        rows.append(out.sequences[0, inputs.input_ids.shape[1]:].tolist())
        for logits in out.logits:
            best = logits[0].topk(2).values
            gap = min(gap, float(best[0] - best[1]))
    return rows, gap


@torch.inference_mode()
def share_of_best(export, rows):
    """What part of these tokens have the best logit in fp32, given those before. The others must be as close to it as
    rounding may bring them: twice what bf16 changes any logit by in transformers."""
    exact, rounded = (AutoModelForCausalLM.from_pretrained(export, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    best, count, lost, error = 0, 0, 0.0, 0.0
    for prompt, row in zip(PROMPTS, rows, strict=True):
        ids = torch.tensor([list(prompt.encode()) + row])
        logits, other = (model(ids).logits[0, len(prompt) - 1:-1].float() for model in (exact, rounded))
        below = logits.max(1).values - logits.gather(1, torch.tensor(row)[:, None])[:, 0]
        best, count = best + int((below == 0).sum()), count + len(row)
        lost, error = max(lost, below.max().item()), max(error, (logits - other).abs().max().item())
    print(f"vLLM in bf16: {best / count:.1%} of its tokens have the best logit in fp32, the worst is {lost:.2f} below, "
          f"where bf16 changes a logit by up to {error:.2f} in transformers", flush=True)
    check(lost <= 2 * error, "vLLM's tokens differ by more than rounding")
    return best / count


def check_tokens(work, checkpoint, export, dtype="float32"):
    theirs, gap = transformers_tokens(export)
    vllm = vllm_tokens(work, export, dtype)
    rounded = dtype != "float32"
    for prompt, ids, other in zip(PROMPTS, theirs, vllm, strict=True):
        check(other["prompt_ids"] == list(prompt.encode()), f"vLLM reads {prompt!r} as {other['prompt_ids']}")
        generated = {"transformers": ids} | ({} if rounded else {"vLLM": other["ids"]})
        for name, model in (("marrow, checkpoint", checkpoint), ("marrow, export", export)):
            generated[name] = marrow("generate", model, "--prompt", prompt, "--max-tokens", MAX_TOKENS)["ids"]
        # marrow and the others may differ in whether they show the end of the document that they stopped at.
        shown = {name: row[:-1] if row and row[-1] == END_OF_DOCUMENT else row for name, row in generated.items()}
        check(len({tuple(row) for row in shown.values()}) == 1, f"{prompt!r} goes on differently: {generated}")
        # vLLM does not show a character of which bytes are missing at the end.
        own = bytes(id for id in other["ids"] if id < END_OF_DOCUMENT).decode(errors="replace").rstrip("\ufffd")
        text = other["text"].removesuffix("<|endoftext|>").rstrip("\ufffd")
        check(text == own, f"vLLM's text is {other['text']!r}, not {own!r}")
    count = sum(map(len, theirs))
    distinct = len({id for row in theirs for id in row})
    print(f"{count} greedy tokens of {len(PROMPTS)} prompts are the same in {'' if rounded else 'vLLM, '}transformers, "
          f"`marrow generate` ({distinct} distinct, least gap of the best logits {gap:.1e})", flush=True)
    if rounded:
        check(share_of_best(export, [other["ids"] for other in vllm]) >= 0.9, "vLLM's tokens differ")
    check(distinct >= 12 and count >= 100, "the model says too little to compare")


def check_names(export):
    """As the Hub's Qwen3-30B-A3B has them: config fields, per-expert tensors, tokenizer files."""
    published = json.loads((ROOT / "configs/models/qwen3-30b-a3b.json").read_text())
    config = json.loads((export / "config.json").read_text())
    for field, value in published.items():
        check(field in config, f"config.json has no {field}")
        # A missing beginning-of-text token is null.
        check(type(config[field]) is type(value) or field == "bos_token_id",
              f"config.json: {field} is {config[field]!r}, the published one {value!r}")
    for field in ("architectures", "model_type", "hidden_act", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"):
        check(config[field] == published[field], f"config.json: {field} is {config[field]!r}, not {published[field]!r}")

    layer = ["input_layernorm", "post_attention_layernorm", "mlp.gate",
             *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
             *(f"mlp.experts.{e}.{part}" for e in range(config["num_experts"])
               for part in ("gate_proj", "up_proj", "down_proj"))]
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
             *(f"model.layers.{i}.{part}.weight" for i in range(config["num_hidden_layers"]) for part in layer)}
    saved = export.parent / "saved"
    AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).save_pretrained(saved)
    shapes = []
    for folder in (export, saved):
        with safe_open(folder / "model.safetensors", "pt") as file:
            shapes.append({name: (file.get_slice(name).get_shape(), file.get_slice(name).get_dtype())
                           for name in file.keys()})
            check(file.metadata().get("format") == "pt", f"{folder}: the format in model.safetensors' header is not pt")
    check(set(shapes[0]) == names, f"tensor names: {sorted(set(shapes[0]) ^ names)[:6]}")
    check(shapes[0] == shapes[1], "names, shapes or dtypes differ from those that transformers saves")
    index = json.loads((export / "model.safetensors.index.json").read_text())
    check(set(index["weight_map"]) == names and index["metadata"]["total_size"] > 0, "model.safetensors.index.json")

    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        check((export / name).exists(), f"the export has no {name}")
    tokenizer = json.loads((export / "tokenizer.json").read_text())
    check(tokenizer["model"]["type"] == "BPE" and tokenizer["decoder"]["type"] == "ByteLevel", "tokenizer.json")
    generation = json.loads((export / "generation_config.json").read_text())
    check(generation["eos_token_id"] == config["eos_token_id"] == END_OF_DOCUMENT, "the end-of-text token")
    print(f"{len(published)} config fields and {len(names)} tensors are named as the published models' are")


def main(work, chosen):
    logging.disable_progress_bar()
    marrow("tokenize", "--tokenizer", "bytes", "--input", ROOT / "README.md", "--output", work / "readme")
    for name in chosen:
        (work / name).mkdir()
        if name == "qwen3_moe":
            checkpoint, export, _ = train(work / name, 400)
            check_names(export)
        else:
            checkpoint, export = train_family(work / name, name, work / "readme")
        print(f"{name}: ", end="")
        check_tokens(work / name, checkpoint, export, "bfloat16" if name in ROUNDED else "float32")
    print("PASS interop")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder), sys.argv[1:] or ["qwen3_moe", *FAMILIES])
