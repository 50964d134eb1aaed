"""fp8 against bf16 in training steps on this machine's GPU: fp8.py [STEPS [WIDTH]], with the bundle `bench/fp8_speed.sh`.

Qwen3-30B-A3B's width (4 layers) and DeepSeek-V3's (2 layers, 32 experts), micro-batches of 4 sequences of 4,096, 131,072
tokens a step; each dtype twice, in turns, and the better of both counts. $MARROW is the binary. Fails where fp8 is not
as much faster as it must be, or the losses of a step are more than 1 % apart.
"""
import sys

from gpu import gpus_present, make_corpus, measure

# model: config, vocabulary, learning rate (at 1e-4 V3's width jumps to a loss of 35), what fp8 must be times bf16
WIDTHS = {"Qwen3-30B-A3B": ("qwen3-30b-a3b-4layers", 151_936, 1e-4, 1.05),
          "DeepSeek-V3": ("deepseek-v3-width-2layers", 16_384, 1e-5, 1.3)}


def main(steps="7", *names):
    gpus_present()
    print("| width | dtype | tokens/s | TFLOP/s | memory | loss of the first, last step |\n" + "|---" * 6 + "|")
    missed = []
    for name in names or WIDTHS:
        config, vocabulary, rate, goal = WIDTHS[name]
        corpus = f"/tmp/zipf{vocabulary}"
        make_corpus(corpus, 3_000_000, str(vocabulary))
        best, losses = {}, {}
        for dtype in ("bf16", "fp8", "bf16", "fp8"):
            r = measure(1, [f'model.config="configs/models/{config}.json"', f'data.train=["{corpus}"]',
                            "train.micro_batch=4", f"optimizer.lr={rate}", f'train.dtype="{dtype}"'], steps)
            if r is None:
                missed.append(f"{name} in {dtype} ended early")
                continue
            best[dtype] = max(best.get(dtype, 0), r["tokens_per_second"])
            losses[dtype] = r["losses"]
            print(f"| {name} | {dtype} | {r['tokens_per_second']:,} | {r['tflops_per_gpu']:.0f} | "
                  f"{r['peak_memory_gb']:.1f} GB | {r['losses'][0]:.4f}, {r['losses'][-1]:.4f} |", flush=True)
        if len(best) < 2:
            continue
        gain = best["fp8"] / best["bf16"]
        apart = max(abs(a - b) / b for a, b in zip(losses["fp8"], losses["bf16"]))
        print(f"{name}: fp8 is {gain:.3f} x bf16 (goal {goal}), losses at most {100 * apart:.2f} % apart", flush=True)
        if gain < goal:
            missed.append(f"{name}: {gain:.3f} of {goal}")
        if apart > 0.01:
            missed.append(f"{name}: losses {100 * apart:.2f} % apart")
    if missed:
        sys.exit(f"FAIL {'; '.join(missed)}  next: bench_ops fp8_bounds")
    print("PASS fp8 is as much faster as it must be")


if __name__ == "__main__":
    main(*sys.argv[1:])
