"""Loads an adapter folder of heddle with PEFT and compares.

    python tests/peers/check_adapter.py --base runs/base/checkpoint-100 --adapter runs/lora/adapter [--merged merged]

Checks that PEFT finds every tensor it wants and none besides, that it saves the same tensors and the same config again,
and, with --merged, that the merged checkpoint gives the logits of base and adapter together. Needs torch, safetensors,
transformers, peft.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import peft
import torch
import yaml
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).parent.parent / "data"))
import reference_model as ref
from make_lora_reference import base_model


def load_base(folder):
    model = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    # PyYAML takes 1e-05 for text.
    config = ref.Config(**{f.name: type(f.default)(model[f.name]) for f in dataclasses.fields(ref.Config)})
    weights = load_file(folder / "model.safetensors")
    return config, base_model(config, {k: w.float() for k, w in weights.items()}).eval()


def check_files(model, folder):
    """PEFT's own copy of the adapter must hold the same."""
    ours = load_file(folder / "adapter_model.safetensors")
    status = peft.set_peft_model_state_dict(model, dict(ours))
    missing = [k for k in status.missing_keys if "lora_" in k]
    assert not missing and not status.unexpected_keys, (missing, status.unexpected_keys)
    with tempfile.TemporaryDirectory() as copy:
        model.save_pretrained(copy)
        theirs = load_file(Path(copy) / "adapter_model.safetensors")
        config = json.loads((Path(copy) / "adapter_config.json").read_text())
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype and torch.equal(tensor, theirs[key]), key
    our_config = json.loads((folder / "adapter_config.json").read_text())
    for key in config.keys() | our_config.keys():
        a, b = config.get(key, "absent"), our_config.get(key, "absent")
        assert (sorted(a) == sorted(b) if key == "target_modules" else a == b) or key == "peft_version", (key, a, b)
    return len(ours)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("base", "adapter", "merged"):
        parser.add_argument("--" + name, type=Path, required=name != "merged")
    args = parser.parse_args()
    config, base = load_base(args.base)
    ids = torch.randint(config.vocab_size, (2, config.max_position_embeddings), generator=torch.Generator().manual_seed(3))
    plain = base(input_ids=ids, use_cache=False).logits
    model = peft.PeftModel.from_pretrained(base, args.adapter).eval()
    print(f"{check_files(model, args.adapter)} tensors, the same after PEFT saved them again")
    adapted = model(input_ids=ids, use_cache=False).logits
    print(f"the adapter moves logits by up to {(adapted - plain).abs().max():.3g}")
    if args.merged:
        merged = load_base(args.merged)[1](input_ids=ids, use_cache=False).logits
        difference = (merged - adapted).abs().max().item()
        print(f"logits of the merged checkpoint differ from PEFT's by up to {difference:.1e}")
        # Rounding each weight once more moves a logit by far less than the adapter does.
        assert difference < 1e-3 * (adapted - plain).abs().max(), "the merged checkpoint does not compute what PEFT does"


if __name__ == "__main__":
    main()
