"""Makes C++ of a CUDA file for the emulator (emulator.h): translate.py FROM TO. Lines keep their numbers.

kernel<<<grid, block, …>>>(…)   a call of emulator::launch
extern __shared__ T name[];     a pointer to the block's shared memory
__shared__ T name[n];           a reference to emulator::shared_array<T[n]>
asm [volatile]("a.b.c …" : …)   emulator::ptx::a_b_c(outputs…, inputs…); one that is not there does not compile
__global__ … {                  a note of which kernel runs; and the file's kernels are listed
"""
import re
import sys
from pathlib import Path


def closing(text, at):
    """The place of the parenthesis that closes the one before `at`."""
    depth = 1
    for match in re.compile(r'"(?:\\.|[^"\\])*"|[()]').finditer(text, at):
        depth += {"(": 1, ")": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    sys.exit(f"{sys.argv[1]}:{text.count(chr(10), 0, at) + 1}: a parenthesis is not closed")


def call_of_asm(statement):
    """asm's operands as a call: a section of texts, then of outputs and of inputs, each '"=r"(expression)'."""
    sections = re.split(r'(?<!:):(?!:)(?=(?:[^"]*"[^"]*")*[^"]*$)', statement)
    name = re.match(r'\s*"([\w.]+)', sections[0]).group(1).replace(".", "_")
    operands = []
    for section in sections[1:3]:
        for match in re.finditer(r'"[=+]?\w"\(', section):
            operands.append(section[match.end():closing(section, match.end())])
    return f"::emulator::ptx::{name}({', '.join(operands)})" + "\n" * statement.count("\n")


def translate(text, name):
    text = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];",
                  r"\1* \2 = reinterpret_cast<\1*>(::emulator::shared_memory);", text)
    text = re.sub(r"__shared__ ([\w:]+) (\w+)((?:\[[^\]]*\])+);", r"auto& \2 = ::emulator::shared_array<\1\3>();", text)
    while match := re.search(r"\basm(?: volatile)?\(", text):
        end = closing(text, match.end())
        text = text[:match.start()] + call_of_asm(text[match.end():end]) + text[end + 1:]
    text = re.sub(r"([\w:]+(?:<[\w, ]+>)?)(\s*)<<<(.*?)>>>\(", r"::emulator::launch(\1, ::emulator::Config(\3), \2",
                  text, flags=re.S)
    kernels, done = [], 0
    while (at := text.find("__global__", done)) >= 0:
        done = text.index("{", at) + 1
        head = re.sub(r"__launch_bounds__\([^()]*\)", "", text[at:done])
        kernels.append(re.search(r"void\s+(\w+)\(", head).group(1))
        text = f'{text[:done]} EMULATED_KERNEL("{name}: {kernels[-1]}"){text[done:]}'
    listed = "".join(f'static const ::emulator::Listed listed_{k}("{name}: {k}");\n' for k in dict.fromkeys(kernels))
    return f'#line 1 "src/ops/{name}"\n{text}\n{listed}'


source, target = Path(sys.argv[1]), Path(sys.argv[2])
target.write_text(translate(source.read_text(), source.name))
