"""The peer of `./dev bench train-cpu`: trains a Hugging Face config with transformers on the CPU.

Tries each expert implementation for a few steps, then measures the best. One JSON line on stdout:
{"implementation", "tokens_per_second", "tried": {name: tokens/s}, "gflops": sgemm of this process}
"""
import argparse
import json
import os
import time

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
parser.add_argument("--threads", type=int, required=True)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--implementation", choices=["eager", "grouped_mm", "batched_mm"])
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--seq-len", type=int, default=256)
args = parser.parse_args()
# Read by the OpenMP runtime when torch loads.
os.environ.update(OMP_NUM_THREADS=str(args.threads), OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0")

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

torch.set_num_threads(args.threads)
torch.manual_seed(0)


def sgemm_gflops(size=1536, seconds=1.0):
    """Rate of one large fp32 matrix product: what the cores can do at best."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    torch.mm(a, b)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def train(implementation, steps):
    """Median tokens/s of `steps` optimizer steps after two to warm up."""
    config = AutoConfig.for_model(**json.load(open(args.config)))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa", experts_implementation=implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds = []
    for _ in range(steps + 2):
        ids = torch.randint(config.vocab_size, (args.batch, args.seq_len))
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        seconds.append(time.perf_counter() - start)
    timed = sorted(seconds[2:])
    return args.batch * args.seq_len / timed[len(timed) // 2]


names = [args.implementation] if args.implementation else ["eager", "grouped_mm"]
if not args.implementation:
    # batched_mm copies the weights of each token's experts, forward and backward, in every layer.
    c = json.load(open(args.config))
    need = (4 * 2 * 3 * args.batch * args.seq_len * c["num_experts_per_tok"] * c["moe_intermediate_size"] *
            c["hidden_size"] * c["num_hidden_layers"])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need < free / 2:
        names.append("batched_mm")
    else:
        print(f"batched_mm would need {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free: left out", flush=True)
tried = {}
for name in names:
    try:
        tried[name] = round(train(name, 1 if len(names) > 1 else args.steps), 1)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        tried[name] = 0.0
        print(f"{name}: {error}", flush=True)
best = max(tried, key=tried.get)
rate = tried[best] if len(names) == 1 else train(best, args.steps)
print(json.dumps({"implementation": best, "tokens_per_second": round(rate, 1), "tried": tried,
                  "gflops": round(sgemm_gflops(), 1)}))
