"""The dispatcher against handles that misbehave in ways a real replica rarely does on demand."""

from __future__ import annotations

import asyncio
import contextvars
import pickle
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from probe import collect, collect_all, fake_config, request
from ray.serve.exceptions import DeploymentUnavailableError

from configs.schema import BatchingConfig
from deployments import batching
from deployments.batching import BatchingDispatcher
from replicas.protocol import FinishReason, GenerationRequest, RequestOutput, SamplingParams

Script = Callable[[list[GenerationRequest]], AsyncIterator[tuple[str, Any]]]


class FakeHandle:
    """Each ``generate_batch`` call runs the next script; the last one is repeated."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.calls: list[dict[str, Any]] = []
        self.cancelled = 0
        self.aborted: list[tuple[list[str], str]] = []
        self.abort = self

    def options(self, **options: Any) -> FakeHandle:
        self.calls.append(options)
        return self

    def remote(self, requests: list[Any], **hints: Any) -> Any:
        if "pin" in hints:
            self.aborted.append((requests, hints["pin"]))
            return asyncio.sleep(0)
        self.calls[-1].update(hints, requests=list(requests))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        return FakeResponse(self, script(requests))


class FakeResponse:
    def __init__(self, handle: FakeHandle, stream: AsyncIterator[tuple[str, Any]]) -> None:
        self.handle, self.stream = handle, stream

    async def __anext__(self) -> tuple[str, Any]:
        return await anext(self.stream)

    def cancel(self) -> None:
        self.handle.cancelled += 1


async def answer(requests: list[GenerationRequest]) -> AsyncIterator[tuple[str, Any]]:
    yield "hdr", "good"
    for one in requests:
        yield "out", [RequestOutput(one.request_id, [7], FinishReason.STOP)]


def breaks_with(error: BaseException, *envelopes: tuple[str, Any]) -> Script:
    async def script(_: list[GenerationRequest]) -> AsyncIterator[tuple[str, Any]]:
        for envelope in envelopes:
            yield envelope
        raise error

    return script


def hangs_after(*envelopes: tuple[str, Any]) -> Script:
    async def script(_: list[GenerationRequest]) -> AsyncIterator[tuple[str, Any]]:
        for envelope in envelopes:
            yield envelope
        await asyncio.sleep(3600)

    return script


@pytest.fixture
def dispatcher_for(monkeypatch: pytest.MonkeyPatch) -> Callable[..., BatchingDispatcher]:
    # Outside a replica there is no `serve.batch`; what it does, for batches of whatever comes in one turn.
    def batch(**_: Any) -> Callable[[Any], Any]:
        def decorate(form: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
            waiting: list[Any] = []

            async def enqueue(item: Any) -> None:
                waiting.append(item)
                await asyncio.sleep(0)
                if items := waiting[:]:
                    waiting.clear()
                    await form(items)

            return enqueue

        return decorate

    monkeypatch.setattr(batching.serve, "batch", batch)

    def make(handle: FakeHandle, **options: Any) -> BatchingDispatcher:
        config = fake_config(max_num_seqs=4)
        config = config.model_copy(
            update={"batching": BatchingConfig(**{"replica_wait_timeout_s": 0.2, **options})}
        )
        return BatchingDispatcher(config, {"fake": handle})

    return make


async def test_one_stream_per_batch_and_no_larger_than_a_forward(dispatcher_for) -> None:
    handle = FakeHandle(answer)
    outputs = await collect_all(dispatcher_for(handle), [request(f"r{i}") for i in range(6)])
    assert [output.new_token_ids for output in outputs] == [[7]] * 6
    assert [call["num_requests"] for call in handle.calls] == [4, 2]
    assert handle.calls[0]["num_tokens"] == 4 * (1 + 10)
    assert handle.cancelled == 0  # streams that ended by themselves


@pytest.mark.parametrize(
    ("first", "avoid"),
    [
        (breaks_with(RuntimeError("boom")), []),
        (breaks_with(RuntimeError("boom"), ("hdr", "bad")), ["bad"]),
        (breaks_with(asyncio.CancelledError(), ("hdr", "bad")), ["bad"]),  # the peer's gRPC CANCELLED
    ],
)
async def test_a_lost_stream_is_replayed_elsewhere(dispatcher_for, first: Script, avoid: list[str]) -> None:
    handle = FakeHandle(first, answer)
    output = await collect(dispatcher_for(handle), request("r"))
    assert output.new_token_ids == [7]
    assert handle.calls[1]["avoid"] == avoid


async def test_replays_are_bounded(dispatcher_for) -> None:
    handle = FakeHandle(breaks_with(RuntimeError("boom"), ("hdr", "bad")))
    output = await collect(dispatcher_for(handle, max_attempts=3), request("r"))
    assert output.error.code == "replica_lost"
    assert len(handle.calls) == 3


async def test_what_has_emitted_is_not_replayed(dispatcher_for) -> None:
    begun = ("out", [RequestOutput("begun", [1])])
    handle = FakeHandle(breaks_with(RuntimeError("boom"), ("hdr", "bad"), begun), answer)
    begun_output, fresh_output = await collect_all(
        dispatcher_for(handle), [request("begun"), request("fresh")]
    )
    assert (begun_output.new_token_ids, begun_output.error.code) == ([1], "replica_lost")
    assert fresh_output.new_token_ids == [7]
    assert [one.request_id for one in handle.calls[1]["requests"]] == ["fresh"]


async def test_silence_means_lost(dispatcher_for, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "STREAM_SILENCE_TIMEOUT_S", 0.1)
    handle = FakeHandle(hangs_after(("hdr", "silent"), ("ping", None)), answer)
    output = await collect(dispatcher_for(handle), request("r"))
    assert output.new_token_ids == [7]
    assert handle.cancelled == 1


@pytest.mark.parametrize("script", [hangs_after(), breaks_with(DeploymentUnavailableError("fake"))])
async def test_no_replica_is_not_ready_and_not_replayed(dispatcher_for, script: Script) -> None:
    handle = FakeHandle(script)
    output = await collect(dispatcher_for(handle), request("r"))
    assert output.error.code == "model_not_ready"
    assert len(handle.calls) == 1


async def test_a_reader_that_left_before_the_header_is_aborted_after_it(dispatcher_for) -> None:
    header = asyncio.Event()

    async def late_header(requests: list[GenerationRequest]) -> AsyncIterator[tuple[str, Any]]:
        await header.wait()
        async for envelope in answer(requests):
            yield envelope
            await asyncio.sleep(0.01)

    handle = FakeHandle(late_header)
    dispatcher = dispatcher_for(handle)
    gone = asyncio.create_task(collect(dispatcher, request("gone")))
    stays = asyncio.create_task(collect(dispatcher, request("stays")))
    await asyncio.sleep(0.05)
    gone.cancel()
    await asyncio.sleep(0)
    header.set()
    assert (await stays).new_token_ids == [7]
    await asyncio.sleep(0.05)
    assert handle.aborted == [(["gone"], "good")]


async def test_large_batches_go_by_reference(dispatcher_for, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MAX_INLINE_BYTES", 5000)
    handle = FakeHandle(answer)
    dispatcher = dispatcher_for(handle)
    await collect(dispatcher, request("small", *range(500)))
    await collect(dispatcher, request("large", *range(1500)))
    constrained = request("grammar", *range(500))
    grammar = replace(constrained.sampling, grammar='start: "' + "a" * 5000 + '"')
    await collect(dispatcher, replace(constrained, sampling=grammar))
    assert [call["_by_reference"] for call in handle.calls] == [False, True, True]


@pytest.mark.parametrize("prompt", [(), (1, 2, 3), tuple(range(70_000, 90_000))])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"grammar": "ä" * 1000},
        {"logit_bias": tuple((70_000 + i, i / 7) for i in range(1000))},
        {"stop_token_ids": tuple(range(70_000, 70_256))},
    ],
)
def test_no_request_takes_more_bytes_than_reckoned(prompt: tuple[int, ...], sampling: dict[str, Any]) -> None:
    one = GenerationRequest("i" * 32, "m" * 64, prompt, SamplingParams(seed=2**62, **sampling), deadline=0.1)
    for copies in (1, 3):
        batch = [replace(one, request_id=str(i) * 32) for i in range(copies)]
        assert len(pickle.dumps(batch)) <= sum(map(batching._num_bytes, batch))


async def test_handle_calls_run_in_a_clean_context(dispatcher_for) -> None:
    # Calls that inherit one request's context share its id, and Serve's router then mixes them up.
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="clean")
    variable.set("a request's")
    seen: list[str] = []

    async def script(requests: list[GenerationRequest]) -> AsyncIterator[tuple[str, Any]]:
        seen.append(variable.get())
        async for envelope in answer(requests):
            yield envelope

    await collect(dispatcher_for(FakeHandle(script)), request("r"))
    assert seen == ["clean"]


async def test_close_ends_all_tasks(dispatcher_for) -> None:
    dispatcher = dispatcher_for(FakeHandle(hangs_after(("hdr", "r"))))
    reader = asyncio.create_task(collect(dispatcher, request("r")))
    await asyncio.sleep(0.05)
    await dispatcher.close()
    assert not dispatcher._tasks
    reader.cancel()
