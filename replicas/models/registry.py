"""From a checkpoint's architecture to a loaded model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from replicas.errors import ModelLoadError
from replicas.model_info import VLLM_ARCHITECTURES, ModelInfo
from replicas.models.decoder import DecoderModel
from replicas.models.dense import load_dense
from replicas.models.llada2_moe import load_llada2_moe
from replicas.models.qwen3_moe import load_qwen3_moe
from replicas.models.sharding import Sharding
from replicas.models.weights import CheckpointWeights
from replicas.parallel.group import SINGLE_RANK, TensorParallelGroup

Loader = Callable[[ModelInfo, CheckpointWeights, Sharding], DecoderModel]

LOADERS: dict[str, Loader] = {
    "Qwen3ForCausalLM": load_dense,
    "Qwen2ForCausalLM": load_dense,
    "LlamaForCausalLM": load_dense,
    "Qwen3MoeForCausalLM": load_qwen3_moe,
    "LLaDA2MoeModelLM": load_llada2_moe,
}


def load_model(
    info: ModelInfo,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = True,
    parallel: TensorParallelGroup = SINGLE_RANK,
    compact: bool = False,
) -> DecoderModel:
    """Builds the model of ``info``, or the part of it that a rank of ``parallel`` holds, from its safetensors files,
    with a progress bar on stderr. ``compact``: where weights can be held in 16 bits for products in float32, only so,
    and not in float32 beside it: a third of the memory, and prompts take about a third longer.

    Raises ``ModelLoadError`` for an architecture without a loader, for a configuration that lacks a field or
    asks for what is not implemented, for sizes that do not fit the number of ranks, and for missing, misshapen or
    surplus tensors.
    """
    loader = LOADERS.get(info.architecture)
    if info.architecture in VLLM_ARCHITECTURES:
        raise ModelLoadError(f"{info.path}: {info.architecture} needs `engine.backend: vllm`")
    if loader is None:
        raise ModelLoadError(
            f"{info.path}: unknown architecture {info.architecture!r}; known: {', '.join(LOADERS)}"
        )
    with CheckpointWeights(
        info.path, dtype=dtype, device=device, progress=progress, compact=compact
    ) as weights:
        try:
            return loader(info, weights, Sharding(info.path, parallel))
        except KeyError as error:
            raise ModelLoadError(f"{info.path}: config.json lacks {error}") from error
