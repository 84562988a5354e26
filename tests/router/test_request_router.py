from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from ray import serve
from ray.serve.config import RequestRouterConfig

from replicas.errors import ReplicaLostError
from router.request_router import Booking, Bookings, RequestRouter

# On a real cluster


@pytest.fixture(scope="module")
def echo(serve_url):
    """Three replicas behind the router, and a caller that makes its calls in clean contexts."""

    @serve.deployment(
        name="Echo",
        num_replicas=3,
        max_ongoing_requests=2,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(
            request_router_class="router.request_router:RequestRouter", request_routing_stats_period_s=0.5
        ),
    )
    class Echo:
        def record_routing_stats(self):
            return {"waiting": 0, "running": 0, "total_slots": 4, "queued_tokens": 0, "as_of": time.time()}

        async def __call__(self, sleep_s=0.0, **hints):
            await asyncio.sleep(sleep_s)
            return serve.get_replica_context().replica_id.unique_id

    @serve.deployment(name="Caller", ray_actor_options={"num_cpus": 0.1})
    class Caller:
        def __init__(self, handle):
            self.handle = handle

        async def call(self, calls):
            """(seconds, result or exception) of each call, all of them at once."""
            import contextvars

            async def one(sleep_s, hints):
                start = time.monotonic()
                try:
                    async with asyncio.timeout(10):
                        result = await self.handle.remote(sleep_s, **hints)
                except Exception as error:
                    result = error
                return time.monotonic() - start, result

            loop = asyncio.get_running_loop()
            tasks = [loop.create_task(one(*call), context=contextvars.Context()) for call in calls]
            return await asyncio.gather(*tasks)

    handle = serve.run(Caller.bind(Echo.bind()), name="echo", route_prefix="/echo")
    yield lambda calls: handle.call.remote(calls).result(timeout_s=40)
    serve.delete("echo")


def test_concurrent_calls_of_one_request_all_return(echo) -> None:
    results = [result for _, result in echo([(0.05, {"num_requests": 1})] * 12)]
    assert all(isinstance(result, str) for result in results), results
    assert len(set(results)) == 3  # 12 calls on 3 replicas with room for 2 each: everyone works


def test_batches_that_arrive_together_spread_out(echo) -> None:
    time.sleep(1.5)  # stats are in
    results = [result for _, result in echo([(0.3, {"num_requests": 4, "num_tokens": 100})] * 3)]
    assert len(set(results)) == 3


def test_a_pinned_call_goes_to_its_replica(echo) -> None:
    replicas = sorted({result for _, result in echo([(0.05, {})] * 12)})
    for replica_id in replicas:
        assert {result for _, result in echo([(0.0, {"pin": replica_id})] * 3)} == {replica_id}


def test_a_call_pinned_to_a_dead_replica_fails_fast_and_others_go_on(echo) -> None:
    (took, error), (_, other) = echo([(0.0, {"pin": "dead"}), (0.0, {})])
    assert isinstance(error, ReplicaLostError)
    assert took < 2
    assert isinstance(other, str)


def test_avoided_replicas_are_taken_last(echo) -> None:
    replicas = sorted({result for _, result in echo([(0.05, {})] * 12)})
    hints = {"num_requests": 1, "avoid": replicas[:2]}
    assert {echo([(0.0, hints)])[0][1] for _ in range(3)} == {replicas[2]}


# Without a cluster


def replica(replica_id: str, **stats):
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=replica_id), routing_stats=stats)


def pending(**hints):
    return SimpleNamespace(
        args=[],
        kwargs=hints,
        metadata=SimpleNamespace(internal_request_id="id"),
        future=asyncio.get_running_loop().create_future(),
        routing_context=SimpleNamespace(should_backoff=False),
    )


def bare_router() -> RequestRouter:
    router = RequestRouter.__new__(RequestRouter)
    router._pending_requests_by_id = {}
    router.initialize_state()
    return router


async def test_ranks_are_singletons_and_backoff_is_set() -> None:
    request = pending(num_requests=1)
    fresh = {"total_slots": 4, "as_of": time.time()}
    replicas = [replica("busy", waiting=9, running=4, **fresh), replica("idle", **fresh)]
    ranks = await bare_router().choose_replicas(replicas, request)
    assert [[one.replica_id.unique_id for one in rank] for rank in ranks] == [["idle"], ["busy"]]
    assert request.routing_context.should_backoff is True


@pytest.mark.parametrize("hints", [{"num_requests": "x"}, {"avoid": 3}, {"num_tokens": None}])
async def test_it_never_raises_and_always_offers_a_candidate(hints: dict) -> None:
    replicas = [replica("a", waiting="?"), replica("b")]
    assert await bare_router().choose_replicas(replicas, pending(**hints))
    assert await bare_router().choose_replicas(replicas, None)


async def test_a_dead_pin_sets_the_exception_and_offers_one_candidate() -> None:
    request = pending(pin="dead")
    ranks = await bare_router().choose_replicas([replica("a"), replica("b")], request)
    assert [len(rank) for rank in ranks] == [1]
    assert isinstance(request.future.exception(), ReplicaLostError)
    # Serve may ask again before it notices; the future is set once only.
    assert await bare_router().choose_replicas([replica("a")], request)


def test_bookings_count_until_a_report_must_hold_them_and_end_with_the_batch() -> None:
    bookings = Bookings(report_lag_s=2)
    bookings.place("one", Booking("a", 4, 100, booked_at=0))
    bookings.place("two", Booking("a", 2, 10, booked_at=0))
    bookings.accept("one", "b")  # placed on a, taken by b
    assert bookings.totals(1.0) == {"a": (2, 10, 2), "b": (4, 100, 4)}
    assert bookings.totals(3.0) == {"b": (0, 0, 4)}  # "two" was never accepted
    bookings.end("one")
    bookings.end("never placed")
    assert bookings.totals(3.0) == {}
    assert len(bookings) == 0
