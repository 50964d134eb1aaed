"""Writes a corpus of zipf-distributed random tokens: zipf_corpus.py PREFIX TOKENS [VOCAB] [SEED].

Speed runs use it: no text is needed, and every vocabulary row is touched as natural text would.
"""
import struct
import sys

import numpy as np


def main(prefix, tokens, vocab=151936, seed=0):
    tokens, vocab = int(tokens), int(vocab)
    rng = np.random.default_rng(int(seed))
    weights = 1.0 / np.arange(1, vocab + 1)
    ranks = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(tokens)).clip(0, vocab - 1)
    ids = rng.permutation(vocab)[ranks].astype("<i4")
    ids.tofile(prefix + ".bin")
    with open(prefix + ".idx", "wb") as index:
        index.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 1, 2))
        index.write(struct.pack("<i", tokens) + struct.pack("<q", 0) + struct.pack("<qq", 0, 1))


main(*sys.argv[1:])
