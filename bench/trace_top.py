"""Kernels of a trace by total time: trace_top.py TRACE.json [N]. CSV: kernel, calls, ms, share."""
import collections
import json
import sys


def main(path, count=25):
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        sys.exit("FAIL no kernel in the trace  next: trace a step on a GPU ([log] trace)")
    total, calls = collections.Counter(), collections.Counter()
    for event in kernels:
        total[event["name"][:110]] += event["dur"] / 1e3
        calls[event["name"][:110]] += 1
    span = (max(e["ts"] + e["dur"] for e in kernels) - min(e["ts"] for e in kernels)) / 1e3
    busy = sum(total.values())
    print("kernel,calls,ms,share")
    for name, ms in total.most_common(int(count)):
        print(f'"{name}",{calls[name]},{ms:.3f},{ms / busy:.3f}')
    print(f"PASS {busy:.1f} ms of kernels in {span:.1f} ms, idle {100 * (1 - busy / span):.1f} %")


main(*sys.argv[1:])
