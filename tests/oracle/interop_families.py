"""A small model of each further family, as marrow exports it after a step: what interop.py lets other programs read.

Sizes are those that vLLM's kernels for the CPU take: latent attention as in the published models, heads of 64.
"""
import json

from family_cases import make
from interop_model import END_OF_DOCUMENT, SEQ_LEN, marrow

COMMON = dict(vocab_size=257, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=512,
              num_experts_per_tok=2, eos_token_id=END_OF_DOCUMENT, bos_token_id=None, pad_token_id=None)
LATENT = COMMON | dict(intermediate_size=96, moe_intermediate_size=64, num_key_value_heads=4, n_routed_experts=8,
                       n_shared_experts=2, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None,
                       qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_group=1, topk_group=1)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32,
        "beta_slow": 1}
FAMILIES = {
    "deepseek_v2": LATENT | dict(topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1.0,
                                 rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}),
    # By YaRN: where positions are not scaled, as in Moonlight, vLLM 0.32's kernel for the CPU turns queries wrongly: its
    # ops.rotary_embedding is right on [T, heads·64] and not on the [T, heads, 64] that latent attention hands it.
    "deepseek_v3": LATENT | dict(norm_topk_prob=True, routed_scaling_factor=2.446, num_mtp_layers=0,
                                 rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "gpt_oss": COMMON | dict(num_hidden_layers=4, num_local_experts=8, intermediate_size=64, head_dim=64,
                             num_key_value_heads=2, sliding_window=32, rope_parameters=YARN | {"truncate": False}),
    "qwen3_5_moe_text": COMMON | dict(
        num_hidden_layers=4, num_experts=8, moe_intermediate_size=64, shared_expert_intermediate_size=64, head_dim=64,
        num_key_value_heads=2, linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=2,
        linear_num_value_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}),
}
ROUNDED = ("qwen3_5_moe_text",)  # vLLM: "CPU GDN attention requires BF16"


def train_family(work, name, corpus):
    """The checkpoint and the export of a step from random weights."""
    # Spread so that a continuation depends on all its text, and does not end in one word.
    model = make(FAMILIES[name] | {"model_type": name}, embed_tokens=0.5, o_proj=0.2, q_proj=0.2)
    model.save_pretrained(work / "hub")
    marrow("import", work / "hub", "--output", work / "imported")
    run = {"model.config": f"{work}/hub/config.json", "model.init_from": f"{work}/imported", "data.train": [str(corpus)],
           "data.seq_len": SEQ_LEN, "train.steps": 1, "train.global_batch": 4, "train.device": "cpu",
           "train.dtype": "fp32", "optimizer.lr": 1e-3, "log.dir": f"{work}/run"}
    (work / "run.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in run.items()))
    marrow("pretrain", work / "run.toml")
    checkpoint, export = work / "run/checkpoints/step-00000001", work / "export"
    marrow("export", checkpoint, "--output", export)
    return checkpoint, export
