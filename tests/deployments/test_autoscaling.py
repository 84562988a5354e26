"""The queue-depth rule, and the policy around it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve import autoscaling_policy, config

from deployments.autoscaling import QueueDepth, QueueDepthPolicy, desired_replicas, with_downscale_peak


def desired(totals: list[float | None], target: int, **changes: Any) -> int:
    depths = {str(i): None if total is None else QueueDepth(0, total) for i, total in enumerate(totals)}
    options = {"requests_per_replica": 8, "min_replicas": 0, "max_replicas": 10} | changes
    return desired_replicas(depths, target_num_replicas=target, **options)


def test_a_queue_behind_full_slots_scales_up() -> None:
    depths = {"a": QueueDepth(waiting=480, running=32)}
    up = desired_replicas(
        depths, target_num_replicas=1, requests_per_replica=32, min_replicas=1, max_replicas=64
    )
    assert up == 16


@pytest.mark.parametrize(
    ("totals", "target", "expected"),
    [
        ([8], 1, 1),  # exactly full
        ([8.0000001], 1, 1),  # rounding errors are no request
        ([9], 1, 2),
        ([16, 16], 2, 4),
        ([6, 7], 2, 2),  # 13 would fit two, and one not
        ([4, 4], 2, 2),  # 8 fill one replica: too full to go down to it
        ([3, 3], 2, 1),  # 6 of 8 leave room
        ([0, 0], 2, 0),
        ([0], 1, 0),
        ([1], 1, 1),  # the last replica stays while a request runs
        ([0, 0, 1], 3, 1),
    ],
)
def test_decisions(totals: list[float], target: int, expected: int) -> None:
    assert desired(totals, target) == expected


def test_a_load_at_the_edge_does_not_flap() -> None:
    target = 1
    seen = set()
    for step in range(40):
        total = 9 if step % 2 else 7
        target = desired([total / target] * target, target)
        seen.add(target)
    assert target == 2
    assert seen == {1, 2}
    assert [desired([t / 2] * 2, 2) for t in (7, 9, 7, 9)] == [2, 2, 2, 2]


def test_missing_reports_hold_but_known_load_still_scales_up() -> None:
    assert desired([None, None], 2) == 2
    assert desired([0, None], 2) == 2
    assert desired([30, None], 2) == 4
    assert desired([], 3) == 3


def test_from_zero_only_with_something_queued() -> None:
    assert desired([], 0) == 0
    assert desired([], 0, num_queued_at_handles=1) == 1
    assert desired([], 0, num_queued_at_handles=20) == 3


loads = st.lists(st.one_of(st.none(), st.floats(0, 1e6)), max_size=6)


@given(loads, st.integers(0, 10), st.integers(0, 5), st.integers(5, 10), st.floats(0.1, 1000))
def test_within_bounds_and_monotone_in_load(
    totals: list[float | None], target: int, low: int, high: int, capacity: float
) -> None:
    bounds = {"min_replicas": low, "max_replicas": high, "requests_per_replica": capacity}
    now = desired(totals, target, **bounds)
    assert low <= now <= high
    more = [None if total is None else total + 5 for total in totals]
    assert desired(more, target, **bounds) >= now


@given(loads, st.integers(1, 10))
def test_never_below_what_the_requests_need(totals: list[float | None], target: int) -> None:
    total = sum(total or 0 for total in totals)
    assert desired(totals, target, max_replicas=10**7) * 8 >= total - 1e-4


def context(**changes: Any) -> SimpleNamespace:
    now = time.time()
    series = {
        "r1": [SimpleNamespace(timestamp=now - 1, value=0.0), SimpleNamespace(timestamp=now, value=20.0)]
    }
    fields = {
        "raw_metrics": {"waiting": series, "running": series},
        "running_replicas": ["r1"],
        "target_num_replicas": 1,
        "capacity_adjusted_min_replicas": 0,
        "capacity_adjusted_max_replicas": 10,
        "total_queued_requests": 0.0,
        "policy_state": {"kept": True},
    }
    return SimpleNamespace(**(fields | changes))


def test_the_policy_reads_the_latest_samples() -> None:
    assert QueueDepthPolicy(target=8)(context()) == (5, {"kept": True})


def test_the_policy_takes_old_reports_for_missing() -> None:
    old = {"r1": [SimpleNamespace(timestamp=time.time() - 600, value=0.0)]}
    ctx = context(raw_metrics={"waiting": old, "running": old})
    assert QueueDepthPolicy(target=8)(ctx)[0] == 1


junk = st.one_of(st.none(), st.integers(), st.text(), st.lists(st.integers()), st.floats())


@given(st.dictionaries(st.sampled_from(["waiting", "running"]), junk), junk, junk)
def test_the_policy_never_raises(raw: Any, replicas: Any, queued: Any) -> None:
    ctx = context(
        raw_metrics=raw, running_replicas=replicas, total_queued_requests=queued, target_num_replicas=3
    )
    number, state = QueueDepthPolicy(target=8)(ctx)
    assert 0 <= number <= 10
    assert state == {"kept": True}


@pytest.mark.parametrize("target", [0, -1, float("nan")])
def test_a_target_must_be_positive(target: float) -> None:
    with pytest.raises(ValueError, match="target"):
        QueueDepthPolicy(target)


def run_in_serve(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[float], float], start: int, seconds: float
) -> list[tuple[float, int]]:
    """The changes (second, replicas) under Serve's own wrapper with its delays (2 s up, 10 s down), called ten
    times a second as its controller does. ``load`` gives the requests at a second; replicas start at once."""
    clock = SimpleNamespace(now=1e6)
    scaling = config.AutoscalingConfig(
        min_replicas=0, max_replicas=10, upscale_delay_s=2, downscale_delay_s=10, look_back_period_s=2
    )
    policy = autoscaling_policy._apply_autoscaling_config(QueueDepthPolicy(target=8))
    target, state, changes = start, {}, []
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: clock.now)
        for tick in range(int(seconds * 10)):
            clock.now = 1e6 + tick / 10
            requests = load(tick / 10)
            replicas = [f"r{i}" for i in range(target)]
            share = [SimpleNamespace(timestamp=clock.now, value=requests / max(target, 1))]
            queued = 0.0 if replicas else float(requests)
            ctx = config.AutoscalingContext(
                deployment_id=None,  # type: ignore[arg-type]
                deployment_name="Engine",
                app_name="app",
                current_num_replicas=target,
                target_num_replicas=target,
                running_replicas=replicas,  # type: ignore[arg-type]
                total_num_requests=queued,
                total_queued_requests=queued,
                aggregated_metrics={},
                raw_metrics={
                    "waiting": dict.fromkeys(replicas, share),
                    "running": {name: [SimpleNamespace(timestamp=clock.now, value=0.0)] for name in replicas},
                },  # type: ignore[arg-type]
                capacity_adjusted_min_replicas=0,
                capacity_adjusted_max_replicas=10,
                policy_state=state,
                last_scale_up_time=None,
                last_scale_down_time=None,
                current_time=clock.now,
                config=scaling,
            )
            decided, state = policy(ctx)
            if decided != target:
                changes.append((tick / 10, decided))
                target = decided
    return changes


def test_under_serve_a_burst_scales_up_after_the_delay_and_down_after_the_other(monkeypatch) -> None:
    changes = run_in_serve(monkeypatch, lambda second: 40 if second < 20 else 0, 1, 60)
    assert changes == [(2.0, 5), (30.0, 1), (40.1, 0)]  # Serve goes to zero from one replica only


def test_under_serve_an_alternating_load_settles(monkeypatch) -> None:
    # 17 requests need three replicas and 1 needs one: the window must not end in a trough.
    for offset in range(6):
        changes = run_in_serve(monkeypatch, lambda s, o=offset: 17 if (s + o) % 6 < 3 else 1, 5, 120)
        assert [number for _, number in changes] == [3], offset


def test_under_serve_from_zero_without_delay(monkeypatch) -> None:
    assert run_in_serve(monkeypatch, lambda second: 0 if second < 1 else 3, 0, 5) == [(1.0, 1)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_a_downscale_goes_to_the_largest_number_wanted_since_it_began(wanted: list[int]) -> None:
    state: dict[str, Any] = {"kept": True}
    peak = -math.inf
    for number in wanted:
        asked, state = with_downscale_peak(number, 5, state)
        peak = max(peak, number) if number < 5 else -math.inf
        assert asked == (peak if number < 5 else number)
        assert state["kept"]
