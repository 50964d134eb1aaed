"""tests/oracle/family_cases.py on any model folders: proof.sh runs it. What a case wrote stays in runs/proof/FOLDER."""
import argparse
import runpy
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/oracle"))
from transformers import AutoConfig
from transformers.utils import logging

from family_cases import SEQ_LEN, load, make, run_case


def prove(folder, work, seed, spreads, flags):
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    if text.vocab_size < 257 or text.max_position_embeddings < 2 * SEQ_LEN:
        return [f"{folder}: vocab_size is {text.vocab_size}, max_position_embeddings {text.max_position_embeddings}; "
                f"the proof needs 257 (bytes and the end of a document) and {2 * SEQ_LEN}"]
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    if any(folder.glob("*.safetensors*")):
        (work / "hub").symlink_to(folder)
        model = load(folder).train()
    else:
        model = make(config, seed, **spreads)
        model.save_pretrained(work / "hub")
    return run_case(folder.name, model, work, flags)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--reference", help="a Python file that registers a model which transformers lacks")
    parser.add_argument("--spread", action="append", default=[], metavar="PART=STD",
                        help="standard deviation of random parameters that have PART in their name")
    parser.add_argument("--seed", type=int, default=7, help="of random parameters")
    parser.add_argument("--text-only", action="store_true", help="import leaves out what is not the language model's")
    given = parser.parse_args()
    if given.reference:
        runpy.run_path(given.reference)
    logging.disable_progress_bar()
    spreads = {part: float(std) for part, std in (spread.split("=") for spread in given.spread)}
    problems = []
    for folder in map(Path.resolve, given.folders):
        try:
            problems += prove(folder, ROOT / "runs/proof" / folder.name, given.seed, spreads,
                              ["--text-only"] * given.text_only)
        except (SystemExit, OSError, ValueError, KeyError, AssertionError) as fault:
            problems.append(f"{folder.name}: {fault}")
    print("\n".join(problems[:20]))
    print(f"FAIL {len(problems)} differences, see above; files: runs/proof  next: less .agents/skills/add-model/SKILL.md"
          if problems else f"PASS {len(given.folders)} models equal transformers")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
