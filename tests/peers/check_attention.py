"""Checks `heddle attention --device cuda` against PyTorch in float64, for masks, groups, lengths and both head sizes.

Usage: check_attention.py PATH/TO/heddle. The bound is twice the error of the same attention computed by PyTorch in the
input's dtype, plus one rounding step of the largest output."""

import itertools
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file


def attention(q, k, v, causal):
    """softmax(q k^T / sqrt(D)) v and its log-sum-exp in q's dtype; [B, S, H, D]; causal is bottom-right aligned."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[1])
        scores = scores.masked_fill(~visible, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)  # a row that sees no key gives 0
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), torch.logsumexp(scores, -1)


def main():
    torch.manual_seed(7)
    failed = 0
    lengths = [(1, 1), (64, 128), (239, 1), (799, 3), (113, 203), (130, 200), (1023, 1024), (1024, 1023), (2000, 4000)]
    for (sq, sk), d, causal, dtype in itertools.product(lengths, (64, 128), (False, True), (torch.bfloat16, torch.float16)):
        q = torch.randn(2, sq, 6, d).to(dtype)
        k, v = (torch.randn(2, sk, 2, d).to(dtype) for _ in range(2))
        with tempfile.TemporaryDirectory() as folder:
            save_file({"q": q, "k": k, "v": v}, folder + "/in.safetensors")
            command = [sys.argv[1], "attention", "--device", "cuda", "--kernel", "sm90", "--input", folder + "/in.safetensors"]
            subprocess.run(command + ["--output", folder + "/out.safetensors"] + ["--causal"] * causal, check=True, stdout=subprocess.DEVNULL)
            result = load_file(folder + "/out.safetensors")
        exact, lse = attention(q.double(), k.double(), v.double(), causal)
        same_dtype = attention(q.cuda(), k.cuda(), v.cuda(), causal)[0].cpu().double()
        bound = 2 * (same_dtype - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
        error = (result["o"].double() - exact).abs().max()
        lse_error = (result["lse"].double() - lse).abs().nan_to_num(0.0).max()
        is_ok = bool(error <= bound and lse_error < 1e-4 and torch.equal(result["lse"].isinf(), lse.isinf()))
        failed += not is_ok
        if not is_ok:
            print(f"FAILED {sq}x{sk} D{d} causal={causal} {dtype}: error {error:.2e}, bound {bound:.2e}, lse {lse_error:.2e}")
    print(f"attention on cuda: {len(lengths) * 8 - failed} passed, {failed} failed")
    return failed > 0


sys.exit(main())
