"""Times heddle's attention kernels and PyTorch's flash and cuDNN backends on the same shapes, in the same way, in one run.

    python tests/peers/bench_attention.py --heddle build/heddle --preset bar --json ratios.json --svg attention.svg
    python tests/peers/bench_attention.py --heddle-json bar.json --preset bar       # heddle timed just before, in a process of its own

With --heddle the binary runs shape by shape, between the peers. Timing: 256 MiB are written before every call, CUDA events around it,
median of 10 to 50 calls; calls below a millisecond run inside a CUDA graph, so that PyTorch's host time does not count.
FLOP: 4 B H N N D forward, 2.5 times that backward, half of both when causal.

"bar" is the best of FlashAttention-2 and 3, cuDNN and Triton on another H200 (BAR below), scaled by what cuDNN reaches here over what it
reached there, and no less than cuDNN here. There, PyTorch's backward was timed without a graph: up to N 1024 its host time is in the figure,
so the forward's ratio scales those rows.
"""

import argparse
import json
import math
import statistics
import subprocess
import tempfile

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# (B, H, kv H, N, D): full mask (cuDNN forward, cuDNN backward, best forward, best backward), causal mask (the same). TFLOP/s in bf16.
BAR = {
    (4, 8, 8, 512, 64): ((164, 94, 164, 203), (78, 33, 78, 103)),
    (4, 8, 8, 1024, 64): ((311, 224, 314, 344), (168, 90, 189, 235)),
    (4, 8, 8, 2048, 64): ((421, 389, 421, 464), (281, 252, 334, 372)),
    (4, 8, 8, 4096, 64): ((462, 420, 473, 536), (378, 348, 434, 471)),
    (16, 32, 32, 1024, 64): ((423, 357, 423, 411), (337, 252, 337, 298)),
    (4, 32, 32, 4096, 64): ((454, 429, 504, 498), (416, 378, 434, 461)),
    (2, 32, 32, 8192, 64): ((455, 442, 516, 507), (430, 401, 444, 487)),
    (1, 32, 32, 16384, 64): ((459, 445, 517, 523), (450, 428, 486, 511)),
    (16, 16, 16, 1024, 128): ((568, 441, 568, 441), (422, 315, 485, 354)),
    (4, 16, 16, 4096, 128): ((599, 541, 599, 541), (519, 453, 677, 501)),
    (2, 16, 16, 8192, 128): ((612, 521, 612, 521), (540, 481, 634, 518)),
    (1, 16, 16, 16384, 128): ((623, 535, 623, 535), (594, 517, 627, 581)),
    (4, 8, 8, 512, 128): ((263, 166, 263, 185), (123, 49, 127, 128)),
    (4, 8, 8, 1024, 128): ((484, 381, 484, 381), (246, 187, 304, 290)),
    (4, 8, 8, 2048, 128): ((605, 456, 605, 456), (396, 334, 534, 440)),
    (4, 8, 8, 4096, 128): ((611, 518, 611, 518), (512, 398, 664, 519)),
    (2, 32, 8, 4096, 128): (None, (535, 437, 657, 486)),
    (1, 64, 8, 8192, 128): ((608, 524, 608, 524), (553, 480, 697, 542)),
}
PRESETS = {
    "articles": [shape for shape in BAR if shape[1] == 8 and shape[4] == 64],
    "long": [shape for shape in BAR if shape[0] * shape[3] == 16384 and shape[1] * shape[4] == 2048 and shape[1] == shape[2]],
    "bar": list(BAR),
}
BACKENDS = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
PASSES = ("fwd", "bwd")
GRAPH_BELOW = 1e-3  # seconds
BUDGET = 0.1


def shapes_of(preset):
    """((B, H, kv H, N, D), causal) for every row of a preset."""
    return [(shape, causal) for shape in PRESETS[preset] for causal in (False, True) if BAR[shape][causal]]


def flop(shape, causal, which):
    B, H, _, N, D = shape
    return 4 * B * H * N * N * D * (0.5 if causal else 1) * (2.5 if which == "bwd" else 1)


class Timer:
    """Median seconds of a call with a cold L2 cache."""

    def __init__(self):
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def enqueue(self, call, runs, external):
        events = [[torch.cuda.Event(enable_timing=True, external=external) for _ in range(2)] for _ in range(runs)]
        for start, stop in events:
            self.flush.zero_()
            start.record()
            call()
            stop.record()
        return events

    def median(self, call):
        def seconds(events):
            torch.cuda.synchronize()
            return [start.elapsed_time(stop) / 1e3 for start, stop in events]

        self.enqueue(call, 2, external=False)
        estimate = min(seconds(self.enqueue(call, 3, external=False)))
        runs = int(min(max(BUDGET / estimate, 10), 50))
        if estimate >= GRAPH_BELOW:
            return statistics.median(seconds(self.enqueue(call, runs, external=False)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            events = self.enqueue(call, runs, external=True)
        graph.replay()
        return statistics.median(seconds(events))


def time_backend(timer, backend, shape, causal):
    """TFLOP/s of both passes; None where PyTorch has no such kernel."""
    B, H, Hkv, N, D = shape
    new = lambda heads: torch.randn(B, heads, N, D, device="cuda", dtype=torch.bfloat16)
    q, k, v, grad = new(H).requires_grad_(), new(Hkv).requires_grad_(), new(Hkv).requires_grad_(), new(H)
    forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=H != Hkv)
    try:
        with sdpa_kernel(backend):
            with torch.no_grad():
                fwd = timer.median(forward)
            out = forward()
            bwd = timer.median(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    except RuntimeError as error:
        print(f"{backend}: {str(error).splitlines()[0]}")
        return dict.fromkeys(PASSES)
    return {which: flop(shape, causal, which) / seconds / 1e12 for which, seconds in zip(PASSES, (fwd, bwd))}


def heddle_results(document):
    """The fastest variant's TFLOP/s of each (shape, causal), pass."""
    best = {}
    for r in document["results"]:
        key = (r["batch"], r["heads"], r["kv_heads"], r["seq"], r["head_dim"]), r["causal"], r["pass"]
        if key not in best or r["tflops"] > best[key][0]:
            best[key] = r["tflops"], r["kernel"]
    return best


def scaled_bar(shape, causal, which, cudnn):
    """The bar on this machine; cudnn is TFLOP/s of both passes here."""
    if not cudnn[which]:
        return None
    row, i = BAR[shape][causal], PASSES.index(which)
    thermometer = "fwd" if shape[3] <= 1024 and cudnn["fwd"] else which
    return max(row[2 + i] * cudnn[thermometer] / row[PASSES.index(thermometer)] if row[2 + i] > row[i] else 0, cudnn[which])


def run_heddle(binary, kernel, shape, causal):
    names = ("batch", "heads", "kv-heads", "seq", "head-dim")
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [binary, "bench-attention", "--device", "cuda", "--ceiling", "1", "--json", out.name, "--kernel", kernel]
        command += [part for name, value in zip(names, shape) for part in (f"--{name}", str(value))] + ["--causal"] * causal
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            print(done.stdout[-500:], done.stderr, sep="")
            return {}
        return heddle_results(json.load(open(out.name)))


def ratio(a, b):
    return a / b if a and b else None


def text(value, digits=0):
    return "-" if value is None else f"{value:.{digits}f}"


def measure(a):
    """One dictionary a row and pass."""
    timer = Timer()
    ours = heddle_results(json.load(open(a.heddle_json))) if a.heddle_json else {}
    rows = []
    print(f"{'B':>2} {'H':>3} {'Hkv':>3} {'N':>5} {'D':>3} {'mask':6} pass | {'heddle':>6} {'FA2':>5} {'cuDNN':>5} {'bar':>5} | heddle over "
          f"{'FA2':>5} {'cuDNN':>5} {'bar':>5}  kernel", flush=True)
    for shape, causal in shapes_of(a.preset):
        if a.heddle:
            ours |= run_heddle(a.heddle, a.kernel, shape, causal)
        peers = {name: time_backend(timer, backend, shape, causal) for name, backend in BACKENDS.items()}
        for which in PASSES:
            heddle, kernel = ours.get((shape, causal, which), (None, "-"))
            fa2, cudnn = peers["FA2"][which], peers["cuDNN"][which]
            scaled = scaled_bar(shape, causal, which, peers["cuDNN"])
            row = dict(zip(("B", "H", "Hkv", "N", "D"), shape), causal=causal, which=which, kernel=kernel, heddle=heddle, FA2=fa2, cuDNN=cudnn, bar=scaled)
            rows.append(row)
            over = [ratio(heddle, row[name]) for name in ("FA2", "cuDNN", "bar")]
            print(f"{row['B']:2} {row['H']:3} {row['Hkv']:3} {row['N']:5} {row['D']:3} {'causal' if causal else 'full':6} {which:4} | "
                  f"{text(heddle):>6} {text(fa2):>5} {text(cudnn):>5} {text(scaled):>5} |             "
                  + " ".join(f"{text(r, 2):>5}" for r in over) + f"  {kernel}", flush=True)
    return rows


def summarise(rows):
    for which in PASSES:
        for name in ("FA2", "cuDNN", "bar"):
            ratios = [row["heddle"] / row[name] for row in rows if row["which"] == which and row["heddle"] and row[name]]
            if ratios:
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                print(f"{which} over {name:5}: geometric mean {mean:.3f}, least {min(ratios):.3f}, at least 1 in {sum(r >= 1 for r in ratios)} of {len(ratios)} rows")


COLOURS = {"heddle": "#c0392b", "cuDNN": "#2e7d32", "FA2": "#1565c0", "bar": "#777777"}
LABELS = {"heddle": "heddle", "cuDNN": "cuDNN (PyTorch)", "FA2": "FlashAttention-2 (PyTorch)", "bar": "best known kernel"}
PANEL, GAP, LEFT, TOP = (210, 150), (18, 44), 58, 70


def panel(rows, x, y, title, most):
    """One chart: TFLOP/s against N on a logarithmic axis."""
    (width, height), lengths = PANEL, sorted({row["N"] for row in rows})
    place = lambda N: x + 8 + (width - 16) * lengths.index(N) / max(len(lengths) - 1, 1)
    level = lambda value: y + height - height * value / most
    out = [f'<text x="{x}" y="{y - 6}" font-weight="bold">{title}</text>',
           f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" stroke="#bbb"/>']
    for value in range(200, most, 200):
        out.append(f'<line x1="{x}" x2="{x + width}" y1="{level(value):.1f}" y2="{level(value):.1f}" stroke="#e4e4e4"/>')
    for N in lengths:
        out.append(f'<text x="{place(N):.1f}" y="{y + height + 14}" text-anchor="middle">{N if N < 1024 else f"{N // 1024}k"}</text>')
    for name in ("bar", "FA2", "cuDNN", "heddle"):
        points = [(place(row["N"]), level(row[name])) for row in sorted(rows, key=lambda row: row["N"]) if row[name]]
        if points:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            style = 'stroke-dasharray="4 3"' if name == "bar" else ""
            out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="{2.5 if name == "heddle" else 1.5}" {style}/>')
            out += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{COLOURS[name]}"/>' for px, py in points if name != "bar"]
    return out


def draw(rows, path):
    """The rows of the preset long: a column a head size and mask, a row a pass."""
    rows = [row for row in rows if tuple(row[name] for name in ("B", "H", "Hkv", "N", "D")) in PRESETS["long"]]
    columns = [(D, causal) for D in (64, 128) for causal in (False, True)]
    most = 800
    width = LEFT + len(columns) * (PANEL[0] + GAP[0])
    height = TOP + len(PASSES) * (PANEL[1] + GAP[1])
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
           f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="{LEFT}" y="18" font-size="13" font-weight="bold">Attention on one {torch.cuda.get_device_name()}: TFLOP/s against sequence '
           f'length</text>']
    x = LEFT
    for name, label in LABELS.items():
        dash = 'stroke-dasharray="4 3"' if name == "bar" else ""
        out.append(f'<line x1="{x}" x2="{x + 22}" y1="34" y2="34" stroke="{COLOURS[name]}" stroke-width="{2.5 if name == "heddle" else 1.5}" {dash}/>')
        out.append(f'<text x="{x + 28}" y="38">{label}</text>')
        x += 50 + 6 * len(label)
    out.append(f'<text x="{width - GAP[0]}" y="38" text-anchor="end" fill="#555">bfloat16, 16384 tokens, 2048 columns</text>')
    for j, which in enumerate(PASSES):
        y = TOP + j * (PANEL[1] + GAP[1])
        middle = y + PANEL[1] / 2
        out.append(f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">TFLOP/s</text>')
        for value in range(0, most, 200):
            out.append(f'<text x="{LEFT - 6}" y="{y + PANEL[1] - PANEL[1] * value / most + 4:.1f}" text-anchor="end">{value}</text>')
        for i, (D, causal) in enumerate(columns):
            chosen = [row for row in rows if (row["D"], row["causal"], row["which"]) == (D, causal, which)]
            title = f"{'forward' if which == 'fwd' else 'backward'}, D {D}, {'causal' if causal else 'full'}"
            out += panel(chosen, LEFT + i * (PANEL[0] + GAP[0]), y, title, most)
    with open(path, "w") as file:
        file.write("\n".join(out + ["</svg>"]) + "\n")


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = p.add_mutually_exclusive_group()
    source.add_argument("--heddle", help="the heddle program, run shape by shape")
    source.add_argument("--heddle-json", help="what heddle bench-attention --json wrote")
    p.add_argument("--kernel", default="all", help="heddle's variant; all takes the fastest of each row")
    p.add_argument("--preset", choices=PRESETS, default="bar")
    p.add_argument("--json", help="write the rows to this file")
    p.add_argument("--svg", help="draw the rows of the preset long")
    return p.parse_args()


def main():
    a = parse_arguments()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}; TFLOP/s")
    with torch.cuda.stream(torch.cuda.Stream()):
        rows = measure(a)
    summarise(rows)
    if a.json:
        with open(a.json, "w") as file:
            json.dump(rows, file, indent=1)
    if a.svg:
        draw(rows, a.svg)


if __name__ == "__main__":
    main()
