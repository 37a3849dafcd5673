"""Time of PyTorch's scaled_dot_product_attention, forward + backward, on the CPU.

    python tests/peers/bench_torch_attention.py --batch 1 --heads 8 --seq 2048 --head-dim 64 --causal --threads 2

One line of JSON: medians, and the quartiles of forward + backward. Useful work is 4*B*H*Sq*Sk*D FLOP for the forward,
2.5 times that for the backward, half of both when causal.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 1), ("heads", 8), ("kv-heads", None), ("seq", 2048), ("head-dim", 64),
                          ("threads", 2), ("repeats", 20), ("warmup", 3)):
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--causal", action="store_true")
    p.add_argument("--dtype", choices=["float32", "float64", "bfloat16", "float16"], default="float32")
    return p.parse_args()


def main():
    a = parse_arguments()
    kv_heads = a.kv_heads or a.heads
    torch.set_num_threads(a.threads)
    generator = torch.Generator().manual_seed(0)

    def random(heads):
        x = torch.randn(a.batch, heads, a.seq, a.head_dim, generator=generator)
        return x.to(getattr(torch, a.dtype)).requires_grad_()

    q, k, v, do = random(a.heads), random(kv_heads), random(kv_heads), random(a.heads).detach()
    forward, total = [], []
    for _ in range(a.warmup + a.repeats):
        q.grad = k.grad = v.grad = None
        start = time.perf_counter()
        o = F.scaled_dot_product_attention(q, k, v, is_causal=a.causal, enable_gqa=kv_heads != a.heads)
        forward.append(time.perf_counter() - start)
        o.backward(do)
        total.append(time.perf_counter() - start)
    forward, total = forward[a.warmup:], total[a.warmup:]

    median = statistics.median(total)
    low, _, high = statistics.quantiles(total, n=4)
    flop = 3.5 * 4 * a.batch * a.heads * a.seq**2 * a.head_dim * (0.5 if a.causal else 1)
    print(json.dumps(dict(
        forward_ms=round(1e3 * statistics.median(forward), 2), forward_backward_ms=round(1e3 * median, 2),
        quartiles_ms=[round(1e3 * low, 2), round(1e3 * high, 2)], gflop_per_second=round(flop / median / 1e9, 1),
        torch=torch.__version__, **vars(a))))


if __name__ == "__main__":
    main()
