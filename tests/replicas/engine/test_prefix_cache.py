"""Which slot a request gets, what is copied, and who waits for whom. No model: see test_prefix_reuse.py for tokens."""

from pathlib import Path

import numpy as np
import pytest
from scheduled_rows import advance, plan

from replicas.engine.diffusion_state import DiffusionState
from replicas.engine.prefix_cache import PrefixCache, common_prefix_length
from replicas.engine.request_state import AutoregressiveState
from replicas.engine.scheduler import Scheduler
from replicas.engine.slots import SlotAllocator
from replicas.errors import SlotsExhaustedError
from replicas.model_info import ModelInfo
from replicas.protocol import GenerationRequest, SamplingParams

AR = ModelInfo(Path("m"), "Qwen3ForCausalLM", 1000, 1024, (7,))
DIFFUSION = ModelInfo(Path("m"), "LLaDA2MoeModelLM", 1000, 1024, (7,), 8, 999)


def state(name, prompt, *, resume=(), diffusion=False):
    request = GenerationRequest(
        name, "m", tuple(prompt), SamplingParams(max_tokens=50, ignore_eos=True), None, tuple(resume)
    )
    return (DiffusionState if diffusion else AutoregressiveState)(request, DIFFUSION if diffusion else AR, 0)


def world(num_slots, budget=1000, block_length=None):
    cache = PrefixCache(SlotAllocator(num_slots))
    return cache, Scheduler(
        cache._slots, max_num_batched_tokens=budget, block_length=block_length, prefix_cache=cache
    )


def step(cache, scheduler):
    """One step; returns (rows, copies)."""
    rows, copies = scheduler.schedule(), list(cache.copies)
    advance(rows)
    cache.copies_done()
    return plan(rows), copies


def hold(cache, scheduler, *prompts):
    """Lets requests with these prompts run in slots 0, 1, ... and end, the first one first."""
    states = [state(f"held{i}", prompt) for i, prompt in enumerate(prompts)]
    for each in states:
        scheduler.add(each)
    while not all(each.started for each in states):
        step(cache, scheduler)
    assert [each.slot for each in states] == list(range(len(prompts)))
    for each in states:
        scheduler.remove(each)


def seq(start, count):
    return list(range(start, start + count))


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [
        ([], [], 0),
        ([], [1], 0),
        ([1], [2], 0),
        ([1], [1], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3, 4], [1, 2, 5, 4], 2),
        ([9, 2, 3], [1, 2, 3], 0),
    ],
)
def test_common_prefix_length(a, b, length):
    a, b = np.array(a, np.int32), np.array(b, np.int32)
    assert common_prefix_length(a, b) == length
    for at_least in range(1, 6):
        assert common_prefix_length(a, b, at_least) == (length if length >= at_least else 0)


def test_what_may_be_reused():
    for given in (1, 2, 40):
        one = state("a", seq(0, given))
        assert [one.reusable_prefix(n) for n in (0, given - 1, given)] == [0, given - 1, given - 1]
    for given, limit in ((1, 0), (7, 0), (8, 8), (21, 16), (24, 24)):
        one = state("a", seq(0, given), diffusion=True)
        assert one.reusable_prefix(given) == limit
        assert one.reusable_prefix(15) == min(8, limit)
    # Resumed tokens are given too, but the client knows only its prompt.
    one = state("a", seq(0, 10), resume=seq(10, 20))
    assert one.reusable_prefix(100) == 29
    one.take_cached(29)
    assert (one.num_computed_tokens, one.num_cached_tokens, one.num_queued_tokens) == (29, 10, 31)


def test_computed_tokens_end_where_keys_and_values_are_final():
    one = state("a", seq(100, 10))
    advance_prompt = one.prepare(one.chunk(4))
    one.apply(advance_prompt, [], [])
    assert one.computed_tokens.tolist() == seq(100, 4)
    for token in (500, 501):
        one.apply(one.prepare(one.num_pending_tokens), [token], [0.0])
    # 501 was chosen, but not computed.
    assert one.computed_tokens.tolist() == [*seq(100, 10), 500]
    one = state("a", seq(100, 10), diffusion=True)
    while one.num_computed_tokens < 16:
        row = one.prepare(one.num_pending_tokens)
        one.apply(row, [3] * len(row.decide), [0.0] * len(row.decide))
    assert one.computed_tokens.tolist() == [*seq(100, 10), *[3] * 6]
    assert len(one.tokens) == 24


def test_the_longest_prefix_in_a_free_slot_is_taken_in_place():
    cache, scheduler = world(3)
    hold(cache, scheduler, seq(0, 20), seq(0, 40), seq(500, 30))
    before = cache.num_cached_tokens
    one = state("new", [*seq(0, 40), 900])
    scheduler.add(one)
    assert step(cache, scheduler) == ([("new", 1)], [])
    assert (one.slot, one.num_cached_tokens) == (1, 40)
    assert cache.num_cached_tokens == before + 40


def test_of_equal_prefixes_the_slot_that_loses_least():
    cache, scheduler = world(3)
    hold(
        cache,
        scheduler,
        [*seq(0, 20), *seq(300, 9)],
        [*seq(0, 20), *seq(400, 3)],
        [*seq(0, 20), *seq(500, 6)],
    )
    one = state("new", [*seq(0, 20), 900])
    scheduler.add(one)
    assert step(cache, scheduler) == ([("new", 1)], [])
    assert one.slot == 1


def test_a_long_conversation_is_not_thrown_away_for_a_short_prefix():
    cache, scheduler = world(3)
    hold(cache, scheduler, [*seq(0, 20), *seq(300, 21)], seq(400, 30), seq(500, 30))
    one = state("new", [*seq(0, 20), 900])
    scheduler.add(one)
    # 20 of 41 are less than half: into the oldest other slot.
    assert step(cache, scheduler) == ([("new", 1)], [(0, 1, 20)])
    two = state("two", [*seq(0, 20), *seq(300, 21), 900])
    scheduler.add(two)
    assert step(cache, scheduler)[0] == [("new", 1), ("two", 1)]
    assert (two.slot, two.num_cached_tokens) == (0, 41)


def test_half_of_a_slot_and_the_last_free_slot_are_taken_in_place():
    cache, scheduler = world(2)
    hold(cache, scheduler, [*seq(0, 20), *seq(300, 20)], seq(400, 30))
    scheduler.add(state("half", [*seq(0, 20), 900]))
    assert step(cache, scheduler) == ([("half", 1)], [])
    one = state("last", [*seq(400, 3), 900])
    scheduler.add(one)
    assert step(cache, scheduler) == ([("half", 1), ("last", 1)], [])
    assert (one.slot, one.num_cached_tokens) == (1, 3)


def test_a_copy_is_a_use_of_its_source():
    cache, scheduler = world(3)
    hold(cache, scheduler, seq(400, 30), [*seq(0, 20), *seq(300, 40)], seq(500, 30))
    scheduler.add(state("a", [*seq(0, 20), 900]))
    assert step(cache, scheduler)[1] == [(1, 0, 20)]
    scheduler.add(state("b", [800]))
    step(cache, scheduler)
    # Slot 2 was the older one by then.
    assert cache._slots.free_slots == [1]


def test_a_busy_slot_gives_what_it_has_computed_with_generated_tokens():
    cache, scheduler = world(3)
    busy = state("busy", seq(0, 20))
    scheduler.add(busy)
    for _ in range(5):
        step(cache, scheduler)
    assert busy.tokens == [*seq(0, 20), *[1] * 5]
    one = state("new", [*seq(0, 20), *[1] * 9])
    scheduler.add(one)
    assert step(cache, scheduler) == ([("busy", 1), ("new", 5)], [(0, 1, 24)])
    two = state("two", [*seq(0, 18), 7])
    scheduler.add(two)
    assert step(cache, scheduler)[1] == [(0, 2, 18)]


def test_the_slot_api_takes_the_oldest_and_an_empty_slot_counts_as_oldest():
    cache, scheduler = world(3)
    hold(cache, scheduler, seq(0, 20), seq(100, 20))
    empty = state("empty", [5, 6])
    assert cache.allocate(empty) == 2
    cache.free(empty)
    assert cache._slots.free_slots == [2, 0, 1]
    assert [cache.allocate(state(str(i), [900 + i])) for i in range(3)] == [2, 0, 1]
    with pytest.raises(SlotsExhaustedError):
        cache.allocate(state("more", [1]))


def test_a_forgotten_slot_offers_nothing():
    cache, scheduler = world(1)
    hold(cache, scheduler, seq(0, 20))
    cache._slots.allocate_slot("foreign")
    cache.forget(0)
    cache._slots.free_slot("foreign")
    one = state("new", seq(0, 20))
    cache.allocate(one)
    assert one.num_computed_tokens == 0


def test_a_source_that_is_given_away_in_the_same_step_is_read_before_it_is_written():
    cache, scheduler = world(4)
    hold(cache, scheduler, seq(600, 10), [*seq(0, 20), *seq(300, 40)], seq(700, 10))
    busy = state("busy", seq(100, 20))
    scheduler.add(busy)
    step(cache, scheduler)
    assert busy.slot == 3
    for name, prompt in (
        ("a", [*seq(0, 20), 900]),
        ("b", [901]),
        ("c", [*seq(100, 15), 902]),
    ):
        scheduler.add(state(name, prompt))
    # a copies from slot 1 into 0; b takes 2; c gets slot 1, the last one free, from the busy slot.
    _, copies = step(cache, scheduler)
    assert copies == [(1, 0, 20), (3, 1, 15)]


def test_copies_without_a_forward_wait_for_the_next_one():
    cache, scheduler = world(2)
    hold(cache, scheduler, [*seq(0, 20), *seq(300, 40)])
    scheduler.add(state("a", [*seq(0, 20), 900]))
    scheduler.schedule()
    scheduler.remove(scheduler.get("a"))  # aborted before any forward
    two = state("b", [*seq(0, 20), 901])
    scheduler.add(two)
    assert step(cache, scheduler) == ([("b", 1)], [(0, 1, 20)])
    assert (two.slot, two.num_cached_tokens) == (1, 20)


def test_after_failed_copies_nobody_relies_on_them():
    cache, scheduler = world(4)
    hold(cache, scheduler, [*seq(0, 20), *seq(300, 40)])
    live, gone = state("live", [*seq(0, 20), 900]), state("gone", [*seq(0, 20), 901])
    for each in (live, gone):
        scheduler.add(each)
    scheduler.schedule()
    assert [copy[1:] for copy in cache.copies] == [(1, 20), (2, 20)]
    assert live.num_queued_tokens == 51
    scheduler.remove(gone)
    cache.copies_failed()
    assert cache.copies == []
    assert (live.num_computed_tokens, live.num_cached_tokens, live.num_queued_tokens) == (0, 0, 71)
    assert len(cache._kept[2]) == 0
    # The source still has it.
    scheduler.remove(live)
    scheduler.add(state("again", [*seq(0, 20), 902]))
    assert step(cache, scheduler)[1][0][0] == 0


@pytest.mark.parametrize("diffusion", [False, True])
def test_eight_with_one_beginning_compute_it_once(diffusion):
    block = 8 if diffusion else None
    cache, scheduler = world(8, budget=1000, block_length=block)
    states = [state(f"r{i}", [*seq(0, 40), *seq(100 + 10 * i, 9)], diffusion=diffusion) for i in range(8)]
    for each in states:
        scheduler.add(each)
    assert step(cache, scheduler) == ([("r0", 56 if diffusion else 49)], [])
    rows, copies = step(cache, scheduler)
    assert copies == [(0, i, 40) for i in range(1, 8)]
    assert rows == [("r0", 8 if diffusion else 1), *((f"r{i}", 16 if diffusion else 9) for i in range(1, 8))]
    assert [each.num_cached_tokens for each in states] == [0] + [40] * 7


def test_who_gains_too_little_does_not_wait():
    for common, rows in ((15, 2), (16, 1)):
        cache, scheduler = world(2)
        for i in range(2):
            scheduler.add(state(str(i), [*seq(0, common), *seq(100 + 10 * i, 5)]))
        assert len(step(cache, scheduler)[0]) == rows
    for common, rows in ((7, 2), (8, 1)):
        cache, scheduler = world(2, block_length=8)
        for i in range(2):
            scheduler.add(state(str(i), [*seq(0, common), *seq(100 + 10 * i, 5)], diffusion=True))
        assert len(step(cache, scheduler)[0]) == rows


def test_a_waiting_request_does_not_hold_back_those_behind_it():
    cache, scheduler = world(4, budget=64)
    for name, prompt in (
        ("leader", seq(0, 200)),
        ("follower", [*seq(0, 150), 900]),
        ("other", seq(500, 20)),
    ):
        scheduler.add(state(name, prompt))
    assert step(cache, scheduler)[0] == [("leader", 48), ("other", 16)]
    assert step(cache, scheduler)[0] == [("leader", 60), ("other", 4)]
    assert step(cache, scheduler)[0] == [("other", 1), ("leader", 63)]
    # 171 of the leader's tokens are computed: its follower goes on.
    rows, copies = step(cache, scheduler)
    assert rows == [("other", 1), ("leader", 29), ("follower", 1)]
    assert copies == [(0, 1, 150)]


def test_a_chain_of_waiting_requests_resolves_in_order():
    cache, scheduler = world(4)
    for name, prompt in (
        ("a", [*seq(0, 40), 900]),
        ("b", [*seq(0, 40), *seq(500, 40), 901]),
        ("c", [*seq(0, 40), *seq(500, 40), 902]),
    ):
        scheduler.add(state(name, prompt))
    assert step(cache, scheduler) == ([("a", 41)], [])
    assert step(cache, scheduler) == ([("a", 1), ("b", 41)], [(0, 1, 40)])
    assert step(cache, scheduler) == ([("a", 1), ("b", 1), ("c", 1)], [(1, 2, 80)])


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_end_of_a_leader_ends_the_wait_with_what_its_slot_holds(steps):
    cache, scheduler = world(3, budget=64)
    leader = state("leader", seq(0, 200))
    scheduler.add(leader)
    followers = [state(f"f{i}", [*seq(0, 150), 900 + i]) for i in range(2)]
    for follower in followers:
        scheduler.add(follower)
    scheduler.schedule()  # admitted; nothing computed
    for _ in range(steps):
        step(cache, scheduler)
    computed = 64 * steps
    assert leader.num_computed_tokens == computed
    scheduler.remove(leader)
    # Another request takes the freed slot at once; the copy out of it comes first.
    scheduler.add(state("late", [999]))
    rows, copies = step(cache, scheduler)
    assert followers[0].num_cached_tokens == computed
    assert copies == ([(0, 1, computed), (1, 2, computed)] if steps else [])
    # The first follower leads now.
    assert rows == [("f0", min(63, 151 - computed)), ("late", 1)]
    for _ in range(6):
        step(cache, scheduler)
    assert all(follower.started for follower in followers)
    assert followers[1].num_cached_tokens == 150


def test_a_follower_that_ends_leaves_nothing_behind():
    cache, scheduler = world(2, budget=64)
    follower = state("follower", [*seq(0, 150), 900])
    for each in (state("leader", seq(0, 200)), follower):
        scheduler.add(each)
    step(cache, scheduler)
    scheduler.remove(follower)
    assert not scheduler._deferred
    assert cache._slots.free_slots == [1]
