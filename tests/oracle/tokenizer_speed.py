"""One core's speed of marrow's tokenizer beside that of Python's tokenizers, on the same text:

    tokenizer_speed.py BENCH_TOKENIZER [MEGABYTES]

The text is Python and Markdown of the installed packages, the tokenizer DeepSeek's. Both times are
processor time, so that a busy machine does not change them much.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # before the library starts its threads

import numpy
import tokenizer_texts
from tokenizers import Tokenizer


def reference(path, texts):
    tokenizer = Tokenizer.from_file(path)
    tokenizer.encode_special_tokens = True
    tokenizer.encode_batch(texts[:1], add_special_tokens=False)
    start = time.process_time()
    tokens = sum(len(e.ids) for e in tokenizer.encode_batch(texts, add_special_tokens=False))
    return tokens, time.process_time() - start


def main():
    program = sys.argv[1]
    texts = tokenizer_texts.package_texts(int(sys.argv[2] if len(sys.argv) > 2 else 20) * 1_000_000)
    path = tokenizer_texts.deepseek()
    with tempfile.NamedTemporaryFile() as file:
        file.write(numpy.uint32(len(texts)).tobytes())
        for text in texts:
            data = text.encode()
            file.write(numpy.uint32(len(data)).tobytes() + data)
        file.flush()
        output = subprocess.run([program, path, file.name], check=True, capture_output=True, text=True)
    ours = json.loads(output.stdout)
    tokens, seconds = reference(path, texts)
    theirs = ours["bytes"] / 1e6 / seconds
    print(f"{ours['bytes'] / 1e6:.1f} MB, one core, DeepSeek's tokenizer")
    print(f"  tokenizers encode_batch  {theirs:8.2f} MB/s  {tokens} tokens")
    print(f"  marrow                   {ours['mb_per_second']:8.2f} MB/s  {ours['tokens']} tokens")
    ratio = ours["mb_per_second"] / theirs
    passed = ratio >= 5 and tokens == ours["tokens"]
    print(f"{'PASS' if passed else 'FAIL'} {ratio:.1f} times as fast (at least 5 wanted), "
          f"tokens {'equal' if tokens == ours['tokens'] else 'DIFFER'}")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
