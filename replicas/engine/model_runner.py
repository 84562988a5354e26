"""One model forward over the flattened tokens of all requests of a step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from replicas.attention.kv_cache import KVCache
from replicas.attention.metadata import CommonAttentionMetadata
from replicas.attention.virtual_batch import make_block_causal_virtual_batches
from replicas.engine.request_state import RowInput
from replicas.engine.static_decode import StaticDecode
from replicas.errors import EngineDeadError
from replicas.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

#: Rows of logits that exist at once: float32 [rows, vocabulary] of all masked positions would be gigabytes.
LOGITS_ROWS = 256


@dataclass(frozen=True)
class StepInput:
    """All that a forward depends on, in numbers only: every tensor-parallel rank runs the same one.

    ``token_ids`` int64 [T]: the tokens of all rows, one row after another. ``starts``, ``lengths``, ``slots`` int32
    [R]: row r computes ``lengths[r]`` tokens at positions ``starts[r]``, ... of KV slot ``slots[r]``. ``logit_rows``
    int64 [L]: indices into T whose logits are wanted. ``copies``: (from slot, to slot, tokens): prefixes that are
    copied before the forward, in this order.
    """

    token_ids: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    slots: np.ndarray
    logit_rows: np.ndarray
    copies: tuple[tuple[int, int, int], ...] = field(default=())

    @classmethod
    def of(
        cls, rows: Sequence[tuple[int, RowInput]], copies: Sequence[tuple[int, int, int]] = ()
    ) -> StepInput:
        """From (slot, input) pairs; logits are wanted at each row's ``decide``."""
        lengths = np.array([len(row.token_ids) for _, row in rows], dtype=np.int32)
        first = np.cumsum(lengths) - lengths
        return cls(
            token_ids=np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for _, row in rows]),
            starts=np.array([row.start for _, row in rows], dtype=np.int32),
            lengths=lengths,
            slots=np.array([slot for slot, _ in rows], dtype=np.int32),
            logit_rows=np.concatenate(
                [
                    np.asarray(row.decide, dtype=np.int64) + start
                    for (_, row), start in zip(rows, first, strict=True)
                ]
            ),
            copies=tuple(copies),
        )

    @property
    def positions(self) -> np.ndarray:
        """int64 [T]"""
        first = np.cumsum(self.lengths) - self.lengths
        return np.arange(len(self.token_ids)) + np.repeat(self.starts - first, self.lengths)


class ModelRunner:
    """Owns the KV memory and counts what it runs.

    A slot is one page of the KV cache: row ``i`` of the block table holds a slot number, and position p of
    slot s is written at ``s * max_model_len + p``. ``block_length`` None means causal attention; a number
    means that every block of a request's query range becomes a virtual request of its own.

    With tensor parallelism there is one per rank, and that of rank 0 leads: see ``lead``.

    ``static_decode``: steps that only decode run in a few fixed shapes (``StaticDecode``), on a GPU as CUDA graphs.
    """

    def __init__(
        self,
        model: Any,
        num_slots: int,
        max_model_len: int,
        block_length: int | None,
        *,
        static_decode: bool = False,
    ) -> None:
        self._model = model
        self._num_slots = num_slots
        self._max_model_len = max_model_len
        self._block_length = block_length
        self._kv_cache: Any = KVCache.allocate(model, num_slots, max_model_len)
        self._static: StaticDecode | None = None
        if static_decode:
            self._static = StaticDecode(
                model,
                self._kv_cache,
                num_slots,
                max_model_len,
                block_length or 1,
                use_cuda_graphs=model.device.type == "cuda",
            )
        #: Forwards in a fixed shape, of all.
        self.num_static_forwards = 0
        self._ranks: Ranks | None = None
        self._owns_ranks = False
        #: The forward whose logits were not read to the end: other ranks wait in it.
        self._unread: Iterator[torch.Tensor] | None = None
        self.num_forwards = 0
        #: Tokens computed that belong to a prompt (or to what a resumed request brought along).
        self.num_prefill_tokens = 0
        #: Rows that denoised a block, over all forwards.
        self.num_denoise_rows = 0
        #: The largest number of requests that one forward has served.
        self.max_requests = 0

    def lead(self, ranks: Ranks, *, owned: bool = True) -> None:
        """Lets the other ``ranks``, which have loaded the same model, run every forward of this one. ``owned``: they
        end with ``close``. Raises ``BlockserveError`` when one cannot allocate its KV memory."""
        ranks.call("allocate", self._num_slots, self._max_model_len, self._block_length)
        self._ranks, self._owns_ranks = ranks, owned

    def forward(
        self, rows: Sequence[tuple[int, RowInput]], copies: Sequence[tuple[int, int, int]] = ()
    ) -> Iterator[torch.Tensor]:
        """One forward for (slot, input) pairs. Yields logits float32 [n, vocab_size] of the decided positions, in the
        order of ``rows``, at most ``LOGITS_ROWS`` at a time; the caller may overwrite them. To be read to the end.

        Raises ``EngineDeadError`` when the other ranks cannot go on with this one.
        """
        step = StepInput.of(rows, copies)
        yield from self.run(step) if self._ranks is None else self._run_on_all(self._ranks, step)
        self.num_prefill_tokens += sum(row.num_prompt_tokens for _, row in rows)
        self.max_requests = max(self.max_requests, len(rows))
        if self._block_length is not None:
            self.num_denoise_rows += sum(bool(row.decide) for _, row in rows)

    @torch.inference_mode()
    def run(self, step: StepInput) -> Iterator[torch.Tensor]:
        """The part that every rank runs: copies, forward, logits in chunks."""
        for source, target, num_tokens in step.copies:
            self._kv_cache.copy_prefix(source, target, num_tokens)
        for part in self._hidden(step).split(LOGITS_ROWS):
            if len(part):
                yield self._model.compute_logits(part)
        self.num_forwards += 1

    def _hidden(self, step: StepInput) -> torch.Tensor:
        """Final hidden states of the rows whose logits are wanted."""
        if self._static is not None and self._static.fits(step.lengths, step.slots):
            self.num_static_forwards += 1
            return self._static.forward(step.token_ids, step.starts, step.slots, step.logit_rows)
        positions = step.positions
        return self._model.forward(
            self._to_device(step.token_ids),
            self._to_device(positions),
            self._kv_cache,
            self._metadata(step, positions),
            output_rows=self._to_device(step.logit_rows),
        )

    def num_forwards_by_rank(self) -> list[int]:
        """Asks every rank how many forwards it has run; equal numbers unless something is very wrong."""
        if self._ranks is None:
            return [self.num_forwards]
        self._read_to_the_end()
        return self._ranks.call("num_forwards", local=lambda: self.num_forwards)

    def check_health(self) -> None:
        """Raises ``EngineDeadError`` when another rank has ended; callable from any thread."""
        if self._ranks is not None:
            self._ranks.check_health()

    def abort(self) -> None:
        """Ends the other ranks at once, and with them a forward that hangs; callable from any thread."""
        if self._ranks is not None:
            self._ranks.kill()

    def close(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            try:
                self._read_to_the_end()
            except EngineDeadError as error:
                logger.warning("the last forward did not end: %s", error)
            if self._owns_ranks:
                ranks.shutdown()
        self._model = self._kv_cache = self._static = None

    def _run_on_all(self, ranks: Ranks, step: StepInput) -> Iterator[torch.Tensor]:
        self._read_to_the_end()
        ranks.send("run", step)
        self._unread = self._run_as_leader(ranks, step)
        # Not `yield from`, which would close it when the reader gives up.
        for part in self._unread:  # noqa: UP028
            yield part

    def _run_as_leader(self, ranks: Ranks, step: StepInput) -> Iterator[torch.Tensor]:
        try:
            yield from self.run(step)
            if self._model.device.type == "cuda":
                # A rank's end ends kernels that wait for it: nothing that was computed since may be used.
                torch.cuda.current_stream(self._model.device).synchronize()
                ranks.check_health()
        except Exception as error:
            raise ranks.fail(error) from error
        self._unread = None

    def _read_to_the_end(self) -> None:
        """A reader may fail between two parts of the logits; the other ranks do not know."""
        unread, self._unread = self._unread, None
        for _ in unread or ():
            pass

    def _metadata(self, step: StepInput, positions: np.ndarray) -> CommonAttentionMetadata:
        query_start_loc = np.zeros(len(step.lengths) + 1, dtype=np.int32)
        np.cumsum(step.lengths, out=query_start_loc[1:])
        seq_lens = step.starts + step.lengths
        slot_mapping = np.repeat(step.slots.astype(np.int64), step.lengths) * self._max_model_len + positions
        metadata = CommonAttentionMetadata(
            query_start_loc=self._to_device(query_start_loc),
            query_start_loc_cpu=torch.from_numpy(query_start_loc),
            seq_lens=self._to_device(seq_lens),
            num_reqs=len(step.lengths),
            num_actual_tokens=len(step.token_ids),
            max_query_len=int(step.lengths.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self._to_device(step.slots[:, None]),
            slot_mapping=self._to_device(slot_mapping),
            causal=self._block_length is None,
        )
        if self._block_length is None:
            return metadata
        return make_block_causal_virtual_batches(metadata, self._block_length)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device, non_blocking=True)
