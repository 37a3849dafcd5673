"""Training speed of configs/tiny.yaml's model in PyTorch eager on the CPU, in float32: the peer of `heddle train`.

    python tests/peers/bench_torch_train.py --threads 2
    python tests/peers/bench_torch_train.py --threads 2 --architecture llama --kv-heads 2

Every step is forward, backward, clip to norm 1 and AdamW. All implementations of AdamW that PyTorch has are timed, in
turn, on the same model; one line of JSON an implementation, then one for the fastest.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import reference_model as ref

OPTIMIZERS = {"loop": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--architecture", choices=["gpt2", "llama"], default="gpt2")
    for name, default in (("vocab", 256), ("hidden", 128), ("layers", 4), ("heads", 4), ("kv-heads", 4),
                          ("intermediate", 512), ("seq", 128), ("batch", 16), ("threads", 2), ("steps", 30),
                          ("warmup", 5)):
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--untied", action="store_true", help="a head of its own instead of the embedding")
    return p.parse_args()


def time_steps(a, optimizer_options):
    """Seconds of each step after the warm-up."""
    config = ref.Config(
        architecture=a.architecture, vocab_size=a.vocab, hidden_size=a.hidden, num_hidden_layers=a.layers,
        num_attention_heads=a.heads, num_key_value_heads=a.kv_heads, intermediate_size=a.intermediate,
        max_position_embeddings=a.seq, tie_word_embeddings=not a.untied)
    model = ref.initialise(ref.CausalLM(config), seed=1, std=0.02)
    optimizer = torch.optim.AdamW(ref.adamw_groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95), **optimizer_options)
    generator = torch.Generator().manual_seed(2)
    seconds = []
    for _ in range(a.warmup + a.steps):
        tokens = torch.randint(a.vocab, (a.batch, a.seq + 1), generator=generator)
        start = time.perf_counter()
        loss = ref.loss_sum(model, tokens[:, :-1], tokens[:, 1:]) / (a.batch * a.seq)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - start)
    return seconds[a.warmup:]


def main():
    a = parse_arguments()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    best = None
    for name, options in OPTIMIZERS.items():
        seconds = time_steps(a, options)
        result = dict(optimizer=name, tokens_per_second=round(a.batch * a.seq / statistics.median(seconds)),
                      step_ms=round(1e3 * statistics.median(seconds), 2), step_ms_min=round(1e3 * min(seconds), 2),
                      step_ms_max=round(1e3 * max(seconds), 2))
        print(json.dumps(result), flush=True)
        if best is None or result["tokens_per_second"] > best["tokens_per_second"]:
            best = result
    print(json.dumps(dict(fastest=best, torch=torch.__version__, **vars(a))))


if __name__ == "__main__":
    main()
