"""What can be read from a checkpoint directory without torch: family, limits, special tokens.

The ingress reads it to check limits before a replica exists; engines read the same, so both agree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replicas.errors import ModelLoadError

#: architecture name in config.json -> family
AUTOREGRESSIVE_ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
    "Qwen3MoeForCausalLM",
)
#: Hybrids of linear and full attention: `backend: vllm` serves their text, the torch engine does not.
VLLM_ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
DIFFUSION_ARCHITECTURES = ("LLaDA2MoeModelLM",)
KNOWN_ARCHITECTURES = AUTOREGRESSIVE_ARCHITECTURES + VLLM_ARCHITECTURES + DIFFUSION_ARCHITECTURES
#: Block length of the published LLaDA2 checkpoints; their config.json does not hold it.
LLADA2_BLOCK_LENGTH = 32
LLADA2_MASK_TOKEN = "<|mask|>"


@dataclass(frozen=True)
class ModelInfo:
    """Facts of one checkpoint.

    ``eos_token_ids``: every id that ends a generation. ``block_length`` and ``mask_token_id`` are None for
    autoregressive models. ``max_model_len`` is in tokens; for block diffusion it is a multiple of
    ``block_length``.
    """

    path: Path
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    block_length: int | None = None
    mask_token_id: int | None = None
    config: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_diffusion(self) -> bool:
        return self.block_length is not None


def load_model_info(
    path: str | Path, *, max_model_len: int | None = None, block_length: int | None = None
) -> ModelInfo:
    """Reads config.json, generation_config.json, tokenizer files and the golden sets' meta.json.

    Raises ``ModelLoadError`` for a missing or malformed config.json, an architecture that is not known, and
    for checkpoints that are known but not servable (LLaDA2.2 block routing, fused experts of dFactory).
    """
    path = Path(path)
    config = _read_json(path / "config.json", required=True)
    architectures = config.get("architectures") or []
    architecture = architectures[0] if architectures else ""
    if config.get("model_type") == "llada2_moe_veomni":
        raise ModelLoadError(
            f"{path}: model_type `llada2_moe_veomni` holds fused expert tensors; convert it to the "
            "`llada2_moe` layout (one tensor per expert) with the training framework's script first"
        )
    if architecture not in KNOWN_ARCHITECTURES:
        known = ", ".join(KNOWN_ARCHITECTURES)
        raise ModelLoadError(f"{path}: unknown architecture {architecture!r} in config.json; known: {known}")
    # Models with a vision part keep the numbers of their language part here.
    config |= config.get("text_config") or {}
    meta = _read_json(path / "meta.json")
    generation = _read_json(path / "generation_config.json")
    tokenizer = _read_json(path / "tokenizer_config.json")
    added = _added_tokens(path)

    limit = int(config.get("max_position_embeddings", 2048))
    if max_model_len is not None:
        if max_model_len < 1 or max_model_len > limit:
            raise ModelLoadError(
                f"{path}: `max_model_len` must be 1 to {limit} (max_position_embeddings), got {max_model_len}"
            )
        limit = max_model_len

    if architecture not in DIFFUSION_ARCHITECTURES:
        if block_length is not None:
            raise ModelLoadError(
                f"{path}: `block_length` applies to LLaDA2 models only, not to {architecture}"
            )
        eos = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
        eos = eos or _ids(added.get(_token_text(tokenizer.get("eos_token"))))
        return ModelInfo(path, architecture, int(config["vocab_size"]), limit, eos, config=config)

    for key in ("expert_capacity", "block_routing", "use_block_routing"):
        if config.get(key):
            raise ModelLoadError(
                f"{path}: `{key}` in config.json marks a LLaDA2.2 checkpoint (block routing), which is not "
                "supported; LLaDA2.0 and 2.1 are"
            )
    length = block_length or meta.get("block_length") or config.get("block_length") or LLADA2_BLOCK_LENGTH
    mask = meta.get("mask_id", config.get("mask_token_id", added.get(LLADA2_MASK_TOKEN)))
    if mask is None:
        raise ModelLoadError(
            f"{path}: no mask token: neither `mask_token_id` in config.json nor {LLADA2_MASK_TOKEN!r} among the "
            "tokenizer's added tokens"
        )
    eos = (
        _ids(meta.get("eos_id"))
        or _ids(generation.get("eos_token_id"))
        or _ids(config.get("eos_token_id"))
        or _ids(config.get("pad_token_id"))
    )
    if not eos:
        raise ModelLoadError(f"{path}: no EOS token: `eos_token_id` and `pad_token_id` are both absent")
    limit = limit // length * length
    if limit == 0:
        raise ModelLoadError(f"{path}: the context is shorter than one block of {length} tokens")
    return ModelInfo(
        path, architecture, int(config["vocab_size"]), limit, eos, int(length), int(mask), config=config
    )


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ModelLoadError(f"{path.parent}: no {path.name}; is this a checkpoint directory?") from None
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object")
    return data


def _added_tokens(path: Path) -> dict[str, int]:
    tokens = _read_json(path / "tokenizer.json").get("added_tokens") or []
    return {token["content"]: int(token["id"]) for token in tokens}


def _token_text(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else str(token or "")


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
