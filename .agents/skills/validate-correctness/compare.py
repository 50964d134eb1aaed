"""Compares the runs of check.sh: argument is their folder. Exit code 1 where one differs."""
import json
import sys
from pathlib import Path

FOLDER, KEYS = Path(sys.argv[1]), ("loss", "balance_loss", "grad_norm")


def steps(name):
    lines = (FOLDER / name / "metrics.jsonl").read_text().splitlines()
    return [m for m in map(json.loads, lines) if "loss" in m]


def differences(name, limit):
    one, other = steps("one"), steps(name)
    if [m["step"] for m in other] != [m["step"] for m in one]:
        yield f"{name}: steps {[m['step'] for m in other]}, not {[m['step'] for m in one]}"
        return
    for a, b in zip(one, other):
        for key in KEYS:
            error = abs(a[key] - b[key]) / max(abs(a[key]), 1e-30)
            if not error <= limit:
                yield f"{name}: step {a['step']} {key}: {b[key]} against {a[key]}, relative {error:.1e} > {limit:g}"


found = [*differences("four", 1e-5), *differences("again", 0.0), *differences("resumed", 0.0)]
if len(steps("one")) != 8:
    found.append(f"one: {len(steps('one'))} steps, not 8")
print("\n".join(found) or "micro_batch 4 equal within 1e-5, a second run and a resumed run to the bit")
sys.exit(bool(found))
