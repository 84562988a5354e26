from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scoring import STALE_AFTER_S, BatchFeatures, ReplicaLoad, expected_wait, rank_replicas

BATCH = BatchFeatures(num_requests=4, num_tokens=400)


def load(replica_id: str, **kwargs) -> ReplicaLoad:
    return ReplicaLoad(replica_id, **{"total_slots": 8, "age_s": 0.5, **kwargs})


def first_choices(loads: list[ReplicaLoad], batch: BatchFeatures = BATCH, n: int = 200) -> Counter[str]:
    return Counter(rank_replicas(batch, loads, random.Random(seed))[0] for seed in range(n))


def test_a_free_slot_beats_a_queue_even_with_more_tokens_in_flight() -> None:
    free = load("free", running=4, queued_tokens=4000)
    queued = load("queued", running=8, waiting=8, queued_tokens=1600)
    assert first_choices([free, queued]) == {"free": 200}


def test_among_free_replicas_the_one_with_less_work() -> None:
    assert first_choices([load("busy", running=4, queued_tokens=800), load("idle")]) == {"idle": 200}


def test_the_shorter_queue_and_the_larger_replica_win() -> None:
    short = load("short", running=8, waiting=2, queued_tokens=1000)
    long = load("long", running=8, waiting=20, queued_tokens=2800)
    assert first_choices([long, short]) == {"short": 200}
    large = load("large", running=8, waiting=8, queued_tokens=1600, total_slots=32)
    small = load("small", running=8, waiting=8, queued_tokens=1600)
    assert first_choices([small, large]) == {"large": 200}


def test_bookings_count_like_reported_load() -> None:
    for booking in ({"booked_tokens": 800}, {"booked_requests": 8}):
        assert first_choices([load("booked", **booking), load("idle")]) == {"idle": 200}


def test_equal_replicas_are_drawn_at_random() -> None:
    choices = first_choices([load("a"), load("b")])
    assert min(choices["a"], choices["b"]) > 60


@pytest.mark.parametrize("age_s", [None, STALE_AFTER_S + 1])
def test_without_fresh_reports_it_takes_the_better_of_two_by_what_is_in_flight(age_s: float | None) -> None:
    # The reported queue of `b` is old news; what counts is that this router has less there.
    a = load("a", age_s=age_s, in_flight=6)
    b = load("b", age_s=age_s, waiting=50, in_flight=2)
    assert first_choices([a, b]) == {"b": 200}
    crowd = [load(f"r{i}", age_s=age_s, in_flight=i) for i in range(10)]
    choices = first_choices(crowd)
    assert len(choices) > 4  # not all on the emptiest one
    assert "r9" not in choices  # the fullest one never wins against another


def test_a_replica_that_failed_this_batch_comes_last() -> None:
    loads = [load("failed"), load("busy", running=8, waiting=80, queued_tokens=9000)]
    assert rank_replicas(BATCH, loads, random.Random(0), avoid=["failed"]) == ["busy", "failed"]


counts = st.integers(0, 10_000)


@given(
    st.lists(
        st.builds(
            ReplicaLoad,
            replica_id=st.just(""),
            waiting=counts,
            running=counts,
            total_slots=st.integers(0, 512),
            queued_tokens=counts,
            age_s=st.none() | st.floats(0, 100),
            booked_requests=counts,
            booked_tokens=counts,
            in_flight=counts,
        ),
        max_size=6,
    ),
    st.integers(0, 2**32),
)
def test_it_ranks_every_replica_once_whatever_the_loads(loads: list[ReplicaLoad], seed: int) -> None:
    from dataclasses import replace

    loads = [replace(one, replica_id=str(i)) for i, one in enumerate(loads)]
    ranking = rank_replicas(BATCH, loads, random.Random(seed))
    assert sorted(ranking) == sorted(one.replica_id for one in loads)


@given(st.integers(0, 100), st.integers(0, 100), counts, st.integers(1, 64))
def test_one_more_waiting_request_never_shortens_the_wait(
    waiting: int, running: int, tokens: int, slots: int
) -> None:
    less = load("x", waiting=waiting, running=running, queued_tokens=tokens, total_slots=slots)
    more = load("x", waiting=waiting + 1, running=running, queued_tokens=tokens + 100, total_slots=slots)
    assert expected_wait(BATCH, more) >= expected_wait(BATCH, less) - 1e-9
