"""Random Qwen3.5-MoE models against transformers, in fp32, from import to export (family_cases.py), as language models
and within models of text and images. Then what is refused, and the published model's count of parameters.
"""
import json

import torch
import transformers
from family_cases import ROOT, check_estimate, make, marrow, run_case, run_family, tensors_of
from safetensors.torch import save_file
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

CASES = {
    "published": {},  # as the published models, but small
    "shared-keys": {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_value_head_dim": 24,
                    "tie_word_embeddings": True, "num_key_value_heads": 4, "num_experts_per_tok": 3,
                    "layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3},
    "own-keys": {"linear_num_key_heads": 4, "linear_key_head_dim": 12, "linear_conv_kernel_dim": 3, "head_dim": 24,
                 "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
                 "num_experts": 5, "num_experts_per_tok": 4, "moe_intermediate_size": 96},
    "recurrent": {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2, "rms_norm_eps": 1e-4,
                  "linear_conv_kernel_dim": 2, "linear_value_head_dim": 40},
    "attentive": {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "num_attention_heads": 6,
                  "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
}
VISION = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, num_position_embeddings=16)


def sizes(**changes):
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    # Without a cache: transformers' wants a layer of attention. A large eps: where a query and a key are all but at right
    # angles, a state's first outputs are all but 0, and their norm would blow rounding up.
    return dict(model_type="qwen3_5_moe_text", num_hidden_layers=4, num_experts=8, vocab_size=261, hidden_size=64, moe_intermediate_size=40, head_dim=16,
                shared_expert_intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2,
                linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
                max_position_embeddings=256, rope_parameters=rope, use_cache=False,
                rms_norm_eps=1e-3) | changes


def toy(folder, **changes):
    model = make(sizes(**changes), norm=0.2)
    model.save_pretrained(folder)
    return model


def check_images(folder):
    """A language model within one of text and images, with layers that predict further tokens: those parts are left out
    on demand alone, and what is left is the language model."""
    text = toy(folder / "text")
    config = Qwen3_5MoeConfig(text_config=sizes(), vision_config=VISION)
    whole = Qwen3_5MoeForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(folder / "hub")
    tensors = tensors_of(folder / "hub")
    assert any(name.startswith("model.language_model.") for name in tensors), sorted(tensors)
    more = {"mtp.norm.weight": torch.ones(64)}
    save_file({k: v.contiguous() for k, v in (tensors | more).items()}, folder / "hub/model.safetensors", {"format": "pt"})
    problems = []
    for flags, code in ((), 3), (("--allow-unknown",), 3), (("--text-only",), 0):
        said = marrow("import", folder / "hub", "--output", folder / "kept", *flags, code=code)
        wanted = ("model.visual.", "--text-only") if code else ("mtp.norm.weight", "model.visual.")
        problems += [f"images: {word} is missing from: {said}" for word in wanted if word not in said]
    first, second = tensors_of(folder / "kept"), tensors_of(folder / "text")
    if first.keys() != second.keys() or any(not torch.equal(first[k], second[k]) for k in first):
        problems.append("images: the import differs from the language model's")
    problems += run_case("images", text, folder, ("--text-only",))
    exported = json.loads((folder / "export/config.json").read_text())
    if exported["model_type"] != "qwen3_5_moe_text" or "text_config" in exported or "vision_config" in exported:
        problems.append(f"images: the export's config is {exported}")
    # Stacks of experts, as the published folder has them.
    stacked = {name: t for name, t in second.items() if "experts." not in name or "shared" in name}
    for name, parameter in toy(folder / "text-again").named_parameters():
        if ".experts." in name:
            stacked[name] = parameter.detach().clone()
    stacked = {k.replace("model.", "model.language_model.", 1): v for k, v in stacked.items()}
    save_file(stacked, folder / "hub/model.safetensors", {"format": "pt"})
    marrow("import", folder / "hub", "--output", folder / "unstacked")
    unstacked = tensors_of(folder / "unstacked")
    if unstacked.keys() != second.keys() or any(not torch.equal(unstacked[k], second[k]) for k in second):
        problems.append("images: stacks of experts differ")
    return problems


def check_refusals(folder):
    toy(folder / "hub")
    path = folder / "hub/config.json"
    sound = json.loads(path.read_text())
    rope = sound["rope_parameters"]
    for key, value in {"hidden_act": "gelu", "attention_dropout": 0.1, "attention_bias": True, "layer_types": ["x"] * 4,
                       "linear_conv_kernel_dim": 5, "rope_parameters": rope | {"rope_type": "yarn", "factor": 2.0},
                       "attn_output_gate": False, "num_experts_per_tok": 9}.items():
        path.write_text(json.dumps(sound | {key: value}))
        text = marrow("import", folder / "hub", "--output", folder / "never", code=2)
        assert key in text and "fix:" in text, text
    path.write_text(json.dumps(sound))
    tensors = tensors_of(folder / "hub")
    for key in ("linear_attn.A_log", "linear_attn.conv1d.weight", "mlp.shared_expert_gate.weight"):
        name = f"model.layers.1.{key}"
        save_file({k: v for k, v in tensors.items() if k != name}, folder / "hub/model.safetensors", {"format": "pt"})
        text = marrow("import", folder / "hub", "--output", folder / "never", code=3)
        assert name in text and "missing" in text, text
    return []


def check_published(folder):
    check_estimate(folder, "qwen3.5-35b-a3b", 8)
    values = json.loads((ROOT / "configs/models/qwen3.5-35b-a3b.json").read_text())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values))
    count = sum(p.numel() for p in model.parameters())
    return [] if count == PUBLISHED else [f"published: transformers counts {count} parameters"]


PUBLISHED = 34_660_610_688  # as tests/models/qwen3_5_moe_test.cpp


def case(name, changes):
    return lambda folder: run_case(name, toy(folder / "hub", **changes), folder)


if __name__ == "__main__":
    run_family("qwen3_5", {name: case(name, changes) for name, changes in CASES.items()},
               (check_images, check_refusals, check_published))
