"""Times a training step of GPT-2 models in PyTorch, eager and compiled, and in heddle, in one run on one GPU.

    python tests/peers/bench_train.py --heddle build/heddle --models tiny gpt2_124M --json train.json

Step: forward and backward in bfloat16 (PyTorch: autocast), clip to norm 1, AdamW with float32 weights (PyTorch: fused). Every line is the
median of --steps steps after a warm-up. heddle runs before and after PyTorch, with plain steps and with train.cuda_graph; the ratio
takes the better reading of each.
Model FLOP: 6 a parameter and token, and 6 layers T width for attention under a causal mask.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).parents[2]


@dataclass
class Model:
    layers: int
    width: int
    heads: int
    seq: int
    batch: int
    vocab: int


MODELS = {
    "tiny": Model(layers=4, width=256, heads=8, seq=256, batch=64, vocab=256),
    "gpt2_124M": Model(layers=12, width=768, heads=12, seq=1024, batch=32, vocab=50304),
    "gpt2_774M": Model(layers=36, width=1280, heads=20, seq=1024, batch=16, vocab=50304),
}

HEDDLE_RUNS = {"heddle": [], "graph": ["--set", "train.cuda_graph=true"]}

CONFIG = """
model: {{architecture: gpt2, vocab_size: {vocab}, hidden_size: {width}, num_hidden_layers: {layers}, num_attention_heads: {heads},
         max_position_embeddings: {seq}}}
data: {{source: text, files: ["**/*.h", "**/*.cpp", "**/*.md"], sequence_length: {seq}}}
train: {{max_steps: 1, micro_batch_size: {batch}, learning_rate: 1e-4, precision: bf16}}
device: cuda
"""


class Block(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.heads = m.heads
        self.norm1, self.norm2 = nn.LayerNorm(m.width), nn.LayerNorm(m.width)
        self.qkv, self.proj = nn.Linear(m.width, 3 * m.width), nn.Linear(m.width, m.width)
        self.up, self.down = nn.Linear(m.width, 4 * m.width), nn.Linear(4 * m.width, m.width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(m.vocab, m.width), nn.Embedding(m.seq, m.width)
        self.blocks = nn.ModuleList(Block(m) for _ in range(m.layers))
        self.norm = nn.LayerNorm(m.width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)  # the head is the embedding
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def flop_per_token(m):
    parameters = sum(p.numel() for p in Gpt2(m).parameters())
    return 6 * parameters + 6 * m.layers * m.seq * m.width


def time_torch(m, mode, steps, warmup):
    """Median seconds of a step, and GiB at the peak."""
    torch.manual_seed(0)
    model = Gpt2(m).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    call = torch.compile(model) if mode == "compile" else model
    ids, labels = (torch.randint(m.vocab, (m.batch, m.seq), device="cuda") for _ in range(2))

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = call(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), torch.cuda.max_memory_allocated() / 2**30


def time_heddle(binary, m, steps, warmup, settings):
    with tempfile.TemporaryDirectory() as folder:
        config, out = Path(folder, "bench.yaml"), Path(folder, "out.json")
        config.write_text(CONFIG.format(**vars(m)))
        command = [binary, "bench-train", str(config), "--steps", str(steps), "--warmup", str(warmup), "--json", str(out), *settings]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode != 0:
            print(done.stdout[-500:], done.stderr, sep="")
            return None
        result = json.loads(out.read_text())
        return result["step_ms"] / 1e3, result["peak_gib"]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--heddle", help="the heddle program")
    p.add_argument("--models", nargs="+", choices=MODELS, default=["tiny", "gpt2_124M"])
    p.add_argument("--modes", nargs="*", choices=["eager", "compile"], default=["eager", "compile"])
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--warmup", type=int, default=5)
    p.add_argument("--json", help="write the lines to this file")
    a = p.parse_args()
    heddle = str(Path(a.heddle).resolve()) if a.heddle else None
    torch.set_float32_matmul_precision("high")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    lines = []
    for name in a.models:
        m = MODELS[name]
        ours = [(who, lambda s=settings: time_heddle(heddle, m, a.steps, a.warmup, s)) for who, settings in HEDDLE_RUNS.items() if heddle]
        peers = [(mode, lambda mode=mode: time_torch(m, mode, a.steps, a.warmup)) for mode in a.modes]
        for who, run in ours + peers + ours:
            result = run()
            torch.cuda.empty_cache()
            if result is None:
                continue
            seconds, peak = result
            tokens = m.batch * m.seq / seconds
            lines.append(dict(model=name, who=who, step_ms=1e3 * seconds, tokens_per_second=tokens, model_tflops=tokens * flop_per_token(m) / 1e12, peak_gib=peak))
            print(f"{name:10} {who:8} {1e3 * seconds:9.3f} ms/step {tokens:12,.0f} tokens/s {lines[-1]['model_tflops']:7.1f} TFLOP/s {peak:7.2f} GiB", flush=True)
    for name in a.models:
        speed = {who: max((x["tokens_per_second"] for x in lines if (x["model"], x["who"]) == (name, who)), default=None) for who in (*HEDDLE_RUNS, *a.modes)}
        for who in HEDDLE_RUNS:
            for mode in a.modes:
                if speed[who] and speed[mode]:
                    print(f"{name}: {who} over {mode} {speed[who] / speed[mode]:.3f}")
    if a.json:
        Path(a.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
