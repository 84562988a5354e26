"""Which requests take part in the next forward, and with how many tokens. First come, first served.

Imports no torch: it only counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from replicas.engine.request_state import RequestState
from replicas.engine.slots import SlotAllocator

#: Prompt tokens of an autoregressive request that a step computes at least, however many requests decode.
_MIN_PREFILL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """``num_tokens`` of ``state`` are computed in the next forward."""

    state: RequestState
    num_tokens: int


class Scheduler:
    """Admission and chunked prefill.

    Admission is by worst case: a request starts only when a slot is free, and a slot holds the longest
    context that was accepted at submit, so nothing that runs is ever evicted.

    Requests that decode take part in every step, before any prefill: a long prompt cannot stop them. Their
    queries are few (1 token each, or 1 to 2 blocks). Prompts share what is left of
    ``max_num_batched_tokens``, in order of arrival; the first of them always moves on by at least a block (or
    16 tokens), so decoding requests cannot stop it either. A step therefore computes at most
    ``max_num_batched_tokens`` tokens, or what the decoding requests need plus that minimum, where this is
    more.
    """

    def __init__(
        self, slots: SlotAllocator, *, max_num_batched_tokens: int, block_length: int | None = None
    ) -> None:
        self._slots = slots
        self._budget = max_num_batched_tokens
        self._min_prefill = block_length or max(1, min(_MIN_PREFILL_TOKENS, max_num_batched_tokens // 2))
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self._live: dict[str, RequestState] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: str) -> RequestState | None:
        return self._live.get(request_id)

    def live(self) -> Iterator[RequestState]:
        return iter(list(self._live.values()))

    def add(self, state: RequestState) -> None:
        self._live[state.request_id] = state
        self.waiting.append(state)

    def remove(self, state: RequestState) -> None:
        """Forgets a request in whatever phase it is and frees its slot."""
        if self._live.pop(state.request_id, None) is None:
            return
        if state.slot is None:
            self.waiting.remove(state)
            return
        self.running.remove(state)
        self._slots.free_slot(state.request_id)
        state.slot = None

    def schedule(self) -> list[ScheduledRow]:
        """Admits what fits and returns the rows of the next forward; empty when nothing is live."""
        while self.waiting and self._slots.num_free:
            state = self.waiting.popleft()
            state.slot = self._slots.allocate_slot(state.request_id)
            self.running.append(state)
        rows = [ScheduledRow(state, state.num_pending_tokens) for state in self.running if state.started]
        left = self._budget - sum(row.num_tokens for row in rows)
        first = True
        for state in self.running:
            if state.started:
                continue
            num_tokens = state.chunk(max(left, self._min_prefill) if first else left)
            first = False
            if num_tokens:
                rows.append(ScheduledRow(state, num_tokens))
                left -= num_tokens
        return rows
