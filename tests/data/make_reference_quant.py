"""Writes quant.safetensors: what PyTorch's casts and the compressed-tensors package make of given numbers.

    python -m pip install torch safetensors transformers compressed-tensors
    python tests/data/make_reference_quant.py

Versions used for the stored file are in its metadata.
"""

import json
import platform
from importlib.metadata import version
from pathlib import Path

import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
OUT = {}


def put(key, tensor):
    OUT[key] = tensor.detach().clone().contiguous()


# Casts: values spread over every exponent, and every midpoint of two neighbours with the floats beside it.
generator = torch.Generator().manual_seed(11)
for name, dtype in FP8.items():
    largest = torch.finfo(dtype).max
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    put(f"{name}/values", codes)
    grid = codes[codes.isfinite() & (codes >= 0)].sort().values
    middle = (grid[1:] + grid[:-1]) / 2
    around = torch.cat([grid, middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9))])
    spread = torch.exp2(torch.rand(600, generator=generator) * 40 - 30).clamp(max=largest)
    x = torch.cat([around, -around, spread, -spread, torch.tensor([0.0, -0.0, 1e-45, 1e-38])])
    put(f"{name}/x", x)
    put(f"{name}/codes", x.to(dtype).view(torch.uint8))
put("e8m0/values", torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float())

# Weights: rows of very different size, some with subnormal block scales, an outlier, a block of zeros. No minus zero, which the
# package stores as 0, and no block whose scale rounds to 0, which the package reads as zeros.
weight = torch.randn(6, 96, generator=generator) * torch.tensor([1, 1e-3, 3, 0.02, 5e-4, 1]).unsqueeze(1)
weight[0, 16:32] = 0.0
weight[2, 40] = 90.0
put("weight", weight)


def scheme(**args):
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type="float", symmetric=True, **args),
                              input_activations=None)


def store(key, compressor, plan, scale, global_scale=None):
    state = {"weight": weight, "weight_scale": scale}
    if global_scale is not None:
        state["weight_global_scale"] = global_scale
    packed = compressor.compress(state, plan)
    for name, tensor in packed.items():
        put(f"{key}/{name}", tensor.view(torch.uint8) if tensor.dtype in FP8.values() else tensor)


def compress(key, compressor, plan, low, high, global_scale=None):
    scale, _ = calculate_qparams(low, high, plan.weights, global_scale=global_scale)
    store(key, compressor, plan, scale, global_scale)
    return scale


blocks = weight.reshape(6, 6, 16)
plan = scheme(num_bits=4, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
gparam = generate_gparam(weight.min(), weight.max())
scale = compress("nvfp4", NVFP4PackedCompressor, plan, blocks.amin(2), blocks.amax(2), gparam)

plan = scheme(num_bits=4, strategy="group", group_size=32, scale_dtype=torch.uint8)
amax = weight.reshape(6, 3, 32).abs().amax(2)
store("mxfp4", MXFP4PackedCompressor, plan, torch.exp2(torch.floor(torch.log2(amax)) - 2))  # OCP's rule, not the package's own

plan = scheme(num_bits=8, strategy="tensor")
compress("fp8_tensor", FloatQuantizationCompressor, plan, weight.amin().reshape(1), weight.amax().reshape(1))
plan = scheme(num_bits=8, strategy="channel")
compress("fp8_channel", FloatQuantizationCompressor, plan, weight.amin(1, keepdim=True), weight.amax(1, keepdim=True))

facts = dict(python=platform.python_version(), torch=torch.__version__, compressed_tensors=version("compressed-tensors"))
path = Path(__file__).with_name("quant.safetensors")
save_file(OUT, path, {"reference": json.dumps(facts)})
path.chmod(0o644)
print(f"{path.name}: {len(OUT)} tensors, {path.stat().st_size} bytes")
for key, tensor in OUT.items():
    print(" ", key, tensor.dtype, list(tensor.shape))
