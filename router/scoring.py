"""Where a batch of requests waits least: a pure function of queue depths.

The model behind it: one engine step advances every running request, at most ``total_slots`` of them, so a
replica with a free slot starts a request at once, and one without starts it when a slot is given back.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Reported loads older than this (seconds) say nothing about now.
STALE_AFTER_S = 30.0
#: A step with more rows is slower, but far from proportionally so: the weight of work that shares the
#: steps, against work that has to end first.
SHARED_STEP_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class BatchFeatures:
    """What the router knows of a batch: how many requests, and their prompt and allowed new tokens."""

    num_requests: int = 1
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load of one replica: what it reported, and what this router has sent there since.

    ``age_s`` is the age of the report in seconds, None when there is none yet (the reported numbers are 0
    then). ``booked_*`` are requests and tokens sent that the report cannot hold yet; ``in_flight`` all
    requests that this router sent and that have not ended, reported or not.
    """

    replica_id: str
    waiting: int = 0
    running: int = 0
    total_slots: int = 1
    queued_tokens: int = 0
    age_s: float | None = None
    booked_requests: int = 0
    booked_tokens: int = 0
    in_flight: int = 0

    @property
    def is_fresh(self) -> bool:
        return self.age_s is not None and self.age_s <= STALE_AFTER_S


def expected_wait(batch: BatchFeatures, load: ReplicaLoad) -> float:
    """How long the batch is held up on this replica, in engine steps (a relative measure).

    Requests that find no free slot wait for the ones ahead of them, ``tokens per request / slots`` steps for
    each; work that merely shares the steps counts with ``SHARED_STEP_WEIGHT``.
    """
    slots = max(load.total_slots, 1)
    live = load.waiting + load.running + load.booked_requests
    backlog_tokens = load.queued_tokens + load.booked_tokens
    tokens_per_request = (backlog_tokens + batch.num_tokens) / max(live + batch.num_requests, 1)
    overflow = max(live + batch.num_requests - slots, 0)
    # max(..., 1): a replica that reports requests but no tokens is still busy.
    queue_steps = overflow * max(tokens_per_request, 1.0) / slots
    return queue_steps + SHARED_STEP_WEIGHT * max(backlog_tokens, live) / slots


def rank_replicas(
    batch: BatchFeatures, loads: Sequence[ReplicaLoad], rng: random.Random, *, avoid: Iterable[str] = ()
) -> list[str]:
    """Replica ids, best first; every id of ``loads`` appears once.

    By ``expected_wait`` when every replica's report is fresh, ties at random. Otherwise by the power of two
    choices on what this router has in flight: of two replicas drawn at random the one with less goes first,
    so several routers without news do not all pick the same one. Ids in ``avoid`` (replicas on which this
    batch has failed before) come last.
    """
    order = list(loads)
    rng.shuffle(order)  # the sorts below are stable, so equal replicas stay in random order
    if all(load.is_fresh for load in order):
        order.sort(key=lambda load: expected_wait(batch, load))
    else:
        order[:2] = sorted(order[:2], key=lambda load: load.in_flight)
    avoided = set(avoid)
    order.sort(key=lambda load: load.replica_id in avoided)
    return [load.replica_id for load in order]
