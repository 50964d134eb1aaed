"""Kernels of a trace by total time: trace_top.py TRACE.json [N]. CSV: kernel, calls, ms, share of all kernels' time.

The last line is PASS, or FAIL where the GPU idles more than 2 % of the time from the first kernel to the last.
"""
import collections
import json
import sys


def main(path, count=25):
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"])
    if not kernels:
        sys.exit("FAIL no kernel in the trace  next: trace a step on a GPU ([log] trace)")
    total, calls = collections.Counter(), collections.Counter()
    busy, waits, gap, last, longest = 0, 0, 0, kernels[0]["ts"], ""
    for event in kernels:
        name, end = event["name"][:110], event["ts"] + event["dur"]
        total[name] += event["dur"] / 1e3
        calls[name] += 1
        waits += max(0, event["ts"] - last) / 1e3 if event["ts"] - last > 8 else 0
        if event["ts"] - last > gap:
            gap, longest = event["ts"] - last, name
        busy += max(0, end - max(last, event["ts"])) / 1e3
        last = max(last, end)
    span, sum_of_all = (last - kernels[0]["ts"]) / 1e3, sum(total.values())
    idle = 100 * (1 - busy / span)
    print("kernel,calls,ms,share")
    for name, ms in total.most_common(int(count)):
        print(f'"{name}",{calls[name]},{ms:.3f},{ms / sum_of_all:.3f}')
    text = f"{sum_of_all:.1f} ms of kernels in {span:.1f} ms, idle {idle:.1f} % ({100 * waits / span:.1f} in gaps of over 8 us)"
    if idle > 2:
        sys.exit(f"FAIL {text}, longest gap {gap / 1e3:.2f} ms before {longest}  next: open {path} in ui.perfetto.dev")
    print(f"PASS {text}")


main(*sys.argv[1:])
