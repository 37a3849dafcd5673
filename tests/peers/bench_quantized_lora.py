"""Times a LoRA step on a base in bfloat16 and on the same base in few bits: `heddle bench-train` on random weights, the formats in turn.

    python tests/peers/bench_quantized_lora.py --heddle build/heddle --json quantized_lora.json

The model is Llama-shaped: --layers of --width, heads of 128 with a quarter as many for keys and values, an MLP of 3.5 times the width,
a vocabulary of 4096; B 2, T 2048, r 16 on every projection, bfloat16. A line is the median of --steps steps. The last lines
are the speed over that of the bfloat16 base, of the medians over the rounds, and the memory of the linear weights over its.
"""

import argparse
import json
import re
import statistics
import subprocess
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
FORMATS = {
    "bf16": [],
    "nvfp4": ["format=nvfp4"],
    "nvfp4_in_fp8": ["format=nvfp4", "compute=fp8"],
    "fp8": ["format=fp8_e4m3"],
    "fp8_blocks": ["format=fp8_e4m3", "fp8_scale=block"],
    "mxfp4": ["format=mxfp4"],
}
MODEL = """model: {{architecture: llama, vocab_size: 4096, hidden_size: {width}, num_hidden_layers: {layers}, num_attention_heads: {heads},
         num_key_value_heads: {kv_heads}, intermediate_size: {ffn}, max_position_embeddings: 2048}}
"""
TRAIN = """data: {{source: text, files: ["**/*.h", "**/*.cpp", "**/*.md"], sequence_length: {seq}}}
train: {{max_steps: 1, micro_batch_size: 2, learning_rate: 1e-4, precision: bf16, output_dir: {out}}}
device: {device}
"""
LORA = "base: {base}\nlora: {{r: 16, target_modules: all-linear}}\n"


def shapes(a):
    """Name and shape of every weight of the model."""
    width, kv, ffn = a.width, a.width // 4, a.width * 7 // 2
    yield "model.embed_tokens.weight", [4096, width]
    for layer in range(a.layers):
        p = f"model.layers.{layer}."
        for name, rows, columns in (("q", width, width), ("k", kv, width), ("v", kv, width), ("o", width, width)):
            yield f"{p}self_attn.{name}_proj.weight", [rows, columns]
        for name, rows, columns in (("gate", ffn, width), ("up", ffn, width), ("down", width, ffn)):
            yield f"{p}mlp.{name}_proj.weight", [rows, columns]
        yield f"{p}input_layernorm.weight", [width]
        yield f"{p}post_attention_layernorm.weight", [width]
    yield "model.norm.weight", [width]
    yield "lm_head.weight", [4096, width]


def write_base(folder, a, config):
    """A checkpoint of weights from N(0, 0.02); weights of one shape are the same."""
    header, end, made = {}, 0, {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, shape in shapes(a):
        nbytes = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
        if str(shape) not in made:
            weight = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, device=device) * 0.02
            made[str(shape)] = weight.to(torch.bfloat16).cpu().view(torch.uint8).numpy()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, shape in shapes(a):
            made[str(shape)].tofile(out)
    (folder / "config.yaml").write_text(config)


def run(a, folder, config, name):
    out = folder / "out.json"
    command = [str(Path(a.heddle).resolve()), "bench-train", str(config), "--steps", str(a.steps), "--warmup", str(a.warmup), "--json", str(out)]
    for setting in FORMATS[name]:
        command += ["--set", f"quantize.{setting}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(done.stdout[-500:] + done.stderr)
    result = json.loads(out.read_text())
    said = re.search(r"(\d+) bytes before, (\d+) after", done.stderr)
    return result["step_ms"], result["peak_gib"], int(said[2]) / int(said[1]) if said else 1.0


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--heddle", required=True, help="the heddle program")
    p.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16", "nvfp4", "fp8"])
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--width", type=int, default=4096, help="a multiple of 512")
    p.add_argument("--seq", type=int, default=2048)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=15)
    p.add_argument("--warmup", type=int, default=4)
    p.add_argument("--device", default="cuda")
    p.add_argument("--folder", help="where the base is written for the time of the run")
    p.add_argument("--json", help="write the lines to this file")
    a = p.parse_args()
    lines = []
    with tempfile.TemporaryDirectory(dir=a.folder) as name:
        folder = Path(name)
        base, config = folder / "base", folder / "lora.yaml"
        base.mkdir()
        model = MODEL.format(width=a.width, layers=a.layers, heads=a.width // 128, kv_heads=a.width // 512, ffn=a.width * 7 // 2)
        train = TRAIN.format(seq=a.seq, out=folder / "run", device=a.device)
        write_base(base, a, model + train)
        config.write_text(train + LORA.format(base=base))
        for number in range(a.rounds):
            for who in a.formats:
                step_ms, peak, share = run(a, folder, config, who)
                lines.append(dict(round=number, base=who, step_ms=step_ms, peak_gib=peak, share_of_weights=share))
                print(f"{who:12} {step_ms:9.3f} ms/step {2 * a.seq / step_ms * 1e3:10,.0f} tokens/s {peak:7.2f} GiB, linear weights {share:.3f}", flush=True)
    median = {who: statistics.median(x["step_ms"] for x in lines if x["base"] == who) for who in a.formats}
    for who in a.formats:
        share = statistics.median(x["share_of_weights"] for x in lines if x["base"] == who)
        print(f"{who}: {median[who]:.2f} ms, speed {median[a.formats[0]] / median[who]:.3f}, linear weights {share:.3f} of {a.formats[0]}'s")
    if a.json:
        Path(a.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
