"""Tensor parallelism of an engine: its rank processes, and a model loaded on all of them."""

from __future__ import annotations

from functools import partial

import torch

from replicas.engine.rank import EngineRank, KVLimits
from replicas.errors import ModelLoadError
from replicas.model_info import ModelInfo
from replicas.models.sharding import Sharding
from replicas.parallel.group import TensorParallelGroup
from replicas.parallel.local import LocalLauncher
from replicas.parallel.ranks import Launcher, Ranks
from replicas.parallel.ray_actors import RayLauncher, current_placement_group


def check_divisible(info: ModelInfo, size: int) -> None:
    """Raises ``ModelLoadError`` for a model whose heads or experts do not fit ``size`` ranks: what ``load_model`` finds
    too, but before any process is started."""
    sharding = Sharding(info.path, TensorParallelGroup(0, size))
    heads = info.config.get("num_attention_heads")
    kv_heads = info.config.get("num_key_value_heads") or heads
    if isinstance(heads, int):
        sharding.split("num_attention_heads", heads)
    if isinstance(kv_heads, int) and kv_heads > 0:
        sharding.kv_heads(kv_heads)
    width = info.config.get("moe_intermediate_size")
    if isinstance(width, int) and info.config.get("num_experts"):
        sharding.split("moe_intermediate_size", width)


def start_ranks(size: int, device: torch.device) -> Ranks:
    """Ranks 1 to ``size`` - 1, without a model yet: actors in the placement group that this process runs in, child
    processes where there is none.

    Raises ``ModelLoadError`` when there are too few GPUs, or when they do not start.
    """
    placement_group = current_placement_group()
    launcher: Launcher
    if placement_group is not None:
        launcher = RayLauncher(placement_group, size)
    else:
        if device.type == "cuda" and torch.cuda.device_count() < size:
            raise ModelLoadError(
                f"`tensor_parallel_size` {size} needs as many CUDA devices, but torch sees {torch.cuda.device_count()}"
            )
        launcher = LocalLauncher()
    return Ranks(size, EngineRank, launcher, device=device.type)


def load_on_all(
    ranks: Ranks, info: ModelInfo, dtype: torch.dtype, num_threads: int | None, progress: bool = False
) -> tuple[EngineRank, list[str]]:
    """Loads a model on all ranks at the same time; rank 0, and what ``EngineRank.load`` says on each. An earlier model
    is dropped. Raises ``ModelLoadError``; the ranks then go on."""
    rank = EngineRank(ranks.group, ranks.device)
    memories = ranks.call(
        "load", info, dtype, num_threads, local=partial(rank.load, info, dtype, num_threads, progress)
    )
    return rank, memories


def check_kv_memory_on_all(
    ranks: Ranks, rank: EngineRank, limits: KVLimits, memories: list[str]
) -> list[int]:
    """Bytes of KV memory on each rank. Raises ``ModelLoadError`` when one has too few."""
    num_ranks = max(memories.count(memory) for memory in memories)
    return ranks.call(
        "check_kv_memory", limits, num_ranks, local=partial(rank.check_kv_memory, limits, num_ranks)
    )
