"""DeepSeek-V2 and V3 against transformers, in fp32: small random models from import to export (family_cases.py), each
with a mode of balance: V3's bias of selection moves by its rule alone. Then both styles of config.json, and the published
models' counts. Logits far into a sequence: deepseek_v2_logits.py.
"""
import json

import torch
import torch.nn.functional as F
import transformers
from family_cases import ROOT, SEQUENCES, check_estimate, load, make, marrow, relative, run_case, run_family, tensors_of

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
CONFIGS = {  # whose options together are all that marrow supports of the family
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
COEF = 0.3
CASES = {  # the mode of balance, and settings
    "lite": ("sequence", {}), "v2": ("none", {"train.recompute": "layer"}), "v2-plain": ("micro", {"train.micro_batch": 8}),
    "moonlight": ("sequence", {"train.micro_batch": 2}), "v3": ("bias", {"train.micro_batch": 2}),
    "v3-unnormed": ("micro", {"train.micro_batch": 8}),
}
PUBLISHED = {"deepseek-v2-lite": 15_706_484_224, "moonlight-16b-a3b": 15_960_110_208}


class Routing:
    """The balance loss of each layer, and the bias of selection's step."""

    def __init__(self, model, mode):
        self.config, self.mode, self.routed = model.config, mode, []  # logits and chosen experts of each layer
        self.gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self.hooks = [gate.register_forward_hook(lambda _, __, out: self.routed.append((out[0], out[2])))
                      for gate in self.gates]

    def objective(self):
        v3, experts, self.balance = self.config.model_type == "deepseek_v3", self.config.n_routed_experts, []
        for hook in self.hooks:
            hook.remove()
        for logits, chosen in self.routed:
            p = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True) if v3 else logits.softmax(-1)
            f = F.one_hot(chosen, experts).sum(1).float() / chosen.shape[1]
            parts = SEQUENCES if self.mode == "sequence" else 1
            rows = zip(f.chunk(parts), p.chunk(parts))
            self.balance.append(torch.stack([experts * (a.mean(0) * b.mean(0)).sum() for a, b in rows]).mean())
        return COEF * sum(self.balance) if self.mode in ("sequence", "micro") else 0

    @torch.no_grad()
    def step(self):
        if self.mode != "bias":
            return
        for gate, (_, chosen) in zip(self.gates, self.routed):
            counts = F.one_hot(chosen, self.config.n_routed_experts).sum((0, 1)).double()
            bias = gate.e_score_correction_bias.double() + COEF * (counts.mean() - counts).sign()
            gate.e_score_correction_bias.copy_(bias - bias.mean())


def check_config_forms(folder):
    """The older style of config.json is the same model; a bf16 export keeps the bias; refusals name the key."""
    problems = []
    model = make(CONFIGS["v3"])
    model.save_pretrained(folder / "hub")
    path = folder / "hub/config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"], rope["type"] = rope.pop("rope_theta"), rope.pop("rope_type")
    config["rope_scaling"], config["num_nextn_predict_layers"] = rope, 1
    path.write_text(json.dumps(config))
    tokens = torch.arange(40)[None] % VOCAB
    marrow("import", folder / "hub", "--output", folder / "old")
    marrow("export", folder / "old", "--output", folder / "both", "--dtype", "bf16")
    both = json.loads((folder / "both/config.json").read_text())
    if both["rope_parameters"]["rope_type"] != "yarn" or both["num_nextn_predict_layers"] != 0:
        problems.append(f"the export's config: {both}")
    exported = load(folder / "both")
    with torch.no_grad():
        error = relative(exported(tokens).logits, model.bfloat16().float()(tokens).logits)
    if not error <= 0.05:
        problems.append(f"an export of bf16: relative difference {error:.2e}")
    for key, value in model.state_dict().items():
        if "score" in key and not torch.equal(tensors_of(folder / "both")[key], make(CONFIGS["v3"]).state_dict()[key]):
            problems.append(f"a bf16 export rounds {key}")
    config["rope_scaling"] = rope | {"attention_factor": 1.5}
    path.write_text(json.dumps(config))
    if "attention_factor" not in marrow("import", folder / "hub", "--output", folder / "never", code=2):
        problems.append("attention_factor is not named")
    return problems


def check_published(folder):
    problems = []
    for name, count in PUBLISHED.items():
        values = json.loads((ROOT / f"configs/models/{name}.json").read_text())
        config = transformers.AutoConfig.for_model(**values)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
            biases = sum(b.numel() for n, b in model.named_buffers() if "score" in n)
        theirs = biases + sum(p.numel() for p in model.parameters())
        if theirs != count:
            problems.append(f"{name}: transformers counts {theirs} parameters, not {count}")
        check_estimate(folder, name, 8)
    return problems


def case(name, mode, settings):
    def run(folder):
        model = make(CONFIGS[name])
        model.save_pretrained(folder / "hub")
        return run_case(name, model, folder, settings={"router.balance": mode, "router.coef": COEF} | settings,
                        routing=lambda model: Routing(model, mode))

    return run


if __name__ == "__main__":
    run_family("deepseek_v2", {name: case(name, *case_of) for name, case_of in CASES.items()},
               (check_config_forms, check_published))
