"""Rules that the compiler does not know: floors, banned words, line budget. Prints file:line: rule."""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET, LONGEST = 12000, 600
# src/ is over its budget: with several ranks came communicators, launch, schedule, dispatch and ring attention.
# Lower this with every cut, and raise it for a feature alone; docs/roadmap.md says where lines can go.
CEILING = 23672
# A folder may include itself and these.
BELOW = {
    "base": set(),
    "data": {"base"},
    "ops": {"base"},
    "models": {"parallel", "ops", "base"},
    "parallel": {"ops", "base"},
    "pipeline": {"parallel", "models", "ops", "base"},
    "train": {"pipeline", "parallel", "models", "ops", "base", "data"},
    "app": {"train", "pipeline", "parallel", "models", "ops", "base", "data"},
}
BANNED = [  # pattern in code (comments and strings removed), the rule
    (r"\brecord_stream\b", "record_stream makes the memory peak random: hold the tensor until the event"),
    (r"\bstd::cout\b", "no std::cout: use base/log.h or fmt::print"),
    (r"(?<!operator )\bnew\b\s*[\w:<(\[]", "no raw new: use std::make_unique or a container"),
    (r"(?<!= )(?<!operator )\bdelete\b(\[\])?\s+\w|\bdelete\[\]", "no raw delete: use an owner"),
    (r"\busing namespace\b", "no using namespace"),
]
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.M)
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/|^ops/pch\.h$")


def strip(text):
    """Comments and literals become blanks; line numbers stay."""
    blank = lambda m: re.sub(r"[^\n]", " ", m.group())
    pattern = r'R"(\w*)\((?:.|\n)*?\)\1"|//[^\n]*|/\*(?:.|\n)*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    return re.sub(pattern, blank, text)


def line_of(text, position):
    return text.count("\n", 0, position) + 1


problems = []
files = sorted(p for p in (ROOT / "src").rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})
texts = {p.relative_to(ROOT / "src").as_posix(): p.read_text() for p in files}


def torch_path(name, seen=()):
    """How `name` reaches a torch header, as a chain of files; None if it does not."""
    for _, target in INCLUDE.findall(texts.get(name, "")):
        if TORCH.match(target):
            return [name, target]
        if target in texts and target not in seen:
            chain = torch_path(target, (*seen, name))
            if chain:
                return [name, *chain]
    return None


def say(name, line, rule):
    problems.append(f"src/{name}:{line}: {rule}")


for name, text in texts.items():
    floor, code, lines = name.split("/")[0], strip(text), text.count("\n")
    if lines > LONGEST:
        say(name, lines, f"{lines} lines; a file has at most {LONGEST}: split it by subject")
    if floor not in BELOW:
        say(name, 1, f"unknown folder src/{floor}; there are {', '.join(BELOW)}")
        continue
    if name.endswith((".h", ".cuh")):
        if not text.startswith("//"):
            say(name, 1, "a header starts with a comment that says what it is for")
        if "#pragma once" not in text and "\n#ifndef MARROW_" not in text:
            say(name, 1, "#pragma once, or a guard by name, is missing")
    for match in INCLUDE.finditer(text):
        target, line = match.group(2), line_of(text, match.start(1))
        top = target.split("/")[0]
        if top in BELOW and top != floor and top not in BELOW[floor]:
            say(name, line, f"{floor} must not include {top} (floors: app, train, pipeline, parallel | "
                            "models, ops, base; data stands on base)")
        if target == "torch/torch.h":
            say(name, line, "torch/torch.h is banned: 60 s of compile time; include ops/pch.h")
        if floor in ("base", "data") and TORCH.match(target):
            say(name, line, f"src/{floor} is free of torch")
        if match.group(1) == '"' and target not in texts:
            say(name, line, f'"{target}" is not in src/: write the path from src/')
    if name.endswith((".cu", ".cuh")) and (chain := torch_path(name)):
        say(name, 1, "no torch header in CUDA files: " + " -> ".join(chain))
    for pattern, rule in BANNED:
        for match in re.finditer(pattern, code):
            say(name, line_of(code, match.start()), rule)

total = sum(text.count("\n") for text in texts.values())
if total > CEILING:
    problems.append(f"src/: {total} lines, over the ceiling of {CEILING} (the budget is {BUDGET}); what can go? "
                    "A feature may raise CEILING in tools/lint.py")
print("\n".join(problems + [f"src/: {len(texts)} files, {total} of {BUDGET} lines"]))
sys.exit(bool(problems))
