"""Writes the PyTorch reference numbers in this folder; README.md describes the files.

    python -m pip install torch numpy safetensors transformers
    python make_reference.py            # all files; or: make_reference.py train modules ops

Everything is computed on the CPU with one thread and fixed seeds. transformers is optional: with it, the models of
reference_model.py are first checked against its GPT-2, Llama and Qwen3.

Training step i (0-based), in this order:
  1. loss = sum of the token losses / number of labels that are not -100; gradients of that loss
  2. norm = square root of the sum of the squares of all gradients; every gradient is multiplied by
     min(1, max_grad_norm / (norm + 1e-6))                                       (torch.nn.utils.clip_grad_norm_)
  3. lr = learning_rate(i, ...), see reference_model.py
  4. AdamW with t = i + 1 (torch.optim.AdamW):
       p *= 1 - lr * weight_decay         only for tensors of two or more dimensions
       m  = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2
       p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
"""

import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import reference_model as ref

FOLDER = Path(__file__).parent
TRAIN = dict(max_steps=20, learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=4, lr_scheduler_type="cosine",
             beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0, clip_eps=1e-6)
MODELS = {"gpt2": ref.Config(),
          "llama": ref.Config(architecture="llama", num_key_value_heads=2, intermediate_size=80,
                              tie_word_embeddings=False)}


def save(name, tensors, **facts):
    """One metadata key, `reference`, holds all facts as JSON: the library writes several keys in random order."""
    facts = dict(python=platform.python_version(), torch=torch.__version__) | facts
    save_file({k: t.detach().clone().contiguous() for k, t in tensors.items()}, FOLDER / name,
              {"reference": json.dumps(facts)})
    (FOLDER / name).chmod(0o644)
    print(f"{name}: {len(tensors)} tensors, {(FOLDER / name).stat().st_size} bytes")


# Training


def make_batch(config, B=3, S=16):
    """Tokens with structure to learn (next = 5 * token + 3 most of the time); labels are the shifted tokens."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(config.vocab_size, (B, S + 1), generator=generator)
    for t in range(S):
        follows = torch.rand(B, generator=generator) < 0.7
        tokens[:, t + 1] = torch.where(follows, (5 * tokens[:, t] + 3) % config.vocab_size, tokens[:, t + 1])
    labels = tokens[:, 1:].clone()
    labels[0, :4] = -100
    labels[1, 9] = -100
    labels[2, -2:] = -100
    return tokens[:, :-1].contiguous(), labels


def train(model, input_ids, labels):
    groups = ref.adamw_groups(model, TRAIN["weight_decay"])
    optimizer = torch.optim.AdamW(groups, betas=(TRAIN["beta1"], TRAIN["beta2"]), eps=TRAIN["eps"], foreach=False)
    valid = (labels != -100).sum()
    losses, rates, norms = [], [], []
    for step in range(TRAIN["max_steps"]):
        optimizer.zero_grad()
        loss = ref.loss_sum(model, input_ids, labels) / valid
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), TRAIN["max_grad_norm"], foreach=False)
        lr = ref.learning_rate(step, TRAIN["learning_rate"], TRAIN["min_learning_rate"], TRAIN["warmup_steps"],
                               TRAIN["max_steps"], TRAIN["lr_scheduler_type"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        losses.append(loss.item())
        rates.append(lr)
        norms.append(norm.item())
    return {name: torch.tensor(values, dtype=torch.float64)
            for name, values in (("losses", losses), ("learning_rates", rates), ("grad_norms", norms))}


def make_train(architecture):
    config = MODELS[architecture]
    model = ref.initialise(ref.CausalLM(config), seed=1, std=0.15)
    input_ids, labels = make_batch(config)
    initial = {k: v.clone() for k, v in model.state_dict().items()}
    tensors = {"input_ids": input_ids, "labels": labels}
    tensors |= {f"initial/{k}": v for k, v in initial.items()}
    tensors |= train(model, input_ids, labels)
    tensors |= {f"final/{k}": v.clone() for k, v in model.state_dict().items()}

    model.load_state_dict(initial)
    exact = train(model.double(), input_ids, labels)
    tensors |= {f"{k}_float64": exact[k] for k in ("losses", "grad_norms")}
    save(f"train_{architecture}.safetensors", tensors, config=asdict(config), train=TRAIN)
    report_rounding(tensors, model.state_dict())


def report_rounding(tensors, exact_weights):
    """Distance of the float32 run from the float64 run: the scale for tolerances."""
    relative = ((tensors["losses"] - tensors["losses_float64"]) / tensors["losses_float64"]).abs().max().item()
    worst = sorted(((tensors[f"final/{k}"] - w).abs().max().item(), k) for k, w in exact_weights.items())[::-1]
    print(f"  losses {tensors['losses'][0]:.6f} -> {tensors['losses'][-1]:.6f}; float32 run against float64 run: "
          f"loss {relative:.1e} relative; weights " + ", ".join(f"{k} {d:.1e}" for d, k in worst[:4]))


def check_models():
    try:
        import transformers
    except ImportError:
        print("transformers is not installed: models not checked against it")
        return
    configs = [*MODELS.values(), ref.Config(architecture="llama", num_key_value_heads=2, qk_norm=True)]
    for config in configs:
        model = ref.initialise(ref.CausalLM(config), seed=1, std=0.15)
        error = ref.check_against_transformers(config, model, make_batch(config)[0])
        print(f"transformers {transformers.__version__}: {config.architecture}, qk_norm={config.qk_norm}: "
              f"largest logit difference {error:.1e}")


# Modules and ops: inputs are float32 values stored as float64, so a float32 test reads them without rounding.


class Random:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float32).double()

    def ids(self, high, *shape):
        return torch.randint(high, shape, generator=self.generator)


def run_module(name, module, x, rng):
    ref.initialise(module, seed=3, std=0.2)
    module.double()
    if x.is_floating_point():
        x.requires_grad_()
    y = module(x)
    dy = rng.normal(*y.shape)
    y.backward(dy)
    out = {f"{name}/x": x, f"{name}/y": y, f"{name}/dy": dy}
    if x.is_floating_point():
        out[f"{name}/dx"] = x.grad
    for key, p in module.named_parameters():
        out[f"{name}/weight/{key}"] = p
        out[f"{name}/grad/{key}"] = p.grad
    return out


def make_modules():
    rng = Random(11)
    mha = dict(hidden_size=48, heads=6)
    cases = {
        "linear": (dict(in_features=12, out_features=7, bias=True), nn.Linear),
        "linear_no_bias": (dict(in_features=12, out_features=7, bias=False), nn.Linear),
        "embedding": (dict(num_embeddings=9, embedding_dim=12), nn.Embedding),
        "layer_norm": (dict(normalized_shape=12, eps=1e-5), nn.LayerNorm),
        "rms_norm": (dict(normalized_shape=12, eps=1e-6), nn.RMSNorm),
        "mlp_gelu": (dict(hidden_size=12, intermediate_size=20), ref.GeluMlp),
        "mlp_swiglu": (dict(hidden_size=12, intermediate_size=20), ref.SwigluMlp),
        "mha": (dict(mha, kv_heads=6, bias=True), ref.MultiHeadAttention),
        "mha_gqa_rope": (dict(mha, kv_heads=2, bias=False, rope_theta=10000.0), ref.MultiHeadAttention),
        "mha_qk_norm": (dict(mha, kv_heads=2, bias=False, rope_theta=10000.0, qk_norm_eps=1e-6),
                        ref.MultiHeadAttention),
        "mha_full": (dict(mha, kv_heads=2, bias=True, causal=False), ref.MultiHeadAttention),
    }
    tensors = {}
    for name, (options, kind) in cases.items():
        x = rng.ids(9, 2, 5) if kind is nn.Embedding else rng.normal(2, 5, 48 if name.startswith("mha") else 12)
        tensors |= run_module(name, kind(**options), x, rng)
    save("modules.safetensors", tensors, **{name: options for name, (options, _) in cases.items()})


def attention(q, k, v, causal):
    """q [B, Sq, Hq, D], k and v [B, Sk, Hkv, D]; causal is aligned at the bottom right. -> o like q, lse [B, Hq, Sq]"""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(t.repeat_interleave(group, dim=2).transpose(1, 2) for t in (k, v))
    s = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5  # [B, Hq, Sq, Sk]
    if causal:
        Sq, Sk = s.shape[2:]
        s = s.masked_fill(torch.ones(Sq, Sk, dtype=torch.bool).triu(1 + Sk - Sq), -torch.inf)
    return (s.softmax(-1) @ v).transpose(1, 2), s.logsumexp(-1)


def make_ops():
    rng = Random(13)
    tensors, options = {}, {}

    def case(name, function, inputs, **constants):
        """Runs function(**inputs, **constants); floating inputs get gradients under d<input>."""
        leaves = {k: t.clone().requires_grad_(t.is_floating_point()) for k, t in inputs.items()}
        result = function(**leaves, **constants)
        y, *extra = result if isinstance(result, tuple) else (result,)
        dy = rng.normal(*y.shape)
        y.backward(dy)
        tensors.update({f"{name}/{k}": t for k, t in leaves.items()})
        tensors.update({f"{name}/d{k}": t.grad for k, t in leaves.items() if t.requires_grad})
        tensors.update({f"{name}/y": y, f"{name}/dy": dy, **{f"{name}/lse": t for t in extra}})
        options[name] = constants

    def cross_entropy(logits, labels, reduction):
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction=reduction)

    labels = rng.ids(11, 7)
    labels[[1, 4]] = -100
    case("cross_entropy_sum", cross_entropy, dict(logits=3 * rng.normal(7, 11), labels=labels), reduction="sum")
    case("cross_entropy_mean", cross_entropy, dict(logits=3 * rng.normal(7, 11), labels=labels), reduction="mean")

    wide = torch.cat([3 * rng.normal(3, 7), torch.tensor([[-12.0, -6.0, -0.5, 0.0, 0.5, 6.0, 12.0]]).double()])
    case("gelu_exact", lambda x: F.gelu(x), dict(x=wide))
    case("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), dict(x=wide))
    case("silu", lambda x: F.silu(x), dict(x=wide))
    case("swiglu", lambda gate, up: F.silu(gate) * up, dict(gate=wide, up=rng.normal(4, 7)))
    for dim in (-1, 1):
        suffix = "last" if dim == -1 else "middle"
        case(f"softmax_{suffix}", lambda x, dim: x.softmax(dim), dict(x=3 * rng.normal(2, 5, 3)), dim=dim)
        case(f"log_softmax_{suffix}", lambda x, dim: x.log_softmax(dim), dict(x=3 * rng.normal(2, 5, 3)), dim=dim)

    case("layer_norm", lambda x, weight, bias, eps: F.layer_norm(x, (12,), weight, bias, eps),
         dict(x=2 * rng.normal(2, 5, 12) + 1, weight=rng.normal(12), bias=rng.normal(12)), eps=1e-5)
    case("rms_norm", lambda x, weight, eps: F.rms_norm(x, (12,), weight, eps),
         dict(x=2 * rng.normal(2, 5, 12) + 1, weight=rng.normal(12)), eps=1e-6)
    case("rope", ref.rope, dict(x=rng.normal(2, 5, 3, 8)), theta=10000.0, offset=0)
    case("rope_offset", ref.rope, dict(x=rng.normal(2, 5, 3, 8)), theta=10000.0, offset=37)

    ids = rng.ids(10, 2, 5)
    ids[0, 1] = ids[1, 3] = 4
    ids[0, 2] = ids[1, 2]
    case("embedding_padding", lambda weight, ids, padding_idx: F.embedding(ids, weight, padding_idx),
         dict(weight=rng.normal(10, 6), ids=ids), padding_idx=4)

    def qkv(Sq, Sk):
        return dict(q=rng.normal(2, Sq, 6, 8), k=rng.normal(2, Sk, 2, 8), v=rng.normal(2, Sk, 2, 8))

    case("attention_full", attention, qkv(5, 7), causal=False)
    case("attention_causal", attention, qkv(5, 7), causal=True)
    save("ops.safetensors", tensors, **options)


def main():
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or ["train", "modules", "ops"]
    if "train" in wanted:
        check_models()
        for architecture in MODELS:
            make_train(architecture)
    if "modules" in wanted:
        make_modules()
    if "ops" in wanted:
        make_ops()


if __name__ == "__main__":
    main()
