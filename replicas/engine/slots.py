"""KV slots: which live request owns which slot. One slot holds the whole context of one request."""

from __future__ import annotations

from replicas.errors import SlotError, SlotsExhaustedError


class SlotAllocator:
    """Hands out slots 0 to n - 1: the least recently used one first where slots keep what they hold, otherwise
    (``by_age`` False) the lowest number, so that live requests are neighbours. Not thread-safe: the step loop
    owns it."""

    def __init__(self, num_slots: int | None = None, *, by_age: bool = True) -> None:
        self._by_age = by_age
        # In the order of their last use; the values mean nothing.
        self._free: dict[int, None] = {}
        self._owner: dict[str, int] = {}
        self._num_slots = 0
        if num_slots is not None:
            self.allocate_batch_slots(num_slots)

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_slots(self) -> list[int]:
        """The least recently used one first."""
        return list(self._free)

    def allocate_batch_slots(self, n: int) -> None:
        """Sets the number of slots, once. Raises ``SlotError`` for n < 1 and for a later change of it."""
        if n < 1:
            raise SlotError(f"the number of slots must be at least 1, got {n}", param="n")
        if self._num_slots and n != self._num_slots:
            raise SlotError(
                f"the width is fixed at construction: {self._num_slots} slots exist, {n} were asked for",
                param="n",
            )
        if not self._num_slots:
            self._num_slots = n
            self._free = dict.fromkeys(range(n))

    def allocate_slot(self, request_id: str, slot: int | None = None) -> int:
        """The slot of a new request: ``slot``, or the first in the order of this allocator.

        Raises ``SlotError`` when the request has one or ``slot`` is in use, ``SlotsExhaustedError`` when none
        is free.
        """
        if request_id in self._owner:
            raise SlotError(f"request {request_id!r} already has slot {self._owner[request_id]}")
        if not self._free:
            raise SlotsExhaustedError(f"no free slot: all {self._num_slots} are in use")
        if slot is None:
            slot = next(iter(self._free)) if self._by_age else min(self._free)
        elif slot not in self._free:
            raise SlotError(f"slot {slot} is not free", param="slot")
        del self._free[slot]
        self._owner[request_id] = slot
        return slot

    def free_slot(self, request_id: str) -> int:
        """Returns the slot that became free. Raises ``SlotError`` when the request has none."""
        slot = self.slot_of(request_id)
        del self._owner[request_id]
        self._free[slot] = None
        return slot

    def slot_of(self, request_id: str) -> int:
        """Raises ``SlotError`` when the request has no slot."""
        try:
            return self._owner[request_id]
        except KeyError:
            raise SlotError(f"request {request_id!r} has no slot") from None

    def touch(self, slot: int) -> None:
        """Counts as a use of a free slot: it is the last of them to be handed out now."""
        del self._free[slot]
        self._free[slot] = None

    def expire(self, slot: int) -> None:
        """The opposite of ``touch``: a free slot that holds nothing of worth is handed out first."""
        del self._free[slot]
        self._free = {slot: None, **self._free}
