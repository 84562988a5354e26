"""Ray Serve's hook for placing batches: thin, around ``router.scoring``.

Serve runs one instance per process and deployment, on an event loop of its own. What it is given as keyword
arguments of a call:

* ``pin``: a replica id. The call goes there or fails at once (control calls such as aborts).
* ``num_requests``, ``num_tokens``: size of a batch, for the scoring.
* ``avoid``: ids of replicas on which the batch has failed before.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica
from ray.serve.request_router import RequestRouter as ServeRequestRouter

from replicas.errors import ReplicaLostError
from router.scoring import BatchFeatures, ReplicaLoad, rank_replicas

logger = logging.getLogger("ray.serve")


@dataclass(slots=True)
class Booking:
    """A batch this router has sent, or is about to send, to a replica. Times are ``time.monotonic()``."""

    replica_id: str
    num_requests: int
    num_tokens: int
    booked_at: float
    accepted: bool = False


class Bookings:
    """What was sent where, until it ends.

    A booking counts as load on top of a replica's report for ``report_lag_s``, the time after which a report
    must hold it. A batch that was placed but never accepted is forgotten after the same time.
    """

    def __init__(self, report_lag_s: float) -> None:
        self.report_lag_s = report_lag_s
        self._bookings: dict[str, Booking] = {}

    def place(self, key: str, booking: Booking) -> None:
        self._bookings[key] = booking

    def accept(self, key: str, replica_id: str) -> None:
        booking = self._bookings.get(key)
        if booking is not None:
            booking.replica_id, booking.accepted = replica_id, True

    def end(self, key: str) -> None:
        self._bookings.pop(key, None)

    def totals(self, now: float) -> dict[str, tuple[int, int, int]]:
        """replica id -> (requests, tokens) not reported yet, and requests in flight."""
        totals: dict[str, tuple[int, int, int]] = {}
        for key, booking in list(self._bookings.items()):
            if not booking.accepted and now - booking.booked_at > self.report_lag_s:
                self.end(key)
                continue
            requests, tokens, in_flight = totals.get(booking.replica_id, (0, 0, 0))
            if now - booking.booked_at <= self.report_lag_s:
                requests += booking.num_requests
                tokens += booking.num_tokens
            totals[booking.replica_id] = (requests, tokens, in_flight + booking.num_requests)
        return totals

    def __len__(self) -> int:
        return len(self._bookings)


class RequestRouter(ServeRequestRouter):
    """Ranks replicas by expected wait; sends pinned calls to their replica.

    It has no ``FIFOMixin``, which would hand the replica chosen for one batch to another. Without it Serve
    tells pending calls apart by request id alone, so callers issue concurrent calls in a clean
    ``contextvars.Context``.
    """

    def initialize_state(self, report_lag_s: float = 2.5) -> None:
        self._bookings = Bookings(report_lag_s)
        self._rng = random.Random()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        # An exception here would leave the call pending for ever, hence the guard.
        try:
            if pending_request is None:
                return [[replica] for replica in candidate_replicas]
            # Else Serve repeats this without a pause while all replicas are full.
            pending_request.routing_context.should_backoff = True
            return self._choose(candidate_replicas, pending_request)
        except Exception:
            logger.exception("Routing failed; falling back to any replica.")
            return [list(candidate_replicas)]

    def _choose(
        self, candidates: list[RunningReplica], pending_request: PendingRequest
    ) -> list[list[RunningReplica]]:
        hints = pending_request.kwargs
        pin = hints.get("pin")
        if pin is not None:
            pinned = [replica for replica in candidates if replica.replica_id.unique_id == pin]
            if pinned:
                return [pinned]
            self._fail(pending_request, ReplicaLostError(f"replica {pin} is gone"))
            # Serve notices the failed future only when it is offered a candidate; [] would leak its task.
            return [candidates[:1]]

        features = BatchFeatures(int(hints.get("num_requests", 1)), int(hints.get("num_tokens", 0)))
        now = time.monotonic()
        totals = self._bookings.totals(now)
        loads = [_load(replica, totals) for replica in candidates]
        ranking = rank_replicas(features, loads, self._rng, avoid=hints.get("avoid") or ())
        if "num_requests" in hints:
            # Booked before it is accepted, so that batches that arrive together spread out.
            booking = Booking(ranking[0], features.num_requests, features.num_tokens, now)
            self._bookings.place(pending_request.metadata.internal_request_id, booking)
        by_id = {replica.replica_id.unique_id: replica for replica in candidates}
        # One replica per rank: within a rank Serve picks by its own count of RPCs.
        return [[by_id[replica_id]] for replica_id in ranking]

    def _fail(self, pending_request: PendingRequest, error: Exception) -> None:
        if not pending_request.future.done():
            pending_request.future.set_exception(error)
        # Serve drops a call from its index only when it is fulfilled or cancelled.
        self._remove_pending_request_from_indices(pending_request)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._bookings.accept(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._bookings.end(internal_request_id)


def _load(replica: RunningReplica, totals: dict[str, tuple[int, int, int]]) -> ReplicaLoad:
    replica_id = replica.replica_id.unique_id
    booked_requests, booked_tokens, in_flight = totals.get(replica_id, (0, 0, 0))
    stats = replica.routing_stats or {}
    as_of = stats.get("as_of")
    return ReplicaLoad(
        replica_id=replica_id,
        waiting=int(stats.get("waiting", 0)),
        running=int(stats.get("running", 0)),
        total_slots=int(stats.get("total_slots", 1)),
        queued_tokens=int(stats.get("queued_tokens", 0)),
        age_s=None if as_of is None else time.time() - float(as_of),
        booked_requests=booked_requests,
        booked_tokens=booked_tokens,
        in_flight=in_flight,
    )
