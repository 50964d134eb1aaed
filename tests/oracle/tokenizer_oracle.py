"""Writes what Python's tokenizers makes of hard texts, for the C++ test to compare with:

    tokenizer_oracle.py FOLDER MEGABYTES

FOLDER/texts.bin           u32 count, then for each text u32 bytes and its UTF-8
FOLDER/NAME/tokenizer.json the tokenizers
FOLDER/NAME/ids.bin        for each of its first u32 count texts: u32 count and int32 ids, special
                           tokens being plain text
FOLDER/NAME/special.bin    the same with special tokens, of fewer texts
"""

import os
import shutil
import sys

import numpy
import tokenizers
import tokenizer_texts as texts
from tokenizers import Tokenizer


def write_ids(path, tokenizer, strings):
    encoded = tokenizer.encode_batch_fast(strings, add_special_tokens=False)
    with open(path, "wb") as file:
        file.write(numpy.uint32(len(strings)).tobytes())
        for encoding in encoded:
            file.write(numpy.array([len(encoding.ids), *encoding.ids], dtype=numpy.int32).tobytes())


def write_expected(folder, strings, few):
    tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    write_ids(os.path.join(folder, "ids.bin"), tokenizer, strings)
    tokenizer.encode_special_tokens = False
    write_ids(os.path.join(folder, "special.bin"), tokenizer, few)


def main():
    assert tokenizers.__version__ == "0.23.2", tokenizers.__version__
    folder, size = sys.argv[1], int(sys.argv[2]) * 1_000_000
    os.makedirs(folder, exist_ok=True)
    strings = texts.mixed_texts(size)
    with open(os.path.join(folder, "texts.bin"), "wb") as file:
        file.write(numpy.uint32(len(strings)).tobytes())
        for string in strings:
            data = string.encode()
            file.write(numpy.uint32(len(data)).tobytes() + data)

    names = ["deepseek", "qwen", "o200k"]
    for name in names:
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    json_path = lambda name: os.path.join(folder, name, "tokenizer.json")
    shutil.copy(texts.deepseek(), json_path("deepseek"))
    texts.write_qwen(json_path("qwen"))
    texts.write_o200k(json_path("o200k"), texts.package_texts(1_000_000, seed=3) + strings[::50])
    for name in names:
        write_expected(os.path.join(folder, name), strings, strings[:6000])
    # The variants see the first texts only: every code point, and random strings.
    for name, text in texts.variants(json_path("o200k")).items():
        os.makedirs(os.path.join(folder, name), exist_ok=True)
        with open(json_path(name), "w") as file:
            file.write(text)
        write_expected(os.path.join(folder, name), strings[:20_000], strings[:6000])


if __name__ == "__main__":
    main()
