import pytest

from replicas.engine.slots import SlotAllocator
from replicas.errors import SlotError, SlotsExhaustedError


def test_slots_are_handed_out_by_age_and_come_back():
    slots = SlotAllocator(3)
    assert [slots.allocate_slot(name) for name in "abc"] == [0, 1, 2]
    assert slots.num_free == 0
    assert slots.free_slot("b") == 1
    assert slots.free_slot("a") == 0
    assert slots.free_slots == [1, 0]
    assert slots.allocate_slot("d") == 1
    assert slots.slot_of("c") == 2


def test_slots_that_keep_nothing_are_handed_out_lowest_first():
    slots = SlotAllocator(3, by_age=False)
    assert [slots.allocate_slot(name) for name in "abc"] == [0, 1, 2]
    slots.free_slot("b")
    slots.free_slot("a")
    assert slots.allocate_slot("d") == 0


def test_a_slot_can_be_chosen_used_and_expired():
    slots = SlotAllocator(4)
    assert slots.allocate_slot("a", 2) == 2
    with pytest.raises(SlotError, match="slot 2 is not free"):
        slots.allocate_slot("b", 2)
    slots.touch(0)
    assert slots.free_slots == [1, 3, 0]
    slots.expire(3)
    assert slots.free_slots == [3, 1, 0]
    assert slots.allocate_slot("b") == 3


def test_exhausted_duplicate_and_unknown_are_named():
    slots = SlotAllocator(1)
    slots.allocate_slot("a")
    with pytest.raises(SlotsExhaustedError, match="all 1 are in use"):
        slots.allocate_slot("b")
    with pytest.raises(SlotError, match="'a' already has slot 0"):
        slots.allocate_slot("a")
    slots.free_slot("a")
    with pytest.raises(SlotError, match="'a' has no slot"):
        slots.free_slot("a")
    with pytest.raises(SlotError, match="'x' has no slot"):
        slots.slot_of("x")
    assert slots.num_free == 1


def test_the_width_is_fixed_once():
    slots = SlotAllocator()
    with pytest.raises(SlotError, match="at least 1"):
        slots.allocate_batch_slots(0)
    slots.allocate_batch_slots(4)
    slots.allocate_batch_slots(4)
    with pytest.raises(SlotError, match="4 slots exist, 8 were asked for"):
        slots.allocate_batch_slots(8)
    assert slots.num_slots == slots.num_free == 4


def test_24_cycles_leak_nothing():
    slots = SlotAllocator(8)
    for cycle in range(24):
        names = [f"{cycle}-{i}" for i in range(8)]
        assert sorted(slots.allocate_slot(name) for name in names) == list(range(8))
        for name in reversed(names):
            slots.free_slot(name)
        assert slots.num_free == 8
