"""Decodes what `heddle quantize` writes with the compressed-tensors package and compares with what heddle reads.

    python tests/peers/check_quantized.py --heddle build/heddle --model runs/tiny_llama

Quantises a Llama checkpoint in every layout that is written, to nearest and stochastically. What heddle reads is what `heddle merge`
writes for an adapter that changes nothing: the decoded weights, rounded once to bfloat16. Both must be equal in every weight, 0 and -0 alike. Needs torch,
safetensors, compressed-tensors (0.20.1 was run).
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

FORMS = {
    "nvfp4": ["--format", "nvfp4"],
    "nvfp4, four_over_six": ["--format", "nvfp4", "--set", "quantize.nvfp4_scale_search=four_over_six"],
    "nvfp4, stochastic": ["--format", "nvfp4", "--rounding", "stochastic", "--seed", "3"],
    "mxfp4": ["--format", "mxfp4"],
    "mxfp4, ceil, stochastic": ["--format", "mxfp4", "--set", "quantize.mxfp4_scale=ceil", "--rounding", "stochastic", "--seed", "3"],
} | {f"fp8_e4m3, scale a {grain}": ["--format", "fp8_e4m3", "--set", f"quantize.fp8_scale={grain}"] for grain in ("tensor", "channel", "block")}


def decoded_by_package(folder):
    """Every quantised weight in bfloat16, by its name."""
    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    compressor = BaseCompressor.get_value_from_registry(config.format)
    layers = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, part = name.rsplit(".", 1)
        layers.setdefault(layer, {})[part] = tensor
    scheme = config.config_groups["group_0"]
    return {
        f"{layer}.weight": compressor.decompress(parts, scheme)["weight"].to(torch.bfloat16) for layer, parts in layers.items() if "weight_scale" in parts
    }


def write_idle_adapter(folder, weights):
    folder.mkdir()
    tensors = {}
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            key = "base_model.model." + name.removesuffix(".weight")
            tensors[key + ".lora_A.weight"] = torch.ones(1, weight.shape[1])
            tensors[key + ".lora_B.weight"] = torch.zeros(weight.shape[0], 1)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--heddle", required=True, help="the heddle program")
    p.add_argument("--model", required=True, help="a checkpoint of a Llama model, or the output folder of a run")
    a = p.parse_args()
    failed = 0
    for form, options in FORMS.items():
        with tempfile.TemporaryDirectory() as name:
            packed, adapter, merged = (Path(name) / part for part in ("packed", "adapter", "merged"))
            subprocess.run([a.heddle, "quantize", "--model", a.model, "--output", packed, *options], check=True, stdout=subprocess.DEVNULL)
            theirs = decoded_by_package(packed)
            write_idle_adapter(adapter, theirs)
            subprocess.run([a.heddle, "merge", "--base", packed, "--adapter", adapter, "--output", merged], check=True, capture_output=True)
            ours = load_file(merged / "model.safetensors")
        other = {name: (weight != ours[name]).sum().item() for name, weight in theirs.items() if not torch.equal(weight, ours[name])}
        failed += len(other)
        print(f"{form}: {len(theirs)} layers, {sum(w.numel() for w in theirs.values())} weights,", f"other: {other}" if other else "all equal", flush=True)
    if failed or not theirs:
        raise SystemExit(f"{failed} layers differ")


if __name__ == "__main__":
    main()
