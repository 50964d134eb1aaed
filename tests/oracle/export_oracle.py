"""Random Qwen3-MoE models go through import and export and stay the same in transformers.

Reads $MARROW, the binary. Checks the four combinations of stacked and per-expert tensors with old and
current config fields, tied and untied embeddings, shards, bf16 export, the config's two styles and
the tokenizer files; then that drift of names and fields is refused.
"""
import json
import os
import shutil
import subprocess
import tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig,
                          Qwen3MoeForCausalLM)


def run(*args, code=0):
    done = subprocess.run([marrow, *args], capture_output=True, text=True)
    assert done.returncode == code, f"{args}: exit {done.returncode}, not {code}\n{done.stderr}"
    return done.stdout + done.stderr


def fresh(name):
    path = os.path.join(folder, name)
    shutil.rmtree(path, ignore_errors=True)
    return path


def make_model(tied):
    torch.manual_seed(1)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=515, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, moe_intermediate_size=48, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=128,
        tie_word_embeddings=tied, initializer_range=0.2,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"})).eval()


def change_config(hub, change):
    path = os.path.join(hub, "config.json")
    config = json.load(open(path))
    change(config)
    json.dump(config, open(path, "w"))


def to_old_style(config):
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["num_experts"] = config.pop("num_local_experts")
    config["torch_dtype"] = config.pop("dtype")


def load(path, dtype=torch.float32):
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    faults = {k: v for k, v in info.items() if v}
    assert not faults, faults
    return model.eval()


ids = torch.arange(96).view(2, 48) * 7 % 515


@torch.no_grad()
def logits(model):
    return model(ids).logits.float()


def check_combination(model, stacked, old, shard):
    hub, checkpoint, out = fresh("hub"), fresh("checkpoint"), fresh("out")
    model.save_pretrained(hub, save_original_format=not stacked, max_shard_size=shard)
    names = set()
    for name in os.listdir(hub):
        if name.endswith(".safetensors"):
            names |= set(load_file(os.path.join(hub, name)))
    assert any(n.endswith("experts.gate_up_proj") for n in names) == stacked
    if old:
        change_config(hub, to_old_style)
    run("import", hub, "--output", checkpoint)
    run("export", checkpoint, "--output", out)
    assert torch.equal(logits(load(out)), logits(model))
    config = json.load(open(os.path.join(out, "config.json")))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert config["num_experts"] == config["num_local_experts"] == 8
    assert config["torch_dtype"] == config["dtype"] == "float32"
    loaded = AutoConfig.from_pretrained(out)
    assert loaded.num_experts == 8 and loaded.rope_parameters["rope_theta"] == 1e6
    tied = model.config.tie_word_embeddings
    assert config["tie_word_embeddings"] == tied == loaded.tie_word_embeddings
    exported = load_file(os.path.join(out, "model.safetensors"))
    assert ("lm_head.weight" in exported) != tied
    index = json.load(open(os.path.join(out, "model.safetensors.index.json")))
    assert set(index["weight_map"]) == set(exported)
    return hub, checkpoint, out


def check_drift(hub):
    """C2: what differs from the config is refused, never guessed."""
    path = os.path.join(hub, "model.safetensors")
    tensors = load_file(path)
    output = os.path.join(folder, "never")

    def refuse(code, *words, flags=()):
        text = run("import", hub, "--output", output, *flags, code=code)
        assert not os.path.exists(output)
        for word in (*words, "fix:"):
            assert word in text, f"{word!r} is not in {text}"

    for name in ("model.layers.2.mlp.experts.5.up_proj.weight", "model.norm.weight"):
        save_file({k: v for k, v in tensors.items() if k != name}, path, {"format": "pt"})
        refuse(3, name, "missing")
    save_file({**tensors, "model.extra.weight": torch.ones(3)}, path, {"format": "pt"})
    refuse(3, "model.extra.weight", "--allow-unknown")
    run("import", hub, "--output", fresh("allowed"), "--allow-unknown")
    save_file(tensors, path, {"format": "pt"})
    sound = open(os.path.join(hub, "config.json")).read()
    for field in ("rope_parameters", "num_local_experts", "norm_topk_prob", "vocab_size"):
        change_config(hub, lambda c: c.pop(field))
        expected = {"rope_parameters": "rope", "num_local_experts": "experts"}.get(field, field)
        refuse(2, expected, "config.json")
        open(os.path.join(hub, "config.json"), "w").write(sound)
    change_config(hub, lambda c: c.update(model_type="unheard_of"))
    refuse(2, "unheard_of")
    open(os.path.join(hub, "config.json"), "w").write(sound)


def checksum(path):
    """As COMPLETE lists it: Σ word · weight(index) over 4-byte words, mod 2^64, as a signed number."""
    data = open(path, "rb").read()
    total = 0
    for index in range((len(data) + 3) // 4):
        mixed = index * 0x9E3779B1 & 0xFFFFFFFF
        total += int.from_bytes(data[4 * index : 4 * index + 4], "little") * ((mixed ^ mixed >> 15) | 1)
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


def check_bytes_tokenizer(hub):
    """Our `bytes` tokenizer as transformers sees it, and recognised again on import."""
    checkpoint, out, again, back = (fresh(n) for n in ("checkpoint", "out", "again", "back"))
    run("import", hub, "--output", checkpoint)
    state = os.path.join(checkpoint, "trainer_state.json")
    saved = json.load(open(state))
    marker = os.path.join(checkpoint, "COMPLETE")
    # As a run with the `bytes` tokenizer would have saved it.
    saved.update(tokenizer="bytes", tokenizer_hash="bytes-hash", end_of_document=256)
    json.dump(saved, open(state, "w"))
    complete = json.load(open(marker))
    complete["files"]["trainer_state.json"] = {"bytes": os.path.getsize(state), "checksum": checksum(state)}
    json.dump(complete, open(marker, "w"))
    run("export", checkpoint, "--output", out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "Grüße, 世界! \t\r\n\0\x7f 🙂  two  spaces <|endoftext|"
    assert tokenizer(text, add_special_tokens=False).input_ids == list(text.encode())
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    every = [tokenizer.convert_ids_to_tokens(i) for i in range(257)]
    assert len(set(every)) == 257 and len(tokenizer) == 257
    assert tokenizer.eos_token_id == 256 == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert tokenizer("a<|endoftext|>b").input_ids == [97, 256, 98]
    assert json.load(open(os.path.join(out, "generation_config.json")))["eos_token_id"] == 256
    assert json.load(open(os.path.join(out, "config.json")))["eos_token_id"] == 256
    run("import", out, "--output", again)
    state = json.load(open(os.path.join(again, "trainer_state.json")))
    assert state["tokenizer"] == "bytes" and state["end_of_document"] == 256, state
    run("export", again, "--output", back)
    for name in sorted(os.listdir(out)):
        ours, theirs = (open(os.path.join(d, name), "rb").read() for d in (out, back))
        assert ours == theirs, f"{name} changed on the way out, in and out"


marrow = os.environ.get("MARROW", "build/marrow")
holder = tempfile.TemporaryDirectory()  # removed at exit
folder = holder.name
for tied in (False, True):
    model = make_model(tied)
    for stacked in (False, True):
        for old in (False, True):
            hub, checkpoint, out = check_combination(model, stacked, old, "50GB")
    check_combination(model, False, False, "300KB")
model = make_model(False)
hub, checkpoint, out = check_combination(model, False, False, "50GB")
run("export", checkpoint, "--output", fresh("bf16"), "--dtype", "bf16")
got = load(os.path.join(folder, "bf16"), torch.bfloat16)
for name, tensor in model.state_dict().items():
    assert torch.equal(got.state_dict()[name], tensor.bfloat16()), name
assert "exists already" in run("export", checkpoint, "--output", out, code=2)
assert "exists already" in run("import", hub, "--output", checkpoint, code=2)
check_bytes_tokenizer(hub)
check_drift(hub)
print("PASS export_oracle")
