"""The engine of a replica: a scheduler, a model engine, and one thread that steps them.

SIGNATURES FIRST: bodies follow.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from configs.schema import ModelConfig
from replicas.model_info import ModelInfo
from replicas.protocol import EngineCapabilities, EngineStats, GenerationRequest, RequestOutput, StepOutput

#: (request_id, block index, [(absolute position, token id)...]): called once per denoising forward of a request.
Trace = Callable[[str, int, list[tuple[int, int]]], None]


class EngineCore:
    """Implements ``replicas.protocol.Engine`` on torch."""

    @classmethod
    def from_config(cls, config: ModelConfig, path: str | Path) -> EngineCore:
        """Loads the checkpoint directory ``path``; the step thread starts with ``start`` or ``steps``.

        Raises ``ModelLoadError`` for a checkpoint that cannot be served, and, with all numbers named, when the
        KV slots do not fit into memory.
        """
        raise NotImplementedError

    @classmethod
    def from_model(
        cls,
        model: Any,
        info: ModelInfo,
        *,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 2048,
        step_timeout_s: float = 120.0,
        ban_mask_token: bool = True,
        reference_stopping: bool = False,
        trace: Trace | None = None,
    ) -> EngineCore:
        """An engine around a loaded model (tests, verification).

        ``reference_stopping`` (block diffusion): stop exactly where the original `generate` stops, so that the
        number of denoising forwards equals its too. A server stops a few forwards earlier, with equal tokens.
        """
        raise NotImplementedError

    info: ModelInfo
    capabilities: EngineCapabilities

    def submit(self, request: GenerationRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def steps(self) -> AsyncIterator[StepOutput]:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...

    def start(self) -> None:
        """Starts the step thread; idempotent. ``steps`` does it too."""

    def step(self) -> StepOutput:
        """One step in the caller's thread (tests, verification); not to be mixed with ``start``."""
        raise NotImplementedError

    def has_work(self) -> bool:
        raise NotImplementedError

    def generate(self, requests: Iterable[GenerationRequest]) -> dict[str, RequestOutput]:
        """Submits all, steps until they end, in the caller's thread; returns one merged output per request
        (all token ids, all logprobs, the last counters)."""
        raise NotImplementedError
