"""vLLM's greedy tokens on the CPU, run by .venv-interop's Python: interop_vllm.py EXPORT REQUESTS RESULTS.

REQUESTS: JSON, {"prompts": [text...], "max_tokens": N, "dtype": NAME}. RESULTS: JSON, per prompt its own ids, new ids, text.
"""
import json
import sys

from vllm import LLM, SamplingParams


def main():
    export, requests, results = sys.argv[1:]
    wanted = json.load(open(requests))
    model = LLM(model=export, dtype=wanted["dtype"], max_model_len=512, max_num_seqs=8, enforce_eager=True,
                enable_prefix_caching=False, disable_log_stats=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=wanted["max_tokens"], skip_special_tokens=False)
    outputs = model.generate(wanted["prompts"], greedy, use_tqdm=False)
    json.dump([{"prompt_ids": list(o.prompt_token_ids), "ids": list(o.outputs[0].token_ids),
                "text": o.outputs[0].text} for o in outputs], open(results, "w"))


if __name__ == "__main__":
    main()
