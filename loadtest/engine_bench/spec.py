"""What one worker process is told, and the requests that every system gets alike. Imports no torch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

SYSTEMS = ("blockserve", "vllm", "vllm-eager", "transformers")
#: Model lengths are rounded up to this, vLLM's page size here.
PAGE_TOKENS = 32
#: A step of our engine and of vLLM computes at most so many tokens.
MAX_NUM_BATCHED_TOKENS = 2048
#: The mixed row of ``--ttft``: a long prompt, and a short one that arrives later.
MIXED_LONG_PROMPT, MIXED_SHORT_PROMPT, MIXED_OUTPUT, MIXED_DELAY_S = 1600, 16, 16, 0.5


class BenchError(Exception):
    """Ends the benchmark before it starts; one line that names what is wrong."""


@dataclass(frozen=True)
class WorkerSpec:
    """One process's work; JSON on its stdin.

    ``task``: ``check`` (tokens of a batch and of each request alone), ``throughput``, ``slots`` (one live request on
    an engine with ``max_num_seqs`` slots and on one with a single slot) or ``ttft``. ``round`` keys the prompts, so
    that every system of a round gets the same ones. ``steps``, ``threshold``: block diffusion only.
    """

    task: str
    system: str
    checkpoint: str
    dtype: str
    threads: int
    max_num_seqs: int
    max_model_len: int
    prompt_tokens: int
    output_tokens: int
    concurrency: tuple[int, ...] = ()
    round: int = 0
    seed: int = 0
    steps: int | None = None
    threshold: float = 0.95
    ttft: tuple[int, ...] = ()
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS


@dataclass(frozen=True)
class TimedRequest:
    """Greedy, exactly ``max_tokens`` new tokens. ``arrival_s``: seconds after the start of the run."""

    prompt_token_ids: list[int] = field(repr=False)
    max_tokens: int
    arrival_s: float = 0.0


def random_prompts(
    seed: int, key: str, count: int, length: int, vocab_size: int, excluded: Sequence[int] = ()
) -> list[list[int]]:
    """``count`` lists of ``length`` token ids, the same for the same ``seed`` and ``key``. ``excluded`` ids (the mask
    token) do not occur."""
    generator = np.random.default_rng([seed, zlib.crc32(key.encode())])
    allowed = np.setdiff1d(np.arange(vocab_size), np.asarray(excluded, dtype=np.int64))
    return generator.choice(allowed, size=(count, length)).tolist()
