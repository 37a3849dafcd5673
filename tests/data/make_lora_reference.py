"""Writes the LoRA reference of this folder with PEFT; README.md describes the files.

    python -m pip install torch numpy safetensors transformers peft
    python tests/data/make_lora_reference.py

Needs train_gpt2.safetensors and train_llama.safetensors: each run starts from their initial weights, on their batch, and
takes the training steps of make_reference.py, with PEFT's parameters as the only trainable ones.
"""

import json
import platform
import shutil
from pathlib import Path

import peft
import torch
import torch.nn.functional as F
import transformers
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file, save_file
from torch import nn

import reference_model as ref
from make_reference import MODELS, TRAIN

FOLDER = Path(__file__).parent
ATTENTION = {"gpt2": ["c_attn", "attn.c_proj"], "llama": ["q_proj", "k_proj", "v_proj", "o_proj"]}
# r = 3 and alpha = 7 are coprime, so that no confusion of one with the other goes unseen.
PLAIN = dict(r=3, lora_alpha=7)
CASES = {
    "gpt2_plain": ("gpt2", PLAIN),
    "gpt2_rslora": ("gpt2", PLAIN | dict(use_rslora=True)),
    "gpt2_dora": ("gpt2", PLAIN | dict(use_dora=True)),
    "gpt2_pissa": ("gpt2", PLAIN | dict(init_lora_weights="pissa")),
    "llama_plain": ("llama", PLAIN),
    "llama_rslora": ("llama", PLAIN | dict(use_rslora=True)),
    "llama_dora": ("llama", PLAIN | dict(use_dora=True)),
    "llama_pissa": ("llama", PLAIN | dict(init_lora_weights="pissa", use_rslora=True)),
    "llama_loraplus": ("llama", PLAIN | dict(loraplus_lr_ratio=4)),
    "llama_patterns": ("llama", PLAIN | dict(target_modules="all-linear",
                                             rank_pattern={"down_proj": 2, "layers.0.self_attn.q_proj": 5},
                                             alpha_pattern={"mlp.up_proj": 11})),
}


def base_model(c, weights):
    """The Hugging Face model of heddle's weights."""
    if c.architecture == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=c.vocab_size, n_embd=c.hidden_size, n_layer=c.num_hidden_layers, n_head=c.num_attention_heads,
            n_inner=c.intermediate_size, n_positions=c.max_position_embeddings, layer_norm_epsilon=c.layer_norm_epsilon,
            tie_word_embeddings=c.tie_word_embeddings, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
            eos_token_id=0)
        model = transformers.GPT2LMHeadModel(config)
        weights = ref.gpt2_names(c, weights)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_hidden_layers, num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_key_value_heads, max_position_embeddings=c.max_position_embeddings,
            rms_norm_eps=c.rms_norm_eps, rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta),
            tie_word_embeddings=c.tie_word_embeddings))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model


def make_optimizer(model, lr_ratio):
    options = dict(betas=(TRAIN["beta1"], TRAIN["beta2"]), eps=TRAIN["eps"], foreach=False)
    if lr_ratio is not None:
        return create_loraplus_optimizer(model, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=lr_ratio,
                                         loraplus_weight_decay=TRAIN["weight_decay"], **options)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW([dict(params=[p for p in trainable if p.dim() >= 2], weight_decay=TRAIN["weight_decay"]),
                              dict(params=[p for p in trainable if p.dim() < 2], weight_decay=0.0)], lr=1.0, **options)


def train(model, input_ids, labels, lr_ratio):
    optimizer = make_optimizer(model, lr_ratio)
    peaks = [group["lr"] for group in optimizer.param_groups]  # 1, or the ratio
    losses = []
    for step in range(TRAIN["max_steps"]):
        optimizer.zero_grad()
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), TRAIN["max_grad_norm"], foreach=False)
        lr = ref.learning_rate(step, TRAIN["learning_rate"], TRAIN["min_learning_rate"], TRAIN["warmup_steps"],
                               TRAIN["max_steps"], TRAIN["lr_scheduler_type"])
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = lr * peak
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def make_case(name, architecture, options):
    options = dict(options)
    lr_ratio = options.pop("loraplus_lr_ratio", None)
    stored = load_file(FOLDER / f"train_{architecture}.safetensors")
    weights = {k.removeprefix("initial/"): t for k, t in stored.items() if k.startswith("initial/")}
    torch.manual_seed(5)
    base = base_model(MODELS[architecture], weights)
    config = peft.LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=architecture == "gpt2",
                             **dict(target_modules=ATTENTION[architecture]) | options)
    model = peft.get_peft_model(base, config).train()
    initial = {k: t.clone() for k, t in peft.get_peft_model_state_dict(model).items()}
    losses = train(model, stored["input_ids"], stored["labels"], lr_ratio)
    save_adapter(model, FOLDER / "adapters" / name)
    final = {k: t.clone() for k, t in peft.get_peft_model_state_dict(model).items()}
    logits = model.eval()(input_ids=stored["input_ids"], use_cache=False).logits

    peft.set_peft_model_state_dict(model.double().train(), initial)
    exact = train(model, stored["input_ids"], stored["labels"], lr_ratio)
    exact_final = peft.get_peft_model_state_dict(model)
    difference = max((final[k] - exact_final[k]).abs().max().item() for k in final)
    print(f"{name}: loss {losses[0]:.6f} -> {losses[-1]:.6f}; float32 run against float64 run: "
          f"loss {((losses - exact) / exact).abs().max():.1e} relative, weights {difference:.1e}")
    return {f"{name}/initial/{k}": t for k, t in initial.items()} | {
        f"{name}/losses": losses, f"{name}/logits": logits}


def save_adapter(model, folder):
    """What PEFT writes, without its model card and with the one random thing, the order of a set, made fixed."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True))
    for file in folder.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tensors = {}
    for name, (architecture, options) in CASES.items():
        tensors |= make_case(name, architecture, options)
    facts = dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__,
                 peft=peft.__version__, train=TRAIN, cases=CASES)
    path = FOLDER / "lora.safetensors"
    save_file({k: t.detach().clone().contiguous() for k, t in tensors.items()}, path, {"reference": json.dumps(facts)})
    path.chmod(0o644)
    print(f"{path.name}: {len(tensors)} tensors, {path.stat().st_size} bytes")
