"""`./dev bench families`: 4 layers of every family at full width on this machine's GPUs. families.py [STEPS] [NAME ...]

Sequences of 4,096, 131,072 tokens a step, zipf tokens, random weights: one GPU, and with two each of pp 2, dp 2, cp 2 and
ep 2. NAME: of configs/models. Fails where a run ends early or its loss does not fall.
"""
import json
import sys
from pathlib import Path

from gpu import ROOT, gpus_present, make_corpus, measure

FAMILIES = ("qwen3-30b-a3b", "deepseek-v2-lite", "moonlight-16b-a3b", "gpt-oss-20b", "qwen3.5-35b-a3b")
LAYERS, VOCABULARY = 4, 100_000  # tokens that every family has


def four_layers(name):
    """A copy of the model's config.json with its first four layers."""
    config = json.loads((ROOT / f"configs/models/{name}.json").read_text())
    text = config.get("text_config", config)
    text["num_hidden_layers"] = LAYERS
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:LAYERS]
    path = Path(f"/tmp/{name}-{LAYERS}layers.json")
    path.write_text(json.dumps(config))
    return path


def main(steps="20", *names):
    two = gpus_present() > 1
    make_corpus("/tmp/zipf100k", 9_000_000, str(VOCABULARY))
    print("| family, 4 layers | mesh | tokens/s | TFLOP/s a GPU | memory of a rank | expert load, max / mean | "
          "launch → first step | loss of the first, last step |\n|" + "---|" * 8)
    failed = []
    for name in names or FAMILIES:
        common = [f'model.config="{four_layers(name)}"', 'data.train=["/tmp/zipf100k"]', "train.micro_batch=1"]
        for mesh in ("one GPU", "pp", "dp", "cp", "ep") if two else ("one GPU",):
            r = measure(*((1, common) if mesh == "one GPU" else (2, [*common, f"mesh.{mesh}=2"])), steps)
            if r is None or not r["losses"][-1] < r["losses"][0]:
                failed.append(f"{name} {mesh}")
            if r is None:
                continue
            print(f"| {name} | {mesh if mesh == 'one GPU' else mesh + ' 2'} | {r['tokens_per_second']:,} | "
                  f"{r['tflops_per_gpu']:.0f} | {r['peak_memory_gb']:.1f} GB | {r['expert_load_max_over_mean']:.1f} | "
                  f"{r['first_step_seconds']:.1f} s | {r['losses'][0]:.4f}, {r['losses'][-1]:.4f} |", flush=True)
    if failed:
        sys.exit(f"FAIL {', '.join(failed)}  next: marrow pretrain with the settings above")
    print("PASS every run's loss fell")


if __name__ == "__main__":
    main(*sys.argv[1:])
