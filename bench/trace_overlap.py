"""How much of a rank's communication its kernels hide: trace_overlap.py TRACE.json [OUT.svg [MILLISECONDS]].

Prints the time that communication kernels (NCCL) and peer copies run, and the share of it under which other
kernels run too. Draws a piece of the middle of the step: a row for each stream, communication in red.
"""
import json
import sys


def is_communication(event):
    return "nccl" in event["name"].lower()


def merged(intervals):
    out = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([begin, end])
    return out


def length(intervals):
    return sum(end - begin for begin, end in intervals)


def intersection(a, b):
    out, j = 0.0, 0
    for begin, end in a:
        while j < len(b) and b[j][1] <= begin:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            out += min(end, b[k][1]) - max(begin, b[k][0])
            k += 1
    return out


def draw(events, path, milliseconds):
    first, last = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)
    begin = (first + last) / 2
    end = begin + 1e3 * milliseconds
    shown = [e for e in events if e["ts"] < end and e["ts"] + e["dur"] > begin]
    streams = sorted({e["args"].get("stream", 0) for e in shown},
                     key=lambda s: (any(is_communication(e) for e in shown if e["args"].get("stream", 0) == s), s))
    width, row, left = 1400, 36, 130
    scale = (width - left - 10) / (end - begin)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{row * len(streams) + 40}" '
           'font-family="sans-serif" font-size="12">', '<rect width="100%" height="100%" fill="white"/>']
    for i, stream in enumerate(streams):
        y = 8 + row * i
        out.append(f'<text x="6" y="{y + 20}">stream {stream}</text>')
        for e in shown:
            if e["args"].get("stream", 0) != stream:
                continue
            x = left + scale * max(0, e["ts"] - begin)
            w = max(0.4, scale * (min(end, e["ts"] + e["dur"]) - max(begin, e["ts"])))
            colour = "#c0392b" if is_communication(e) else "#2c7fb8"
            name = e["name"][:80].replace("&", "&amp;").replace("<", "&lt;")
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{row - 8}" fill="{colour}">'
                       f'<title>{name} {e["dur"]:.0f} µs</title></rect>')
    y = row * len(streams) + 30
    out.append(f'<text x="{left}" y="{y}">{milliseconds} ms of a step; red: communication, blue: all other kernels</text></svg>')
    with open(path, "w") as file:
        file.write("\n".join(out))


def main(trace, picture=None, milliseconds=12):
    with open(trace) as file:
        events = json.load(file)["traceEvents"]
    events = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = lambda wanted: merged((e["ts"], e["ts"] + e["dur"]) for e in events if is_communication(e) == wanted)
    communication, compute = spans(True), spans(False)
    if not communication:
        sys.exit("FAIL no communication in the trace  next: trace a step of several ranks ([log] trace)")
    whole = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
    hidden = intersection(communication, compute)
    print(f"step {whole / 1e3:.1f} ms; compute {length(compute) / 1e3:.1f} ms; communication "
          f"{length(communication) / 1e3:.1f} ms, of it under compute {hidden / 1e3:.1f} ms; neither "
          f"{(whole - length(merged([*map(tuple, communication), *map(tuple, compute)]))) / 1e3:.1f} ms")
    if picture:
        draw(events, picture, float(milliseconds))
    print(f"PASS {100 * hidden / length(communication):.0f} % of the communication is hidden")


main(*sys.argv[1:])
