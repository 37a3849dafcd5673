"""The two model architectures of heddle in plain PyTorch, under heddle's parameter names.

Pre-norm decoder blocks; linear weights are [out, in].
  gpt2   LayerNorm, learned positions, GELU (tanh form), biases on every Linear except the head
  llama  RMSNorm, RoPE (split halves), SwiGLU, no biases, grouped key/value heads
`check_against_transformers` shows that both equal the Hugging Face models of the same name.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    architecture: str = "gpt2"  # gpt2 | llama
    vocab_size: int = 64
    hidden_size: int = 32
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    intermediate_size: int = 96
    max_position_embeddings: int = 24
    tie_word_embeddings: bool = True
    qk_norm: bool = False
    rope_theta: float = 10000.0
    layer_norm_epsilon: float = 1e-5
    rms_norm_eps: float = 1e-6

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads


def rope(x, theta=10000.0, offset=0):
    """Rotates the pair (x[i], x[i + D/2]) of x [B, S, H, D] by the angle position * theta^(-2i/D)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(offset, offset + x.shape[1], dtype=torch.float64)[:, None] * frequency  # [S, D/2]
    cos, sin = (t.to(x.dtype)[:, None, :] for t in (angle.cos(), angle.sin()))  # [S, 1, D/2]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class MultiHeadAttention(nn.Module):
    def __init__(self, hidden_size, heads, kv_heads, bias, causal=True, rope_theta=None, qk_norm_eps=None):
        super().__init__()
        self.heads, self.kv_heads, self.causal, self.rope_theta = heads, kv_heads, causal, rope_theta
        self.head_dim = hidden_size // heads
        self.q_proj = nn.Linear(hidden_size, heads * self.head_dim, bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * self.head_dim, bias)
        self.v_proj = nn.Linear(hidden_size, kv_heads * self.head_dim, bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden_size, bias)
        self.has_qk_norm = qk_norm_eps is not None
        if self.has_qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=qk_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=qk_norm_eps)

    def forward(self, x):  # [B, S, hidden]
        B, S, _ = x.shape
        q = self.q_proj(x).view(B, S, self.heads, self.head_dim)
        k = self.k_proj(x).view(B, S, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(B, S, self.kv_heads, self.head_dim)
        if self.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            q, k = rope(q, self.rope_theta), rope(k, self.rope_theta)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            is_causal=self.causal, enable_gqa=self.heads != self.kv_heads)  # scale 1/sqrt(head_dim)
        return self.o_proj(o.transpose(1, 2).reshape(B, S, -1))


class GeluMlp(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x):
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))


class SwigluMlp(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TransformerBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = make_norm(c)
        self.self_attn = MultiHeadAttention(
            c.hidden_size, c.num_attention_heads, c.num_key_value_heads,
            bias=c.architecture == "gpt2",
            rope_theta=c.rope_theta if c.architecture == "llama" else None,
            qk_norm_eps=c.rms_norm_eps if c.qk_norm else None)
        self.post_attention_layernorm = make_norm(c)
        self.mlp = (GeluMlp if c.architecture == "gpt2" else SwigluMlp)(c.hidden_size, c.intermediate_size)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.embed_positions = (
            nn.Embedding(c.max_position_embeddings, c.hidden_size) if c.architecture == "gpt2" else None)
        self.layers = nn.ModuleList(TransformerBlock(c) for _ in range(c.num_hidden_layers))
        self.norm = make_norm(c)

    def forward(self, input_ids):  # [B, S]
        x = self.embed_tokens(input_ids)
        if self.embed_positions is not None:
            x = x + self.embed_positions.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class CausalLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.model = Transformer(c)
        self.lm_head = None if c.tie_word_embeddings else nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, input_ids):  # -> logits [B, S, vocab]
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(self.model(input_ids), head.weight)


def make_norm(c):
    if c.architecture == "gpt2":
        return nn.LayerNorm(c.hidden_size, eps=c.layer_norm_epsilon)
    return nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)


def loss_sum(model, input_ids, labels):
    """Sum of the token losses; labels[b, t] is the token that follows input_ids[b, t], or -100 for no loss."""
    return F.cross_entropy(model(input_ids).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def check_against_transformers(c, model, input_ids):
    """Asserts that the float64 logits equal those of the Hugging Face model with the same weights."""
    import transformers

    weights = model.state_dict()
    sizes = dict(vocab_size=c.vocab_size, tie_word_embeddings=c.tie_word_embeddings, attn_implementation="eager",
                 bos_token_id=None, eos_token_id=None)
    if c.architecture == "gpt2":
        peer = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            n_embd=c.hidden_size, n_layer=c.num_hidden_layers, n_head=c.num_attention_heads,
            n_inner=c.intermediate_size, n_positions=c.max_position_embeddings,
            activation_function="gelu_new", layer_norm_epsilon=c.layer_norm_epsilon, **sizes))
        weights, tolerance = gpt2_names(c, weights), 1e-12
    else:
        kind = "Qwen3" if c.qk_norm else "Llama"  # Qwen3 is Llama with q and k norms
        config = getattr(transformers, kind + "Config")(
            hidden_size=c.hidden_size, num_hidden_layers=c.num_hidden_layers, head_dim=c.head_dim,
            num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads,
            intermediate_size=c.intermediate_size, max_position_embeddings=c.max_position_embeddings,
            rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta),
            rms_norm_eps=c.rms_norm_eps, **sizes)
        peer = getattr(transformers, kind + "ForCausalLM")(config)
        tolerance = 1e-5  # transformers computes RMSNorm and the RoPE tables in float32
    missing, unexpected = peer.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"} and (not missing or c.tie_word_embeddings), missing
    peer.double().eval()
    with torch.no_grad():
        error = (peer(input_ids).logits - model.double()(input_ids)).abs().max().item()
    assert error < tolerance, f"{c.architecture}: logits differ from transformers by {error}"
    return error


def gpt2_names(c, weights):
    """heddle's names -> GPT-2's: q, k, v in one Conv1D, whose weight is [in, out]."""
    out = {"transformer.wte.weight": weights["model.embed_tokens.weight"],
           "transformer.wpe.weight": weights["model.embed_positions.weight"]}
    if not c.tie_word_embeddings:
        out["lm_head.weight"] = weights["lm_head.weight"]
    for kind in ("weight", "bias"):
        out[f"transformer.ln_f.{kind}"] = weights[f"model.norm.{kind}"]
        for n in range(c.num_hidden_layers):
            old, new = f"model.layers.{n}.", f"transformer.h.{n}."
            joined = torch.cat([weights[f"{old}self_attn.{p}_proj.{kind}"] for p in "qkv"])
            linears = {"attn.c_attn": joined,
                       "attn.c_proj": weights[f"{old}self_attn.o_proj.{kind}"],
                       "mlp.c_fc": weights[f"{old}mlp.up_proj.{kind}"],
                       "mlp.c_proj": weights[f"{old}mlp.down_proj.{kind}"]}
            out.update({f"{new}{name}.{kind}": w.t() if kind == "weight" else w for name, w in linears.items()})
            out[f"{new}ln_1.{kind}"] = weights[f"{old}input_layernorm.{kind}"]
            out[f"{new}ln_2.{kind}"] = weights[f"{old}post_attention_layernorm.{kind}"]
    return out


def initialise(module, seed, std):
    """Gives every parameter a value that matters: no zero bias, no norm weight of exactly one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32)
            is_norm_weight = p.dim() == 1 and name.endswith("weight")
            p.copy_(1 + 0.1 * noise if is_norm_weight else std * noise)
    return module


def adamw_groups(module, weight_decay):
    """Decay on tensors of two or more dimensions (embeddings included), none on biases and norms."""
    parameters = list(module.parameters())
    return [dict(params=[p for p in parameters if p.dim() >= 2], weight_decay=weight_decay),
            dict(params=[p for p in parameters if p.dim() < 2], weight_decay=0.0)]


def learning_rate(step, peak, minimum, warmup_steps, max_steps, kind="cosine"):
    """Learning rate of update `step` (0-based).

      w        = max(warmup_steps, 1)
      step < w:  peak * (step + 1) / w                          (first update > 0, update w - 1 is the peak)
      else:      p = min((step + 1 - w) / (max_steps - w), 1)   (last update, step = max_steps - 1, has p = 1)
        cosine   minimum + (peak - minimum) * (1 + cos(pi * p)) / 2
        linear   minimum + (peak - minimum) * (1 - p)
        constant peak
    """
    w = max(warmup_steps, 1)
    if step < w:
        return peak * (step + 1) / w
    if kind == "constant":
        return peak
    p = min((step + 1 - w) / (max_steps - w), 1.0) if max_steps > w else 1.0
    shape = 0.5 * (1 + math.cos(math.pi * p)) if kind == "cosine" else 1 - p
    return minimum + (peak - minimum) * shape
