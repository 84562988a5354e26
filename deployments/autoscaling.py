"""Scaling a model's replicas on logical queue depth.

Serve counts RPCs, and one RPC carries a whole batch; the replicas report what counts, waiting and running
requests. ``desired_replicas`` is the rule, free of Ray; ``QueueDepthPolicy`` is the policy that Serve's controller
calls about ten times a second. Serve itself applies ``upscale_delay_s`` and ``downscale_delay_s`` to what the
policy returns: a change is made when it was wanted without a break for that long, so the rule needs no clock.
Serve then goes to the number wanted last, which under an alternating load may be its trough; the policy therefore
asks for the largest number that was wanted meanwhile, as Kubernetes' autoscaler does in its stabilization window.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("ray.serve")

#: Replicas go only when the rest would be at most this full: between that and full, nothing changes.
DOWNSCALE_FILL = 0.8
#: Reports older than this (seconds) count as missing.
STALE_AFTER_S = 60.0
#: Seconds between two log lines about a failing policy; it is called ten times a second.
LOG_INTERVAL_S = 60.0
#: The policy's key in Serve's policy state: (replicas decided last, the largest smaller number wanted since).
PEAK_KEY = "blockserve_downscale_peak"


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """What one replica reported: requests without and with a slot."""

    waiting: float = 0.0
    running: float = 0.0

    @property
    def total(self) -> float:
        return self.waiting + self.running


def desired_replicas(
    depths: Mapping[str, QueueDepth | None],
    *,
    target_num_replicas: int,
    requests_per_replica: float,
    min_replicas: int,
    max_replicas: int,
    num_queued_at_handles: float = 0.0,
) -> int:
    """How many replicas a model should have now.

    ``depths``: the running replicas, None for one that has not reported (lately). ``target_num_replicas``:
    the number that was decided last. ``requests_per_replica``: waiting + running requests that one should hold.
    ``num_queued_at_handles``: batches that no replica has taken yet (there is none, or it is starting).

    Up: as many as hold all requests. Down: only to a number that the requests fill to ``DOWNSCALE_FILL`` at
    most, so a load at the edge does not flap; never while a report is missing; to zero only without any
    request. The result is within the bounds.
    """
    known = [depth for depth in depths.values() if depth is not None]
    total = sum(depth.total for depth in known) + num_queued_at_handles
    # The small number keeps 16 / 8 from becoming 3 when the reports carry rounding errors.
    up = math.ceil(total / requests_per_replica - 1e-6)
    down = math.ceil(total / (requests_per_replica * DOWNSCALE_FILL) - 1e-6)
    if total > 0:
        up, down = max(up, 1), max(down, 1)
    if up > target_num_replicas:
        wanted = up
    elif down < target_num_replicas and known and len(known) == len(depths):
        wanted = down
    else:
        wanted = target_num_replicas
    return min(max(wanted, min_replicas), max_replicas)


class QueueDepthPolicy:
    """Serve's autoscaling policy for engine deployments.

    ``target``: waiting + running requests that one replica should hold. It never raises: an exception from a
    policy stops Serve's controller from reconciling every application behind it. Whatever goes wrong, the
    number of replicas is held.
    """

    def __init__(self, target: float) -> None:
        if not target > 0:
            raise ValueError(f"`target` must be a positive number of requests, got {target!r}")
        self._target = float(target)
        self._logged_at = -math.inf

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """``ctx`` is Serve's ``AutoscalingContext``; returns (number of replicas, policy state)."""
        try:
            return with_downscale_peak(self._decide(ctx), ctx.target_num_replicas, ctx.policy_state)
        except Exception:
            if time.monotonic() - self._logged_at > LOG_INTERVAL_S:
                self._logged_at = time.monotonic()
                logger.exception("The queue depth cannot be read; the number of replicas is held.")
            return ctx.target_num_replicas, ctx.policy_state

    def _decide(self, ctx: Any) -> int:
        return desired_replicas(
            queue_depths(ctx.raw_metrics or {}, ctx.running_replicas, now=time.time()),
            target_num_replicas=ctx.target_num_replicas,
            requests_per_replica=self._target,
            min_replicas=ctx.capacity_adjusted_min_replicas,
            max_replicas=ctx.capacity_adjusted_max_replicas,
            num_queued_at_handles=ctx.total_queued_requests or 0.0,
        )


def with_downscale_peak(
    wanted: int, target_num_replicas: int, policy_state: Mapping[str, Any]
) -> tuple[int, dict[str, Any]]:
    """The number to ask Serve for, and the new policy state. While fewer replicas than ``target_num_replicas`` are
    wanted without a break, it is the largest number wanted since that began; else it is ``wanted``."""
    state = {key: value for key, value in policy_state.items() if key != PEAK_KEY}
    if wanted >= target_num_replicas:
        return wanted, state
    since, peak = policy_state.get(PEAK_KEY) or (None, 0)
    if since == target_num_replicas:
        wanted = max(wanted, peak)
    return wanted, state | {PEAK_KEY: (target_num_replicas, wanted)}


def queue_depths(
    raw_metrics: Mapping[str, Mapping[Any, Any]], running_replicas: Any, *, now: float
) -> dict[str, QueueDepth | None]:
    """Each running replica's latest report out of Serve's time series (``{metric: {replica: [samples]}}``, each
    sample with ``timestamp`` and ``value``). The latest sample, not the window's mean, which lags behind a burst."""
    depths: dict[str, QueueDepth | None] = {}
    for replica in running_replicas or ():
        values = [_latest(raw_metrics.get(name, {}).get(replica), now) for name in ("waiting", "running")]
        waiting, running = values
        reported = waiting is not None and running is not None
        depths[str(replica)] = QueueDepth(waiting, running) if reported else None  # type: ignore[arg-type]
    return depths


def _latest(series: Any, now: float) -> float | None:
    if not series:
        return None
    sample = series[-1]
    value = float(sample.value)
    if not math.isfinite(value) or value < 0 or now - float(sample.timestamp) > STALE_AFTER_S:
        return None
    return value
