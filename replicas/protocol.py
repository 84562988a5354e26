"""Messages that cross actors, and the protocol that every engine implements.

Plain dataclasses of built-in types only: they are pickled between the ingress and the replicas, which
may run different torch builds, and none of them may carry a tensor.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


class FinishReason(enum.StrEnum):
    """Why a request ended. ``stop`` and ``length`` have OpenAI's meaning."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when a request ends.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1.0 are off. ``seed`` None means that the ingress
    chose one; engines always receive an integer or draw one themselves at submit. ``max_tokens`` counts
    new tokens. ``stop_token_ids`` end the request like EOS (the token is reported, as EOS is).

    ``min_p`` (0 is off) drops tokens below that share of the best token's probability, after temperature, as vLLM
    does. ``logit_bias`` holds (token id, addend) pairs. The penalties are OpenAI's (``frequency_penalty``,
    ``presence_penalty``: of generated tokens) and vLLM's (``repetition_penalty``: of prompt and generated tokens).
    ``grammar`` is a grammar in llguidance's dialect of Lark that the whole output must match.
    ``logprobs``: None is none, 0 those of the chosen tokens only, else so many alternatives too; all are of the
    model's own distribution, before bias, penalties, temperature and grammar.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    grammar: str | None = None


#: ``SamplingParams``' penalties and the values at which they do nothing.
NEUTRAL_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class DiffusionParams:
    """Decoding rule of one block-diffusion request (specs of LLaDA2.0 and 2.1 `generate`).

    ``steps`` None means the model's block length, not clamped by ``max_tokens``; a number is honoured as the
    original code does: ``min(steps, max_tokens // minimal_topk)`` forwards at most per block.
    ``threshold``: strict confidence threshold for unmasking. ``editing_threshold`` None selects the LLaDA2.0
    rule; a number selects the LLaDA2.1 rule (token editing), for which ``max_post_steps`` and
    ``num_to_transfer`` count and ``steps`` and ``minimal_topk`` do not.
    """

    steps: int | None = None
    threshold: float = 0.95
    minimal_topk: int = 1
    eos_early_stop: bool = True
    editing_threshold: float | None = None
    max_post_steps: int = 16
    num_to_transfer: int = 1


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request as an engine sees it.

    ``request_id`` is ours and unique among live requests. ``diffusion`` is None for autoregressive models.
    ``resume_token_ids`` are tokens that were already emitted elsewhere: they extend the prompt and count
    against ``max_tokens``, but are not emitted again. ``deadline`` is a ``time.time()`` value in seconds.
    """

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    diffusion: DiffusionParams | None = None
    resume_token_ids: tuple[int, ...] = ()
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of an emitted token, and of the best alternatives (token id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestError:
    """A failed request in a picklable form; ``code`` is one of the ``code`` values of ``replicas.errors``."""

    code: str
    message: str
    param: str | None = None
    retryable: bool = False


@dataclass(slots=True)
class RequestOutput:
    """What one step produced for one request.

    ``new_token_ids`` are final: they are never taken back. EOS is included when it ends the request.
    ``num_cached_tokens`` and ``num_forwards`` are totals for the request so far (prompt tokens taken from
    a prefix cache; forwards in which the request had a token to decide, so for block diffusion the
    denoising forwards).
    """

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    num_cached_tokens: int = 0
    num_forwards: int = 0
    error: RequestError | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class StepOutput:
    """The outputs of one engine step; requests that got nothing in it are absent."""

    outputs: list[RequestOutput] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine can honour; everything else is refused by name at the ingress."""

    supports_batching: bool
    max_num_seqs: int
    max_model_len: int
    block_length: int | None = None
    logprobs: bool = False
    structured_output: bool = False
    penalties: bool = False
    prefix_caching: bool = False


@dataclass(slots=True)
class EngineStats:
    """A snapshot of an engine's load. Counters (``num_*``, ``steps``) only grow.

    ``waiting``, ``running``: requests. ``queued_tokens``: prompt tokens not computed yet plus new tokens
    still allowed, over all live requests. ``kv_usage``: 0 to 1. ``steps``: engine steps; ``num_forwards``:
    model forwards. ``num_decode_tokens``: emitted tokens; ``num_denoise_row_forwards``: rows of denoising
    in all forwards (block diffusion), so tokens / rows is the committed tokens per forward.
    ``max_running_seen``: the largest number of requests that one forward has served.
    """

    waiting: int = 0
    running: int = 0
    free_slots: int = 0
    total_slots: int = 0
    kv_usage: float = 0.0
    queued_tokens: int = 0
    steps: int = 0
    num_forwards: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_denoise_row_forwards: int = 0
    num_cached_tokens: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)
    max_running_seen: int = 0
    last_step_age_s: float = 0.0


@runtime_checkable
class Engine(Protocol):
    """What a replica needs of an engine. ``submit`` and ``abort`` may be called from any thread."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request. Raises ``InvalidRequestError`` (its field named) for one that can never run."""

    def abort(self, request_id: str) -> None:
        """Ends a request in any phase; unknown and finished ids are ignored. Its slot is free within a
        step, and its last output has ``finish_reason`` ABORT."""

    def steps(self) -> AsyncIterator[StepOutput]:
        """Outputs, in order, for the one consumer of this engine. Ends at ``shutdown``; raises
        ``EngineDeadError`` when the step loop has died."""

    def stats(self) -> EngineStats: ...

    def check_health(self) -> None:
        """Raises ``EngineDeadError`` when the engine is dead or has work but makes no progress."""

    def shutdown(self) -> None:
        """Stops the loop, frees memory; idempotent."""
