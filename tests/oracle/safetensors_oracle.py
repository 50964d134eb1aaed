"""The Python safetensors library reads marrow's files, and marrow its.

Reads $MARROW, the binary. Checks, for random tensors of each dtype that models use: a Hugging Face folder
written by Python is imported, exported, and read by Python with the same bits; the files of the
checkpoint in between are readable too. Files with hand-made damage are refused by name.
"""
import json
import os
import shutil
import struct
import subprocess
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def run(*args, code=0):
    done = subprocess.run([marrow, *args], capture_output=True, text=True)
    assert done.returncode == code, f"{args}: exit {done.returncode}, not {code}\n{done.stderr}"
    return done.stdout + done.stderr


def tiny_model(**changes):
    config = Qwen3MoeConfig(
        vocab_size=515, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, moe_intermediate_size=12, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=128,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, **changes)
    torch.manual_seed(1)
    return Qwen3MoeForCausalLM(config)


def check_round_trips():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        hub, checkpoint, out = (os.path.join(folder, n) for n in ("hub", "checkpoint", "out"))
        for path in (hub, checkpoint, out):
            shutil.rmtree(path, ignore_errors=True)
        tiny_model().to(dtype).save_pretrained(hub)
        run("import", hub, "--output", checkpoint)
        run("export", checkpoint, "--output", out)
        want = load_file(os.path.join(hub, "model.safetensors"))
        masters = {}
        for name in sorted(os.listdir(checkpoint)):
            if name.startswith("model-") and name.endswith(".safetensors"):
                masters.update(load_file(os.path.join(checkpoint, name)))
        exported = load_file(os.path.join(out, "model.safetensors"))
        assert set(want) == set(masters) == set(exported), set(want) ^ set(exported)
        for name, tensor in want.items():
            assert masters[name].dtype == torch.float32
            assert torch.equal(masters[name], tensor.float()), name
            assert torch.equal(exported[name], tensor.float()), name
        with safe_open(os.path.join(out, "model.safetensors"), "pt") as file:
            assert file.metadata() == {"format": "pt"}


def check_damage():
    hub = os.path.join(folder, "damaged")
    shutil.rmtree(hub, ignore_errors=True)
    tiny_model().save_pretrained(hub)
    path = os.path.join(hub, "model.safetensors")
    sound = open(path, "rb").read()
    length = struct.unpack("<Q", sound[:8])[0]
    header = json.loads(sound[8:8 + length])
    data = sound[8 + length:]
    names = sorted((n for n in header if n != "__metadata__"),
                   key=lambda n: header[n]["data_offsets"])

    def refuse(content, *words):
        with open(path, "wb") as file:
            file.write(content)
        output = os.path.join(folder, "never")
        text = run("import", hub, "--output", output, code=3)
        assert not os.path.exists(output)
        for word in (path, "fix:", *words):
            assert word in text, f"{word!r} is not in {text}"

    def with_header(change):
        changed = json.loads(json.dumps(header))
        change(changed)
        encoded = json.dumps(changed).encode()
        return struct.pack("<Q", len(encoded)) + encoded + data

    first, second = names[0], names[1]
    refuse(sound[:-1], "bytes")
    refuse(sound[:4], "4 bytes")
    refuse(sound[:8 + length // 2], "ends after")
    refuse(sound + b"\0", "the file has")
    refuse(struct.pack("<Q", 1 << 63) + sound[8:], str(1 << 63))
    refuse(with_header(lambda h: h[first].update(dtype="F31")), first, "F31")
    refuse(with_header(lambda h: h.update({second: h[first]})), "overlaps", second)
    refuse(with_header(lambda h: h[first]["data_offsets"].__setitem__(1, len(data) + 8)), first)
    refuse(with_header(lambda h: h.pop(second)), "gap")
    open(path, "wb").write(sound)
    run("import", hub, "--output", os.path.join(folder, "sound"))


marrow = os.environ.get("MARROW", "build/marrow")
holder = tempfile.TemporaryDirectory()  # removed at exit
folder = holder.name
check_round_trips()
check_damage()
print("PASS safetensors_oracle")
