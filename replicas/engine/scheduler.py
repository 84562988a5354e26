"""Which requests take part in the next forward, and with how many tokens. First come, first served.

Imports no torch: it only counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from replicas.engine.prefix_cache import PrefixCache, common_prefix_length
from replicas.engine.request_state import RequestState
from replicas.engine.slots import SlotAllocator

#: Prompt tokens of an autoregressive request that a step computes at least, however many requests decode.
_MIN_PREFILL_TOKENS = 16
#: Tokens that an autoregressive request must save to wait for another one that computes them.
_MIN_SHARED_TOKENS = 16


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
    ``max_num_batched_tokens``: first, in order of arrival, each takes at most half of what those before it
    left (at least a block), so that a long prompt cannot stop short ones; what then remains is handed out in
    order of arrival. The first of them always moves on by at least a block (or 16 tokens), so decoding
    requests cannot stop it either. A step therefore computes at most ``max_num_batched_tokens`` tokens, or
    what the decoding requests need plus that minimum, where this is more.

    With a ``prefix_cache`` a request waits, in its slot, while one ahead of it still has to compute a prefix
    that both share, and then copies it. Who is waited for is ahead in order of arrival, and the first in
    order waits for nobody, so there is no deadlock.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        *,
        max_num_batched_tokens: int,
        block_length: int | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self._slots = slots
        self._budget = max_num_batched_tokens
        self._block_length = block_length
        self._min_prefill = block_length or max(1, min(_MIN_PREFILL_TOKENS, max_num_batched_tokens // 2))
        self._min_shared = block_length or _MIN_SHARED_TOKENS
        self._prefix_cache = prefix_cache
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self._live: dict[str, RequestState] = {}
        #: Whom a running request waits for, and until how many tokens that one has computed.
        self._deferred: dict[RequestState, tuple[RequestState, int]] = {}

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
        self._deferred.pop(state, None)
        if self._prefix_cache is None:
            self._slots.free_slot(state.request_id)
        else:
            self._prefix_cache.free(state)
        state.slot = None

    def schedule(self) -> list[ScheduledRow]:
        """Admits what fits and returns the rows of the next forward; empty when nothing is live.

        Copies of prefixes are left in the prefix cache; they belong to the same forward.
        """
        self._resume_deferred()
        self._admit()
        rows = [ScheduledRow(state, state.num_pending_tokens) for state in self.running if state.started]
        left = max(0, self._budget - sum(row.num_tokens for row in rows))
        prefills = [state for state in self.running if not state.started and state not in self._deferred]
        shares: list[int] = []
        for state in prefills:
            share = self._half(left)
            shares.append(state.chunk(share if shares else max(share, self._min_prefill)))
            left = max(0, left - shares[-1])
        for state, share in zip(prefills, shares, strict=True):
            num_tokens = state.chunk(share + left) if left else share
            left -= num_tokens - share
            if num_tokens:
                rows.append(ScheduledRow(state, num_tokens))
        return rows

    def _half(self, budget: int) -> int:
        if self._block_length is None:
            return budget // 2
        # One block is the least that can be computed.
        return max(budget // 2, min(budget, self._block_length))

    def _admit(self) -> None:
        while self.waiting and self._slots.num_free:
            state = self.waiting.popleft()
            if self._prefix_cache is None:
                state.slot = self._slots.allocate_slot(state.request_id)
            else:
                self._prefix_cache.allocate(state)
            self.running.append(state)
            if self._prefix_cache is not None:
                self._defer(state)

    def _resume_deferred(self) -> None:
        """Ends the wait for those who have computed the shared prefix, or have ended; in the latter case
        their slot is still worth a look."""
        if self._prefix_cache is None:
            return
        for state, (leader, length) in list(self._deferred.items()):
            if leader.slot is None or leader.num_computed_tokens >= length:
                del self._deferred[state]
                self._prefix_cache.extend(state)
                self._defer(state)

    def _defer(self, state: RequestState) -> None:
        """Lets ``state`` wait for the request ahead of it that will have computed most of its prefix."""
        longest = state.num_computed_tokens + self._min_shared - 1
        for leader in self.running:
            if leader is state:
                return
            if leader.started:
                continue
            common = common_prefix_length(leader.given_tokens, state.given_tokens, longest + 1)
            length = state.reusable_prefix(common)
            if length > longest and length > leader.num_computed_tokens:
                longest = length
                self._deferred[state] = (leader, length)
