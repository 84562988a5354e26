"""The dispatcher against real Serve replicas with a fake engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_engine import BAD, CRASH, HANG, KILL, expected_tokens
from probe import collect, collect_all, fake_config, idle_within, live_at_most, probe_app, request

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def one_replica(serve_url: str) -> Iterator[Run]:
    config = fake_config(max_num_seqs=16, batch_wait_timeout_s=0.05, mailbox_size=50)
    with probe_app("one", config, step_s=0.01) as run:
        yield run


@pytest.fixture
def two_replicas(serve_url: str) -> Iterator[Run]:
    with probe_app("two", fake_config(replicas=2, max_num_seqs=4, batch_wait_timeout_s=0.05)) as run:
        yield run


def test_a_batch_keeps_its_order_and_is_seen_together(one_replica: Run) -> None:
    async def scenario(dispatcher):
        requests = [request(f"order-{i}", i, 7) for i in range(16)]
        outputs = await collect_all(dispatcher, requests)
        await asyncio.sleep(1.5)  # one poll
        (stats,) = (await dispatcher.model_states())["fake"].replicas.values()
        return [output.new_token_ids for output in outputs], [expected_tokens(r) for r in requests], stats

    tokens, expected, stats = one_replica(scenario)
    assert tokens == expected
    assert stats.max_running_seen == 16


def test_a_bad_request_fails_alone(one_replica: Run) -> None:
    async def scenario(dispatcher):
        good = [request(f"good-{i}", i) for i in range(3)]
        outputs = await collect_all(dispatcher, [good[0], request("bad", BAD), *good[1:]])
        return outputs, [expected_tokens(r) for r in good]

    (first, bad, *rest), expected = one_replica(scenario)
    assert bad.error.code == "invalid_request"
    assert bad.error.param == "prompt"
    assert [output.new_token_ids for output in [first, *rest]] == expected
    assert all(output.error is None for output in [first, *rest])


def test_unknown_model_and_passed_deadline_are_outputs_with_errors(one_replica: Run) -> None:
    async def scenario(dispatcher):
        from dataclasses import replace

        unknown = await collect(dispatcher, replace(request("unknown"), model="nope"))
        late = await collect(dispatcher, request("late", 1, max_tokens=500, deadline=time.time() + 0.3))
        return unknown, late, await idle_within(dispatcher, 5)

    unknown, late, _ = one_replica(scenario)
    assert unknown.error.code == "model_not_found"
    assert late.error.code == "deadline_exceeded"


def test_readers_leave_and_the_others_go_on(two_replicas: Run) -> None:
    async def scenario(dispatcher):
        async def leave_at_once(one):
            stream = dispatcher.stream(one)
            async for _ in stream:
                break
            await stream.aclose()

        # Two batches of four, a replica each; half of each leaves, all in the same moment.
        stay = [request(f"stay-{i}", i, max_tokens=500) for i in range(4)]
        leave = [request(f"leave-{i}", i, max_tokens=3000) for i in range(4)]
        order = [one for pair in zip(stay, leave, strict=True) for one in pair]
        tasks = [
            asyncio.create_task(leave_at_once(one) if one in leave else collect(dispatcher, one))
            for one in order
        ]
        await asyncio.gather(*(task for task, one in zip(tasks, order, strict=True) if one in leave))
        took = await live_at_most(dispatcher, 4, 10)
        still_running = [task for task in tasks if not task.done()]
        outputs = [await task for task, one in zip(tasks, order, strict=True) if one in stay]
        await idle_within(dispatcher, 5)
        return (
            [o.new_token_ids for o in outputs],
            [expected_tokens(r) for r in stay],
            took,
            len(still_running),
        )

    tokens, expected, took, still_running = two_replicas(scenario)
    assert took < 4
    assert still_running == 4  # the leavers' slots were free before the others had ended
    assert tokens == expected


@pytest.mark.parametrize("when", ["streaming", "not dispatched yet", "all of a batch"])
def test_leaving_frees_the_engine(one_replica: Run, when: str) -> None:
    async def scenario(dispatcher):
        tasks = [
            asyncio.create_task(collect(dispatcher, request(f"{when}-{i}", max_tokens=1000)))
            for i in range(4 if when == "all of a batch" else 1)
        ]
        await asyncio.sleep(0.01 if when == "not dispatched yet" else 0.3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if when == "not dispatched yet":
            await asyncio.sleep(0.2)
        took = await idle_within(dispatcher, 5)
        return took, len(dispatcher._tasks)

    took, tasks = one_replica(scenario)
    assert took < 3  # alone they would run for ten seconds and more
    assert tasks <= 3  # the poll, and at most the tail of the last batch


def test_a_slow_reader_is_cancelled_and_memory_is_bounded(one_replica: Run) -> None:
    async def scenario(dispatcher):
        slow = dispatcher.stream(request("slow", max_tokens=1000))
        await anext(slow)
        quick = await collect(dispatcher, request("quick", 3, max_tokens=100))
        await asyncio.sleep(0.3)
        took = await idle_within(dispatcher, 5)  # cancelled though its reader has not left
        rest = [output async for output in slow]
        return rest, quick.error, took

    rest, quick_error, took = one_replica(scenario)
    assert rest[-1].error.code == "slow_consumer"
    assert sum(len(output.new_token_ids) for output in rest) <= 50
    assert quick_error is None
    assert took < 3  # alone they would run for ten seconds and more


def test_a_request_id_in_use_is_refused(one_replica: Run) -> None:
    async def scenario(dispatcher):
        same = request("same", 4, max_tokens=30)
        outputs = await collect_all(dispatcher, [same, same])
        again = await collect(dispatcher, same)
        return *outputs, again, expected_tokens(same)

    first, second, again, expected = one_replica(scenario)
    assert first.new_token_ids == again.new_token_ids == expected
    assert second.error.code == "internal_error"


def test_a_killed_replica_costs_only_what_it_had_begun(two_replicas: Run) -> None:
    async def scenario(dispatcher):
        loop = asyncio.get_running_loop()
        requests = [request(f"kill-{i}", i, max_tokens=40) for i in range(11)]
        requests.insert(0, request("killer", KILL, max_tokens=40))
        start = loop.time()
        outputs = await collect_all(dispatcher, requests)
        took = loop.time() - start
        after = [request(f"after-{i}", i) for i in range(8)]
        return list(zip(requests, outputs, strict=True)), took, await collect_all(dispatcher, after)

    pairs, took, after = two_replicas(scenario)
    lost = [output for _, output in pairs if output.error is not None]
    assert {output.error.code for output in lost} == {"replica_lost"}
    assert all(output.new_token_ids for output in lost)  # what had emitted nothing was replayed
    assert 1 <= len(lost) <= 4  # the running requests of one replica; 4 more were waiting on it
    done = [(r, output) for r, output in pairs if output.error is None]
    assert [output.new_token_ids for _, output in done] == [expected_tokens(r) for r, _ in done]
    assert all(output.error is None for output in after)
    assert took < 10


def test_a_dead_or_stuck_engine_is_replaced(serve_url: str) -> None:
    async def crash(dispatcher):
        pairs = [request("crash", CRASH, max_tokens=20), request("queued", 2)]
        crashed, queued = await collect_all(dispatcher, pairs)
        return crashed, queued, expected_tokens(pairs[1])

    async def hang(dispatcher):
        return await collect(dispatcher, request("hang", HANG, max_tokens=20))

    async def works(dispatcher):
        return await collect(dispatcher, request("works", 3))

    with probe_app("dead", fake_config(max_num_seqs=1), step_timeout_s=1.0) as run:
        crashed, queued, expected = run(crash)
        assert crashed.error.code == "engine_dead"
        assert len(crashed.new_token_ids) == 2
        assert queued.new_token_ids == expected  # replayed on the replica that came instead
        hung = run(hang)
        assert hung.error.code in ("engine_dead", "replica_lost")
        assert run(works).error is None


def test_no_replica_is_an_error_after_a_bounded_wait(serve_url: str) -> None:
    from configs.schema import AutoscalingConfig

    autoscaling = AutoscalingConfig(min_replicas=0, max_replicas=0 + 1, initial_replicas=0)
    config = fake_config(autoscaling=autoscaling, replica_wait_timeout_s=0.5)
    config = config.model_copy(
        update={
            "models": (
                config.models[0].model_copy(
                    update={"resources": config.models[0].resources.model_copy(update={"num_cpus": 1000})}
                ),
            )
        }
    )

    async def scenario(dispatcher):
        states = await dispatcher.model_states()
        return await collect(dispatcher, request("nobody")), states["fake"]

    with probe_app("none", config) as run:
        output, state = run(scenario)
    assert output.error.code == "model_not_ready"
    assert output.error.retryable is True
    assert state.ready  # scaled to zero counts as ready: a request is what wakes it
    assert not state.replicas
