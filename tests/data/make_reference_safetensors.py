"""Writes reference.safetensors with the official package: every dtype heddle reads, a scalar, an empty tensor.

Run: python3 tests/data/make_reference_safetensors.py
Versions used for the stored file: safetensors 0.8.0, torch 2.15.0, Python 3.11
"""

import pathlib

import torch
from safetensors.torch import save_file

TENSORS = {
    "f64": torch.tensor([[1 / 3, -2.5e300, float("inf")]], dtype=torch.float64),
    "f32": torch.tensor([[0.1, -1.5, 3.0e38], [float("nan"), -0.0, 1.0e-45]], dtype=torch.float32),
    "bf16": torch.tensor([1.0, -2.0, 3.140625, 0.0078125], dtype=torch.bfloat16),
    "f16": torch.tensor([65504.0, -0.5, 2.0**-24], dtype=torch.float16),
    "i64": torch.tensor([-(2**63), 0, 2**63 - 1], dtype=torch.int64),
    "i32": torch.tensor([[-(2**31)], [2**31 - 1]], dtype=torch.int32),
    "u8": torch.tensor([0, 1, 255], dtype=torch.uint8),
    "bool": torch.tensor([[True, False], [False, True], [True, True]]),
    "scalar": torch.tensor(42.5, dtype=torch.float32),
    "empty": torch.zeros(3, 0, 2, dtype=torch.float32),
    "i8": torch.tensor([-128, 127], dtype=torch.int8),
    "вес \"q\"\n": torch.tensor([7], dtype=torch.int64),
}

save_file(TENSORS, pathlib.Path(__file__).with_name("reference.safetensors"), metadata={"format": "pt", "ключ": "значение"})
