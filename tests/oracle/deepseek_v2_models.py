"""Small random DeepSeek models, whose options together are all that marrow supports of the family."""
import torch
import transformers

VOCAB = 257  # bytes and the end of a document


def yarn(mscale=None, all_dim=None, factor=40.0, original=8, theta=10000.0):
    """RoPE as transformers 5 writes it; the original length is so short that some pairs are slowed, some not."""
    rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original,
            "beta_fast": 32, "beta_slow": 1}
    return rope | ({} if mscale is None else {"mscale": mscale, "mscale_all_dim": all_dim})


def plain(theta):
    return {"rope_type": "default", "rope_theta": theta}


COMMON = dict(vocab_size=VOCAB, hidden_size=48, intermediate_size=40, moe_intermediate_size=24, num_hidden_layers=3,
              num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_shared_experts=2,
              num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=8,
              qk_rope_head_dim=12, v_head_dim=10, max_position_embeddings=320, rms_norm_eps=1e-3, eos_token_id=256,
              bos_token_id=None)
V2 = COMMON | dict(model_type="deepseek_v2", topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1.0)
V3 = COMMON | dict(model_type="deepseek_v3", norm_topk_prob=True, n_group=1, topk_group=1,
                   routed_scaling_factor=2.446)
CONFIGS = {
    "lite": V2 | dict(rope_parameters=yarn(0.707, 0.707)),
    "v2": V2 | dict(rope_parameters=yarn(1.0, 0.707), q_lora_rank=20, topk_method="group_limited_greedy", n_group=4,
                    topk_group=2, num_experts_per_tok=3, routed_scaling_factor=4.0, first_k_dense_replace=2),
    "v2-plain": V2 | dict(rope_parameters=plain(1e4), first_k_dense_replace=0, n_shared_experts=1, num_hidden_layers=2,
                          tie_word_embeddings=True, num_experts_per_tok=1, n_routed_experts=5),
    "moonlight": V3 | dict(rope_parameters=plain(5e4), num_mtp_layers=0),
    "v3": V3 | dict(rope_parameters=yarn(1.0, 1.0), q_lora_rank=20, n_group=4, topk_group=2, num_experts_per_tok=3,
                    num_mtp_layers=1),
    "v3-unnormed": V3 | dict(rope_parameters=yarn(), norm_topk_prob=False, n_group=2, topk_group=1, num_mtp_layers=1),
}


def make(config):
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():  # weights far from each other: routing has no ties, gradients are not tiny
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.4 if ".gate.weight" in name else 0.08))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.05)
    return model.eval()
