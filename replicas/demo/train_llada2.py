"""Trains the `llada2-words` demo model on a CPU and writes a checkpoint in LLaDA2's own format.

    python -m replicas.demo.train_llada2 --out DIR [--steps N] [--seed 0] [--minutes 27.5]

Block diffusion: the clean past, one block with some answer tokens masked, cross-entropy on the masked
ones. The learning rate falls along whichever of steps and minutes is further on, so a slow machine ends
in time, with fewer steps; a run that ends by its steps can be repeated from its seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from replicas.demo.llada2_module import Llada2Config, Llada2Module, load_module
from replicas.demo.muon import Muon
from replicas.demo.words_data import BLOCK_LENGTH, Batches
from replicas.demo.words_decode import evaluate, report
from replicas.demo.words_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_tokenizer

MAX_POSITIONS = 1024
CONFIG = Llada2Config(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=384,
    moe_intermediate_size=64,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    rope_theta=10000.0,
)

BATCH_TOKENS = 4096
MUON_RATE, ADAM_RATE = 0.02, 0.004
BIAS_RATE = 0.002
"""Step of the expert bias towards level load, in units of the router's sigmoid score."""


def new_module(config: Llada2Config, seed: int) -> Llada2Module:
    """A module with random weights: normal, 1 / sqrt(fan-in) wide, outputs of residual branches smaller."""
    torch.manual_seed(seed)
    module = Llada2Module(config)
    residual = 1 / math.sqrt(2 * config.num_hidden_layers)
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2:
            continue
        width = parameter.shape[1] ** -0.5
        if name.endswith(("dense.weight", "down_proj.weight")):
            width *= residual
        torch.nn.init.normal_(parameter, std=0.02 if "word_embeddings" in name else width)
    return module


def optimizers(module: Llada2Module) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, Adam for embedding, head, routers and norms."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in module.named_parameters():
        hidden = name.startswith("model.layers") and parameter.ndim == 2 and "mlp.gate.weight" not in name
        (matrices if hidden else others).append(parameter)
    return [
        Muon(matrices, lr=MUON_RATE, weight_decay=0.05),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def block_loss(module: Llada2Module, ids: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy of the last block's masked tokens (a scalar, in nats)."""
    logits = module(ids, BLOCK_LENGTH, last=BLOCK_LENGTH)
    picked = weights > 0
    loss = F.cross_entropy(logits[picked], targets[picked], reduction="none")
    return (loss * weights[picked]).sum() / weights.sum()


def rate_at(progress: float, step: int) -> float:
    """Learning-rate factor: a short warm-up, level, then linear to 0 over the last 60 %."""
    return min((step + 1) / 50, 1.0, (1.0 - progress) / 0.6)


def train(module: Llada2Module, steps: int, minutes: float, seed: int) -> int:
    """Trains in place; returns the number of steps done."""
    batches, chosen = Batches(seed, BATCH_TOKENS), optimizers(module)
    base = [[group["lr"] for group in o.param_groups] for o in chosen]
    began, average, step = time.monotonic(), 0.0, 0
    with tqdm(total=steps, desc="train", unit="step", mininterval=5) as bar:
        for step in range(steps):
            progress = max(step / steps, (time.monotonic() - began) / (60 * minutes))
            if progress >= 1:
                break
            for o, rates in zip(chosen, base, strict=True):
                for group, rate in zip(o.param_groups, rates, strict=True):
                    group["lr"] = rate * rate_at(progress, step)
            loss = block_loss(module, *next(batches))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            for o in chosen:
                o.step()
                o.zero_grad(set_to_none=True)
            level_experts(module, BIAS_RATE * rate_at(progress, step))
            average = loss.item() if step == 0 else 0.98 * average + 0.02 * loss.item()
            bar.set_postfix(loss=f"{average:.4f}", refresh=False)
            bar.update()
            if step % 100 == 99:
                tqdm.write(
                    f"step {step + 1} minutes {(time.monotonic() - began) / 60:.1f} loss {average:.4f}"
                )
        else:
            step = steps
    return step


def level_experts(module: Llada2Module, rate: float) -> None:
    """Moves every expert's bias towards level load, as DeepSeek-V3's auxiliary-loss-free balancing does."""
    for layer in module.moe_layers():
        load = layer.load.float()
        layer.gate.expert_bias += rate * torch.sign(load.mean() - load)


def config_json(config: Llada2Config, dtype: str) -> dict[str, Any]:
    """`config.json` with the field names of the real checkpoints (no eos, mask or block length there)."""
    return {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        **dataclasses.asdict(config),
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": 28,
        "moe_router_enable_expert_bias": True,
        "norm_head": False,
        "norm_softmax": False,
        "norm_topk_prob": True,
        "output_dropout": 0.0,
        "output_router_logits": False,
        "pad_token_id": EOS_ID,
        "rope_scaling": None,
        "rotary_dim": int(config.head_dim * config.partial_rotary_factor),
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformers_version": "4.57.1",
        "use_bias": False,
        "use_cache": False,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "use_sliding_window": False,
        "using_split_qkv_in_self_attention": False,
    }


def save(module: Llada2Module, directory: Path) -> None:
    """Writes weights (bfloat16, expert bias float32), configuration and tokenizer into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor if name.endswith("expert_bias") else tensor.bfloat16()).detach().contiguous()
        for name, tensor in module.state_dict().items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner alone
    raw = config_json(module.config, "bfloat16")
    (directory / "config.json").write_text(json.dumps(raw, indent=1, sort_keys=True) + "\n")
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    write_tokenizer(directory, MAX_POSITIONS)


def main() -> None:
    """Command line: train, save, read the checkpoint back and evaluate it on unseen prompts."""
    parser = argparse.ArgumentParser(description="Train the llada2-words demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=27.5, help="most minutes of training")
    parser.add_argument("--prompts", type=int, default=500, help="unseen prompts of the evaluation")
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.set_flush_denormal(True)
    module = new_module(CONFIG, args.seed)
    print(f"{sum(p.numel() for p in module.parameters()) / 1e6:.2f} M parameters")
    began = time.monotonic()
    steps = train(module, args.steps, args.minutes, args.seed)
    print(f"{steps} steps in {(time.monotonic() - began) / 60:.1f} minutes")
    save(module, args.out)
    scores = evaluate(load_module(args.out), args.prompts, seed=1_000_000 + args.seed)
    print(report(scores))
    print("\n".join(scores["all"].wrong[:20]))


if __name__ == "__main__":
    main()
