"""Writes DIR/NAME/: a model, tokens, and transformers' logits at some positions. Run by tests/train."""
import sys
from pathlib import Path

import torch
from deepseek_v2_models import CONFIGS, V2, make, yarn
from safetensors.torch import save_file

# Case A1: the real model's rotary part and heads, at positions where a wrong factor or pairing shows.
A1 = {f"a1-{mscale}-{all_dim}": V2 | dict(rope_parameters=yarn(mscale, all_dim, original=4096), num_attention_heads=1,
                                          num_key_value_heads=1, qk_nope_head_dim=128, qk_rope_head_dim=64,
                                          v_head_dim=128, max_position_embeddings=163840, num_hidden_layers=2)
      for mscale, all_dim in ((0.707, 0.707), (1.0, 0.707), (0.707, 1.0), (1.0, 0.0))}

for name, config in (CONFIGS | A1).items():
    folder = Path(sys.argv[1]) / name
    model = make(config)
    model.save_pretrained(folder)
    far = name in A1
    tokens = torch.randint(0, config["vocab_size"], (4096 if far else 96,), dtype=torch.int32)
    positions = torch.tensor([0, 1, 63, 4095] if far else range(96))
    with torch.no_grad():
        logits = model(tokens[None].long()).logits[0, positions]
    save_file({"tokens": tokens, "positions": positions, "logits": logits.contiguous()},
              folder / "expected.safetensors")
