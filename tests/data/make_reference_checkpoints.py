"""Writes the folders checkpoints/sharded and checkpoints/mixed: a tiny Llama of tests/support/tiny_run.h in several files each.

Run: python3 tests/data/make_reference_checkpoints.py
Versions used for the stored files: transformers 5.24.0, huggingface_hub 2.4.0, safetensors 0.8.0, torch 2.15.0, Python 3.11
"""

import json
import pathlib
import shutil

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = pathlib.Path(__file__).with_name("checkpoints")
CONFIG = dict(vocab_size=11, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, head_dim=4,
              max_position_embeddings=9, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fresh(name):
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def make_model():
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def write_sharded(model):
    """As transformers saves a model, the logits of one batch beside it."""
    folder = fresh("sharded")
    model.save_pretrained(folder, max_shard_size=3000)
    for name in ("config.json", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3], [4, 5, 6]])).logits
    save_file({"logits": logits}, folder / "expected.safetensors")


def random_nvfp4(name, rows, columns):
    """A layer of random codes and scales in ModelOpt's layout, and its weight; the tensor scale is a power of two, its inverse exact."""
    blocks = (columns + 15) // 16
    codes = torch.randint(0, 16, (rows, columns))
    scales = (torch.rand(rows, blocks) * 8 + 0.1).to(torch.float8_e4m3fn)
    weight = E2M1[codes] * (scales.float().repeat_interleave(16, dim=1)[:, :columns] * 2.0**-5)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    stored = {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor(2.0**-5), "input_scale": torch.tensor(0.25)}
    return {f"{name}.{part}": tensor for part, tensor in stored.items()}, weight


def random_fp8(name, rows, columns):
    codes = torch.randn(rows, columns).mul(50).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.0123)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale, f"{name}.input_scale": torch.tensor(0.5)}, codes.float() * scale


def write_mixed(model):
    """MIXED_PRECISION of ModelOpt: attention in FP8, the MLP of the first layer in NVFP4, that of the last in bfloat16."""
    folder = fresh("mixed")
    tensors, expected, layers = {}, {}, {}
    for name, value in model.state_dict().items():
        layer = name.removesuffix(".weight")
        algorithm = "FP8" if "self_attn" in name else "NVFP4" if "layers.0.mlp" in name else None
        if algorithm is None:
            tensors[name] = value.to(torch.bfloat16)
            expected[name] = tensors[name].float()
            continue
        stored, expected[name] = (random_fp8 if algorithm == "FP8" else random_nvfp4)(layer, *value.shape)
        tensors.update(stored)
        layers[layer] = {"quant_algo": algorithm} | ({"group_size": 16} if algorithm == "NVFP4" else {})
    save_torch_state_dict(tensors, folder, max_shard_size=1500)
    quantization = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization}, indent=1) + "\n")
    save_file(expected, folder / "expected.safetensors")


MODEL = make_model()
write_sharded(MODEL)
write_mixed(MODEL)
