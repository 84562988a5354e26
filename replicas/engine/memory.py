"""How much memory KV slots may take, decided at start: an engine never runs out of KV while it serves."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from replicas.errors import ModelLoadError
from replicas.model_info import ModelInfo

logger = logging.getLogger(__name__)

#: Of free memory; KV slots and other replicas want the rest.
_MAX_WEIGHTS_SHARE = 0.5
_CGROUP = Path("/sys/fs/cgroup")


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``: what CUDA says, or on a CPU the least of the machine's
    available memory and what the container's limit leaves."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [_machine_available()]
    maximum, current = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
    if maximum is not None and current is not None:
        # The page cache counts as used, but is given up on demand; a loaded checkpoint fills it.
        limits.append(maximum - current + _cgroup_file_cache())
    return max(0, min(limits))


def two_copies_are_too_many(info: ModelInfo) -> bool:
    """Whether the weights of a checkpoint stored in 16 bits, held in float32 and in 16 bits, would take more than half
    of the memory that is free now: for all ranks of a model together, which load it at the same time."""
    stored = sum(file.stat().st_size for file in Path(info.path).glob("*.safetensors"))
    too_many = 3 * stored > _MAX_WEIGHTS_SHARE * free_memory_bytes(torch.device("cpu"))
    if too_many:
        logger.info("%s: one copy of the weights only, %.1f GiB are stored", info.path, stored / 2**30)
    return too_many


def check_kv_memory(
    *,
    bytes_per_slot: int,
    max_num_seqs: int,
    max_model_len: int,
    device: torch.device,
    kv_cache_memory_bytes: int | None,
    kv_memory_fraction: float,
    num_ranks: int = 1,
) -> int:
    """Bytes that the slots of this rank need. Raises ``ModelLoadError`` with all numbers when they do not fit the
    budget: ``kv_cache_memory_bytes``, or else ``kv_memory_fraction`` of the memory free now, of which each of the
    ``num_ranks`` tensor-parallel ranks that share it gets its part."""
    needed = bytes_per_slot * max_num_seqs
    if kv_cache_memory_bytes is not None:
        available, source = kv_cache_memory_bytes, "`kv_cache_memory_bytes`"
    else:
        free = free_memory_bytes(device)
        available = int(free * kv_memory_fraction) // num_ranks
        source = f"`kv_memory_fraction` {kv_memory_fraction:g} of {free} bytes free on {device}"
        if num_ranks > 1:
            source += f" for {num_ranks} ranks"
    if needed > available:
        raise ModelLoadError(
            f"the KV slots do not fit: {needed} bytes are needed for `max_num_seqs` {max_num_seqs} slots of "
            f"`max_model_len` {max_model_len} tokens ({bytes_per_slot} bytes each), but {available} are "
            f"available ({source}); {available // bytes_per_slot} slots would fit"
        )
    return needed


def _machine_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # No procfs (macOS): physical memory is the best that can be had without further packages.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _cgroup_file_cache() -> int:
    try:
        for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
