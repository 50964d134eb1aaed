"""Megatron's indexed dataset by numpy alone: an independent reader and writer for the tests.

corpus_format.py check PREFIX DOCUMENTS DTYPE   DOCUMENTS: JSON, a list of tokens per document
corpus_format.py write PREFIX DOCUMENTS DTYPE   DOCUMENTS: JSON, a list of sequences per document
"""

import json
import struct
import sys

import numpy as np

CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def read(prefix):
    """The tokens of each document, and the dtype."""
    with open(prefix + ".idx", "rb") as file:
        assert file.read(9) == b"MMIDIDX\x00\x00"
        assert struct.unpack("<Q", file.read(8)) == (1,)
        dtype = CODES[struct.unpack("<B", file.read(1))[0]]
        sequences, indices = struct.unpack("<QQ", file.read(16))
        lengths = np.frombuffer(file.read(4 * sequences), dtype=np.int32)
        pointers = np.frombuffer(file.read(8 * sequences), dtype=np.int64)
        documents = np.frombuffer(file.read(8 * indices), dtype=np.int64)
        assert file.read() == b""
    data = np.fromfile(prefix + ".bin", dtype=dtype)
    size = np.dtype(dtype).itemsize
    parts = [data[p // size : p // size + n].tolist() for p, n in zip(pointers, lengths)]
    assert documents[0] == 0 and documents[-1] == sequences
    assert sum(lengths) == len(data)
    return [sum(parts[a:b], []) for a, b in zip(documents, documents[1:])], dtype


def write(prefix, documents, dtype):
    sequences = [s for document in documents for s in document]
    lengths = np.array([len(s) for s in sequences], dtype=np.int32)
    size = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64) * size])
    indices = np.concatenate([[0], np.cumsum([len(d) for d in documents])])
    code = next(code for code, kind in CODES.items() if kind is dtype)
    with open(prefix + ".bin", "wb") as file:
        for sequence in sequences:
            file.write(np.array(sequence, dtype=dtype).tobytes())
    with open(prefix + ".idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00")
        file.write(struct.pack("<QBQQ", 1, code, len(sequences), len(indices)))
        file.write(lengths.tobytes())
        file.write(pointers.astype(np.int64).tobytes())
        file.write(indices.astype(np.int64).tobytes())


def main():
    action, prefix, documents, dtype = sys.argv[1:]
    documents, dtype = json.loads(documents), getattr(np, dtype)
    if action == "write":
        write(prefix, documents, dtype)
    else:
        found = read(prefix)
        if found != (documents, dtype):
            sys.exit(f"{prefix}: expected {documents} as {dtype}, found {found}")


if __name__ == "__main__":
    main()
