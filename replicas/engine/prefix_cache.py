"""Prefix reuse: which KV slot already holds the beginning of a new request's tokens.

Imports no torch: it decides which slot a request gets and which copies the next forward makes first.
"""

from __future__ import annotations

import numpy as np

from replicas.engine.request_state import RequestState
from replicas.engine.slots import SlotAllocator

_NOTHING = np.empty(0, dtype=np.int32)


def common_prefix_length(a: np.ndarray, b: np.ndarray, at_least: int = 1) -> int:
    """Number of equal leading elements of two one-dimensional arrays; 0 where it is less than ``at_least``,
    which costs next to nothing for most."""
    n = min(len(a), len(b))
    if n < at_least or a[at_least - 1] != b[at_least - 1]:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    length = first if differs[first] else n
    return length if length >= at_least else 0


class PrefixCache:
    """Knows the tokens whose keys and values every slot holds, and gives slots to requests accordingly.

    A slot holds what its request has computed for good (``RequestState.computed_tokens``), while it runs and
    after it has ended. A new request gets the longest common prefix: in a free slot in place, otherwise by a
    copy. Slots are given up by age. The rule is that of a slot cache (llama.cpp's server does alike), not of
    pages shared by hash: a copy costs memory bandwidth, and attention needs no indirection.

    ``copies``: (from slot, to slot, number of tokens) to be made before the next forward, in this order. The
    order is what keeps them right: a slot that is read by one copy may be given away in the same step and
    be written by a later one. Nothing else writes to a slot before the forward. Not thread-safe.
    """

    def __init__(self, slots: SlotAllocator) -> None:
        self._slots = slots
        self._running: dict[int, RequestState] = {}
        #: What free slots hold: int32 arrays of token ids.
        self._kept: dict[int, np.ndarray] = {}
        self.copies: list[tuple[int, int, int]] = []
        #: Given tokens that did not have to be computed, over all requests.
        self.num_cached_tokens = 0

    def allocate(self, state: RequestState) -> int:
        """Gives a new request a free slot and the longest common prefix that any slot holds.

        Raises what ``SlotAllocator.allocate_slot`` raises.
        """
        num_tokens, source = self._longest_kept(state)
        longer, running = self._longest_computed(state)
        slot = None
        if longer > num_tokens:
            num_tokens, source = longer, running
        elif source is not None:
            others = [other for other in self._slots.free_slots if other != source]
            if others and 2 * num_tokens < len(self._kept[source]):
                # In place it would throw away more than it saves.
                slot = others[0]
                self._slots.touch(source)
            else:
                slot = source
        slot = self._slots.allocate_slot(state.request_id, slot)
        self._kept.pop(slot, None)
        self._running[slot] = state
        state.slot = slot
        self._take(state, source, num_tokens)
        return slot

    def extend(self, state: RequestState) -> None:
        """Copies a longer common prefix into the slot of a request that has computed nothing itself yet,
        where another slot holds one by now."""
        num_tokens, source = self._longest_computed(state)
        longer, kept = self._longest_kept(state)
        if longer > num_tokens:
            num_tokens, source = longer, kept
        if num_tokens > state.num_computed_tokens:
            if source in self._kept:
                self._slots.touch(source)
            self._take(state, source, num_tokens)

    def free(self, state: RequestState) -> int:
        """Frees the slot of a request and keeps what it holds; returns the slot."""
        slot = self._slots.free_slot(state.request_id)
        self._running.pop(slot, None)
        self._kept[slot] = state.computed_tokens
        if not len(self._kept[slot]):
            self._slots.expire(slot)
        return slot

    def forget(self, slot: int) -> None:
        """A slot is about to be written by someone of whom nothing is known."""
        self._kept.pop(slot, None)

    def copies_done(self) -> None:
        self.copies.clear()

    def copies_failed(self) -> None:
        """After a fault nobody knows which copies were made: what they were to bring is not there. Live
        requests compute it themselves."""
        for _, target, _ in self.copies:
            state = self._running.get(target)
            if state is not None:
                state.take_cached(0)
            elif target in self._kept:
                self._kept[target] = _NOTHING
        self.copies.clear()

    def _longest_kept(self, state: RequestState) -> tuple[int, int | None]:
        """(prefix, free slot); of equal ones the slot that holds least beyond it, then the oldest."""
        longest, source = 0, None
        for slot in self._slots.free_slots:
            kept = self._kept.get(slot, _NOTHING)
            common = common_prefix_length(kept, state.given_tokens, max(1, longest))
            prefix = state.reusable_prefix(common)
            if prefix > longest or (
                source is not None and prefix == longest and len(kept) < len(self._kept[source])
            ):
                longest, source = prefix, slot
        return longest, source

    def _longest_computed(self, state: RequestState) -> tuple[int, int | None]:
        """(prefix, slot of another running request)"""
        longest, source = 0, None
        for slot, other in self._running.items():
            if other is state:
                continue
            if other.num_computed_tokens <= longest:
                continue
            prefix = state.reusable_prefix(_common_with_computed(other, state.given_tokens))
            if prefix > longest:
                longest, source = prefix, slot
        return longest, source

    def _take(self, state: RequestState, source: int | None, num_tokens: int) -> None:
        assert state.slot is not None
        if source is None:
            return
        if source != state.slot:
            self.copies.append((source, state.slot, num_tokens))
        self.num_cached_tokens += num_tokens - state.num_computed_tokens
        state.take_cached(num_tokens)


def _common_with_computed(other: RequestState, tokens: np.ndarray) -> int:
    """Common prefix of ``tokens`` and what a running request has computed. Its generated tokens are looked at
    only where all given ones agree: they are a list, and long."""
    given = other.given_tokens[: other.num_computed_tokens]
    length = common_prefix_length(given, tokens)
    if length < other.num_given or length == len(tokens):
        return length
    generated = other.tokens[length : min(other.num_computed_tokens, len(tokens))]
    return length + common_prefix_length(np.array(generated, dtype=np.int32), tokens[length:])
