"""Binary seeds, written to the folder that is given: FOLDER/corpus, FOLDER/documents."""
import gzip
import struct
import sys
from pathlib import Path

FORMATS = {1: "B", 4: "i", 5: "q", 8: "H"}  # Megatron's dtype codes


def corpus(code, sequences, documents, info):
    """PREFIX.json, .idx and .bin of `sequences`, of which those in `documents` begin a document."""
    tokens = [token for sequence in sequences for token in sequence]
    width = struct.calcsize(FORMATS[code])
    offsets, at = [], 0
    for sequence in sequences:
        offsets.append(at)
        at += len(sequence) * width
    indices = [*documents, len(sequences)]
    idx = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(indices))
    idx += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    idx += struct.pack(f"<{len(sequences)}q{len(indices)}q", *offsets, *indices)
    return b"\n----\n".join([info.encode(), idx, struct.pack(f"<{len(tokens)}{FORMATS[code]}", *tokens)])


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def main(folder):
    three = [[1, 2, 3], [], [256]]
    info = ('{"tokenizer": "bytes", "tokenizer_hash": "bytes", "vocab_size": %d, "end_of_document": 256, '
            '"documents": 3, "tokens": 4}')
    write(folder / "corpus/uint16", corpus(8, three, [0, 1, 2], info % 257))
    write(folder / "corpus/int32", corpus(4, three, [0, 1, 2], info % 100000))
    write(folder / "corpus/foreign", corpus(5, [[5, 6], [7]], [0], ""))
    write(folder / "corpus/bytes", corpus(1, [[255] * 9] * 4, [0, 2], ""))
    write(folder / "corpus/empty", corpus(8, [], [], ""))
    lines = b'{"text": "one"}\n{"text": "two, which is longer"}\n' * 4
    write(folder / "documents/lines.gz", b"\x03" + gzip.compress(lines, mtime=0))
    write(folder / "documents/members.gz", b"\x02" + gzip.compress(b"one", mtime=0) + gzip.compress(b"two", mtime=0))
    # Frames of uncompressed, repeated and no blocks (RFC 8878), one after another, with small windows: one of 2 GiB
    # is taken, but its memory takes the sanitizer 0.1 s.
    raw = struct.pack("<I", len(lines) << 3 | 1)[:3] + lines
    repeated = struct.pack("<I", 1000 << 3 | 2 | 1)[:3] + b"x"
    magic = b"\x28\xb5\x2f\xfd"
    write(folder / "documents/lines.zst", b"\x05" + magic + b"\x00\x00" + raw)
    write(folder / "documents/frames.zst", b"\x04" + magic + b"\x00\x58" + repeated + b"\x50\x2a\x4d\x18\x01\0\0\0s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
