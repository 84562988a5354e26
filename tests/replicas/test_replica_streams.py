"""``EngineReplica`` without Ray: streams, faults, health, stats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from fake_engine import BAD, CRASH, HANG, FakeEngine, expected_tokens

from configs.schema import EngineConfig, ModelConfig
from replicas import replica as replica_module
from replicas.errors import EngineDeadError
from replicas.protocol import GenerationRequest, RequestOutput, SamplingParams
from replicas.replica import EngineReplica


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    calls: list[float] = []
    monkeypatch.setattr(replica_module, "_exit_process", lambda: calls.append(time.monotonic()))
    monkeypatch.setattr(replica_module, "EXIT_GRACE_S", 0.05)
    return calls


@pytest.fixture
async def replica(exits: list[float]) -> AsyncIterator[EngineReplica]:
    async with aclosing(start_replica()) as started:
        async for one in started:
            yield one


async def start_replica(**engine):
    one = EngineReplica.__new__(EngineReplica)
    config = ModelConfig(name="fake", path="x", engine=EngineConfig(max_num_seqs=2))
    await one.__init__(config, lambda _: FakeEngine(max_num_seqs=2, **{"step_s": 0.002, **engine}))
    yield one
    one.__del__()


def request(request_id: str, *prompt: int, max_tokens: int = 5, **kwargs) -> GenerationRequest:
    return GenerationRequest(
        request_id, "fake", prompt or (1,), SamplingParams(max_tokens=max_tokens), **kwargs
    )


async def outputs_of(replica: EngineReplica, *requests: GenerationRequest) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {one.request_id: [] for one in requests}
    async for kind, payload in replica.generate_batch(requests):
        if kind == "out":
            for output in payload:
                outputs[output.request_id].append(output)
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


async def idle(replica: EngineReplica, seconds: float = 1.0) -> None:
    deadline = time.monotonic() + seconds
    while (stats := replica._engine.stats()).running + stats.waiting or replica._streams:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_header_first_then_the_outputs_and_the_end(replica: EngineReplica) -> None:
    requests = [request(f"r{i}", i, max_tokens=3 + i) for i in range(5)]  # two slots: three wait
    envelopes = [envelope async for envelope in replica.generate_batch(requests, num_requests=5)]
    assert envelopes[0] == ("hdr", replica.replica_id)
    outputs = [output for kind, payload in envelopes if kind == "out" for output in payload]
    for one in requests:
        assert tokens([o for o in outputs if o.request_id == one.request_id]) == expected_tokens(one)
    assert sum(output.finished for output in outputs) == 5


async def test_two_batches_get_their_own_outputs(replica: EngineReplica) -> None:
    a, b = request("a", 10, max_tokens=20), request("b", 20, max_tokens=20)
    first, second = await asyncio.gather(outputs_of(replica, a), outputs_of(replica, b))
    assert tokens(first["a"]) == expected_tokens(a)
    assert tokens(second["b"]) == expected_tokens(b)


async def test_bad_and_expired_requests_fail_alone_and_a_doubled_one_runs_once(
    replica: EngineReplica,
) -> None:
    good = request("good", 3)
    outputs = await outputs_of(
        replica, request("bad", BAD), good, request("late", 1, deadline=time.time() - 1), good
    )
    assert outputs["bad"][-1].error.code == "invalid_request"
    assert outputs["late"][-1].error.code == "deadline_exceeded"
    assert tokens(outputs["good"]) == expected_tokens(good)


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_leaving_the_stream_aborts_its_requests_only(replica: EngineReplica, how: str) -> None:
    other = asyncio.create_task(outputs_of(replica, request("other", 7, max_tokens=50)))
    if how == "close":
        stream = replica.generate_batch([request("left", max_tokens=100_000)])
        async for kind, _ in stream:
            if kind == "out":
                break
        await stream.aclose()
    else:
        task = asyncio.create_task(outputs_of(replica, request("left", max_tokens=100_000)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(tokens((await other)["other"])) == 50
    await idle(replica)
    assert replica._engine.aborts == ["left"]


async def test_abort_ends_one_request_and_ignores_unknown_ids(replica: EngineReplica) -> None:
    stay = request("stay", max_tokens=60)
    task = asyncio.create_task(outputs_of(replica, request("go", max_tokens=100_000), stay))
    await asyncio.sleep(0.05)
    await replica.abort(["go", "never seen"], pin="x")
    outputs = await asyncio.wait_for(task, 5)
    assert outputs["go"][-1].finish_reason == "abort"
    assert tokens(outputs["stay"]) == expected_tokens(stay)
    await idle(replica)


async def test_a_live_request_id_is_started_again(replica: EngineReplica) -> None:
    again = request("again", 9, max_tokens=30)
    first = asyncio.create_task(outputs_of(replica, again))
    await asyncio.sleep(0.02)
    second = await outputs_of(replica, again)
    assert tokens(second["again"]) == expected_tokens(again)
    assert (await first)["again"][-1].finish_reason == "abort"


async def test_pings_while_nothing_comes_and_the_deadline_is_kept(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "PING_INTERVAL_S", 0.02)
    replica._engine.first_token_s = 60.0
    slow = request("slow", deadline=time.time() + 0.2)
    envelopes = [envelope async for envelope in replica.generate_batch([slow])]
    assert envelopes.count(("ping", None)) >= 3
    assert envelopes[-1][1][-1].finish_reason == "abort"


async def test_a_crash_fails_what_runs_and_ends_the_process(
    replica: EngineReplica, exits: list[float]
) -> None:
    outputs = await asyncio.wait_for(
        outputs_of(replica, request("crash", CRASH, max_tokens=50), request("other", max_tokens=50)), 5
    )
    assert {outputs[name][-1].error.code for name in outputs} == {"engine_dead"}
    assert outputs["other"][-1].error.retryable
    with pytest.raises(EngineDeadError):
        replica.check_health()
    late = await asyncio.wait_for(outputs_of(replica, request("late")), 5)
    assert late["late"][-1].error.code == "engine_dead"
    assert len(exits) == 1


async def test_a_stuck_engine_is_found_by_the_health_check(exits: list[float]) -> None:
    async for replica in start_replica(step_timeout_s=0.2):
        replica.check_health()
        task = asyncio.create_task(outputs_of(replica, request("hang", HANG, max_tokens=50)))
        await asyncio.sleep(0.1)
        replica.check_health()  # slow is not stuck
        await asyncio.sleep(0.3)
        with pytest.raises(EngineDeadError):
            replica.check_health()
        outputs = await asyncio.wait_for(task, 5)
        assert outputs["hang"][-1].error.code == "engine_dead"
        await asyncio.sleep(0.1)
        assert len(exits) == 1


async def test_a_shutdown_is_not_a_crash(exits: list[float]) -> None:
    async for replica in start_replica():
        replica.__del__()
        replica.__del__()
        replica._die(RuntimeError("an engine that complains about its shutdown"))
        await asyncio.sleep(0.2)
    assert exits == []


async def test_stats_are_numbers_and_do_not_flutter(replica: EngineReplica) -> None:
    task = asyncio.create_task(outputs_of(replica, *(request(f"r{i}", max_tokens=1234) for i in range(3))))
    await asyncio.sleep(0.02)
    scaling = replica.record_autoscaling_stats()
    assert {name: type(value) for name, value in scaling.items()} == dict.fromkeys(
        ["waiting", "running", "queued_tokens", "kv_usage"], float
    )
    assert (scaling["running"], scaling["waiting"]) == (2, 1)
    routing = replica.record_routing_stats()
    assert (routing["running"], routing["waiting"], routing["total_slots"]) == (2, 1, 2)
    assert routing["queued_tokens"] == 3700
    assert 0 <= time.time() - routing["as_of"] <= replica_module.ROUTING_CLOCK_S
    task.cancel()
    replica_id, stats = await replica.engine_stats()
    assert replica_id == replica.replica_id
    assert stats.total_slots == 2
