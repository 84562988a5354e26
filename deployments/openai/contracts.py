"""What the ingress knows of a model, and what it needs from whoever dispatches requests to replicas."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from configs.schema import ModelConfig
from deployments.openai.chat_template import PromptEncoder
from deployments.openai.detokenize import TokenTable
from replicas.errors import ModelLoadError
from replicas.model_info import ModelInfo, load_model_info
from replicas.protocol import EngineCapabilities, EngineStats, GenerationRequest, RequestOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelEntry:
    """One served model, as the ingress sees it: no weights, nothing that needs a replica.

    ``created`` (Unix seconds) is what ``/v1/models`` reports.
    """

    config: ModelConfig
    info: ModelInfo
    tokenizer: PreTrainedTokenizerBase
    capabilities: EngineCapabilities
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.config.name

    @cached_property
    def encoder(self) -> PromptEncoder:
        return PromptEncoder(self.tokenizer)

    @cached_property
    def token_table(self) -> TokenTable:
        return TokenTable(self.tokenizer)

    def warm_up(self) -> None:
        """Builds what the first request would otherwise wait for (a second for a large vocabulary)."""
        _ = self.encoder, self.token_table


@dataclass(frozen=True, slots=True)
class ModelState:
    """Whether a model can serve now. ``reason`` says why not ("" when ready); ``replicas`` maps the ids of
    the replicas that are up to their latest load snapshots."""

    ready: bool
    reason: str = ""
    replicas: Mapping[str, EngineStats] = field(default_factory=dict)


@runtime_checkable
class Dispatcher(Protocol):
    """Places requests on replicas and hands back their outputs. Used on one event loop."""

    def stream(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, in order; the last one has a ``finish_reason``.

        A failure arrives as an output with ``error`` set and ``finish_reason`` ERROR, never as an exception.
        ``aclose()`` and cancellation of the reader abort the request on its replica.
        """
        ...

    async def model_states(self) -> dict[str, ModelState]:
        """The state of every model of the application, by name; quick, and never raises."""
        ...


def load_model_entry(
    config: ModelConfig, path: str | Path, *, capabilities: EngineCapabilities | None = None
) -> ModelEntry:
    """Reads a checkpoint directory's facts and tokenizer (no torch model is built, no remote code is run).

    ``path`` is the resolved local directory of ``config.path``. Without ``capabilities`` those of the torch
    engine are derived from the configuration. Raises ``ModelLoadError``.
    """
    info = load_model_info(path, max_model_len=config.engine.max_model_len, block_length=config.block_length)
    if capabilities is None:
        capabilities = EngineCapabilities(
            supports_batching=config.engine.max_num_seqs > 1,
            max_num_seqs=config.engine.max_num_seqs,
            max_model_len=info.max_model_len,
            block_length=info.block_length,
            logprobs=True,
            # What a grammar or a count of earlier tokens means where a block is decided out of order is not settled.
            structured_output=not info.is_diffusion,
            penalties=not info.is_diffusion,
        )
    entry = ModelEntry(config, info, load_tokenizer(path), capabilities)
    entry.warm_up()
    return entry


def load_tokenizer(path: str | Path) -> Any:
    """The fast tokenizer of a checkpoint directory. Raises ``ModelLoadError`` when there is none."""
    from transformers import AutoTokenizer  # imported late: it takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{path}: no tokenizer could be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ModelLoadError(f"{path}: a tokenizer.json is needed (the slow tokenizer is not supported)")
    return tokenizer
