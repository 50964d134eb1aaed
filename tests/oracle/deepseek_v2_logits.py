"""Case A1: writes DIR/NAME/, a model, and DIR/NAME.safetensors, tokens and transformers' logits. Run by tests/train."""
import sys
from pathlib import Path

import torch
from deepseek_v2_oracle import V2, yarn
from family_cases import make
from safetensors.torch import save_file

# The real model's rotary part and heads, at positions where a wrong factor or pairing shows.
A1 = {f"a1-{mscale}-{all_dim}": V2 | dict(rope_parameters=yarn(mscale, all_dim, original=4096), num_attention_heads=1,
                                          num_key_value_heads=1, qk_nope_head_dim=128, qk_rope_head_dim=64,
                                          v_head_dim=128, max_position_embeddings=163840, num_hidden_layers=2)
      for mscale, all_dim in ((0.707, 0.707), (1.0, 0.707), (0.707, 1.0), (1.0, 0.0))}

for name, config in A1.items():
    folder = Path(sys.argv[1]) / name
    model = make(config)
    model.save_pretrained(folder)
    tokens = torch.randint(0, config["vocab_size"], (4096,))
    positions = torch.tensor([0, 1, 63, 4095])
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, positions]
    save_file({"tokens": tokens.int(), "positions": positions, "logits": logits.contiguous()}, f"{folder}.safetensors")
