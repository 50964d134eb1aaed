"""Random GPT-OSS models against transformers, in fp32, from import to export (family_cases.py), and past the sliding
window by generation. Then MXFP4 stacks against transformers' dequantisation, and options that are refused.
"""
import json

import torch
from family_cases import check_estimate, load, make, marrow, run_case, run_family, tensors_of
from safetensors.torch import save_file
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

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


def toy(folder, **changes):
    """Gates and ups beyond the limit occur."""
    sizes = dict(model_type="gpt_oss", num_hidden_layers=4, num_local_experts=8, vocab_size=261, hidden_size=64,
                 intermediate_size=40, head_dim=16, num_attention_heads=4, num_key_value_heads=2, sliding_window=11,
                 max_position_embeddings=256, num_experts_per_tok=2, rope_parameters=dict(YARN))
    model = make(sizes | changes, gate_up_proj_bias=2.0, gate_up_proj=0.4)
    model.save_pretrained(folder)
    return model


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
        check_estimate(folder, f"gpt-oss-{size}", ranks)
    return []


def case(name, changes):
    return lambda folder: run_case(name, toy(folder / "hub", **changes), folder)


if __name__ == "__main__":
    run_family("gpt_oss", {name: case(name, changes) for name, changes in CASES.items()},
               (check_mxfp4, check_refusals, check_published))
