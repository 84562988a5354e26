"""From a configuration to a model engine: facts, dtype, threads, weights, memory."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from configs.schema import EngineConfig, ModelConfig
from replicas.engine.llada_engine import LLaDAEngine
from replicas.engine.qwen_engine import QwenEngine
from replicas.engine.rank import EngineRank, KVLimits
from replicas.engine.rank_processes import (
    check_divisible,
    check_kv_memory_on_all,
    load_on_all,
    start_ranks,
)
from replicas.engine.slot_engine import SlotEngine
from replicas.errors import ModelLoadError
from replicas.model_info import ModelInfo, load_model_info
from replicas.models.linear import cpu_has_fast_bfloat16
from replicas.parallel.group import SINGLE_RANK

logger = logging.getLogger(__name__)


def load_engine(config: ModelConfig, path: str | Path, *, progress: bool = True) -> SlotEngine:
    """Loads ``path`` as ``config`` says. Raises ``ModelLoadError`` for whatever cannot be served."""
    engine_config = config.engine
    info = load_model_info(path, max_model_len=engine_config.max_model_len, block_length=config.block_length)
    device = resolve_device(engine_config.device)
    dtype = resolve_dtype(engine_config.dtype, info, device)
    num_threads = engine_config.num_threads or max(1, int(config.resources.num_cpus))
    limits = KVLimits(
        engine_config.max_num_seqs,
        info.max_model_len,
        engine_config.kv_cache_memory_bytes,
        engine_config.kv_memory_fraction,
    )
    ranks = None
    rank = EngineRank(SINGLE_RANK, device)
    try:
        if engine_config.tensor_parallel_size == 1:
            rank.load(info, dtype, num_threads, progress)
            needed = rank.check_kv_memory(limits, 1)
        else:
            check_divisible(info, engine_config.tensor_parallel_size)
            ranks = start_ranks(engine_config.tensor_parallel_size, device)
            rank, memories = load_on_all(ranks, info, dtype, num_threads, progress)
            needed = sum(check_kv_memory_on_all(ranks, rank, limits, memories))
        engine = build_engine(rank.model, info, engine_config)
        if ranks is not None:
            engine.runner.lead(ranks)
    except BaseException:
        if ranks is not None:
            ranks.shutdown()
        raise
    logger.info(
        "%s: %s on %d x %s in %s, %d slots of %d tokens (%.1f MiB of KV)",
        config.name,
        info.architecture,
        engine_config.tensor_parallel_size,
        device,
        dtype,
        engine_config.max_num_seqs,
        info.max_model_len,
        needed / 2**20,
    )
    return engine


def build_engine(model: Any, info: ModelInfo, config: EngineConfig) -> SlotEngine:
    """The engine of the model's family."""
    family = LLaDAEngine if info.is_diffusion else QwenEngine
    return family(
        model,
        info,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens
        or default_num_batched_tokens(model.device, config.max_num_seqs, info.block_length),
        enable_prefix_caching=config.enable_prefix_caching,
        static_decode=can_use_cuda_graphs(model, config),
    )


def default_num_batched_tokens(device: torch.device, max_num_seqs: int, block_length: int | None) -> int:
    """Tokens of a step when the configuration does not say: whoever arrives waits for the running step to end, and on a
    CPU each token counts. A decoding request takes one token, or a finished block and the next one."""
    if device.type == "cuda":
        return max(2048, block_length or 1)
    return 256 + max_num_seqs * (2 * block_length if block_length else 1)


def can_use_cuda_graphs(model: Any, config: EngineConfig) -> bool:
    """Not with several ranks, whose graphs would have to be captured together, and not in float16, where keys past a
    row's end may be NaN."""
    return (
        not config.enforce_eager
        and model.device.type == "cuda"
        and config.tensor_parallel_size == 1
        and model.dtype != torch.float16
    )


def resolve_device(name: str) -> torch.device:
    """``auto`` is a GPU where there is one. Raises ``ModelLoadError`` when CUDA is asked for in vain."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("`device` is `cuda`, but torch sees no CUDA device here")
    return torch.device(name)


def resolve_dtype(name: str, info: ModelInfo, device: torch.device) -> torch.dtype:
    """``auto``: the checkpoint's dtype on a GPU; on a CPU bfloat16 when stored so and the CPU computes in it, else
    float32 (other 16-bit arithmetic is emulated there, several times as slow)."""
    if name != "auto":
        return getattr(torch, name)
    stored = stored_dtype(info)
    if device.type == "cpu" and not (stored is torch.bfloat16 and cpu_has_fast_bfloat16()):
        return torch.float32
    return stored


def stored_dtype(info: ModelInfo) -> torch.dtype:
    """The floating dtype that most of the checkpoint's tensors have (its files' headers, not its config: the
    two may differ); float32 when it cannot be told."""
    sizes: dict[str, int] = {}
    for file in sorted(Path(info.path).glob("*.safetensors")):
        for entry in _safetensors_header(file).values():
            if "data_offsets" in entry:
                begin, end = entry["data_offsets"]
                sizes[entry["dtype"]] = sizes.get(entry["dtype"], 0) + end - begin
    known = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    floats = [name for name in sizes if name in known]
    return known[max(floats, key=lambda name: sizes[name])] if floats else torch.float32


def _safetensors_header(path: Path) -> dict:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read as safetensors: {error}") from error
