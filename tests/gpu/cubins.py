"""cubins.py BINARY: fails unless it holds machine code for Hopper (sm_90) and Blackwell (sm_100), and no PTX.

Reads what nvcc embeds, as `cuobjdump --list-elf` does: a fat binary is a header (magic number, version, size of the
header, size of what follows) and entries, each with a header: kind (1 PTX, 2 machine code), its own size, the payload's,
and at byte 28 the compute capability.
"""
import collections
import mmap
import struct
import sys

MAGIC, PTX, CODE, WANTED = b"\x50\xed\x55\xba\x01\x00", 1, 2, (90, 100)


def entries(data):
    start = data.find(MAGIC)
    while start >= 0:
        header, size = struct.unpack_from("<HQ", data, start + 6)
        at, end = start + header, start + header + size
        while at < end:
            kind, _, own, payload = struct.unpack_from("<HHIQ", data, at)
            capability, = struct.unpack_from("<I", data, at + 28)
            yield kind, capability, payload
            at += own + payload
        start = data.find(MAGIC, end)


def main(path):
    count, size = collections.Counter(), collections.Counter()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for kind, capability, payload in entries(data):
            count[kind, capability] += 1
            size[kind, capability] += payload
    found = ", ".join(f"{count[key]} {'PTX' if key[0] == PTX else 'machine code'} sm_{key[1]} ({size[key] >> 10} KiB)"
                      for key in sorted(count))
    if set(count) != {(CODE, capability) for capability in WANTED}:
        sys.exit(f"FAIL {path} has {found or 'no device code'}; wanted machine code for sm_90 and sm_100 alone  "
                 "next: CUDA_ARCHITECTURES in CMakeLists.txt")
    print(f"PASS {path}: {found}")


main(*sys.argv[1:])
