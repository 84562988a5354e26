"""The step loop: thread, outputs, aborts, deadlines, faults, health."""

import asyncio
import contextlib
import threading
import time

import pytest

from configs.schema import ModelConfig
from replicas.engine.core import EngineCore
from replicas.errors import ContextLengthExceededError, EngineDeadError, InvalidRequestError, ModelLoadError
from replicas.protocol import DiffusionParams, Engine, FinishReason

NAMES = ["llada2_b8", "qwen3_dense_tied"]


@pytest.fixture
def core_of(golden):
    cores = []

    def make(name, **kwargs):
        cores.append(golden.core(name, **kwargs))
        return cores[-1]

    yield make
    for core in cores:
        core.shutdown()


def long_request(golden, request_id, prompt=(1, 2, 3), max_tokens=400, **kwargs):
    return golden.make(request_id, prompt, max_tokens=max_tokens, ignore_eos=True, **kwargs)


def assert_idle(core, slots):
    stats = core.stats()
    assert (stats.waiting, stats.running, stats.free_slots) == (0, 0, slots)
    assert stats.queued_tokens == 0
    assert stats.kv_usage == 0
    assert not core.has_work()


async def collect(core, request_ids):
    """All outputs until every one of ``request_ids`` has ended: {id: [outputs]}."""
    seen = {}
    open_ids = set(request_ids)
    async with contextlib.aclosing(core.steps()) as steps:
        async for step in steps:
            for output in step.outputs:
                seen.setdefault(output.request_id, []).append(output)
                if output.finished:
                    open_ids.discard(output.request_id)
            if not open_ids:
                break
    return seen


async def until_idle(core):
    while core.has_work():  # noqa: ASYNC110 (the step thread knows no event of this loop)
        await asyncio.sleep(0.01)


def tokens(outputs):
    return [token for output in outputs for token in output.new_token_ids]


@pytest.mark.parametrize("name", NAMES)
async def test_thread_gives_what_synchronous_steps_give(golden, core_of, name):
    requests = [
        golden.make(f"r{i}", prompt, max_tokens=20) for i, prompt in enumerate(golden.prompts(name)[:6])
    ]
    expected = golden.core(name).generate(requests)
    core = core_of(name, max_num_seqs=4)
    assert isinstance(core, Engine)
    core.start()
    ended = {}
    for request in requests:
        core.submit(request, on_finish=lambda output: ended.setdefault(output.request_id, output))
    seen = await collect(core, expected)
    for request_id, output in expected.items():
        assert tokens(seen[request_id]) == output.new_token_ids
        assert [o.finished for o in seen[request_id]] == [False] * (len(seen[request_id]) - 1) + [True]
        assert ended[request_id].finish_reason is output.finish_reason
    assert_idle(core, 4)
    assert core.stats().num_finished["length"] + core.stats().num_finished["stop"] == 6
    core.check_health()


async def test_outputs_before_the_consumer_are_kept_and_a_second_consumer_is_refused(golden, core_of):
    core = core_of("llada2_b8")
    core.start()
    core.submit(golden.make("r", (1, 2), max_tokens=12))
    await until_idle(core)
    assert len(tokens((await collect(core, ["r"]))["r"])) == 12
    one = core.steps()
    waiting = asyncio.ensure_future(anext(one))
    await asyncio.sleep(0.01)
    with pytest.raises(RuntimeError, match="consumer"):
        await anext(core.steps())
    core.shutdown()
    with pytest.raises(StopAsyncIteration):
        await waiting


@pytest.mark.parametrize("name", NAMES)
def test_abort_in_each_phase_a_hundred_times_leaks_nothing(golden, core_of, name):
    core = core_of(name, max_num_seqs=2, max_num_batched_tokens=16)
    block = core.capabilities.block_length
    for round_ in range(100):
        phase = ("waiting", "prefill", "decode", "just submitted", "finished", "unknown")[round_ % 6]
        fillers = []
        if phase == "waiting":
            fillers = ["f0", "f1"]
            for filler in fillers:
                core.submit(long_request(golden, filler))
            core.step()
        max_tokens = 1 if phase == "finished" else 100
        core.submit(
            long_request(golden, "x", prompt=[1] * (100 if phase == "prefill" else 3), max_tokens=max_tokens)
        )
        if phase != "just submitted":
            for _ in range({"decode": 3, "finished": 12}.get(phase, 1)):
                core.step()
        state = core._scheduler.get("x")
        if phase == "waiting":
            assert core.stats().waiting == 1
        elif phase == "prefill":
            assert 0 < state.num_computed_tokens < 100
            assert block is None or state.num_computed_tokens % block == 0
        elif phase == "decode":
            assert state.started
        elif phase == "finished":
            assert state is None
        core.abort("nobody" if phase == "unknown" else "x")
        outputs = core.step().outputs
        mine = [output for output in outputs if output.request_id == "x"]
        if phase == "finished":
            assert mine == []
        elif phase == "unknown":
            core.abort("x")
            core.step()
        else:
            assert [output.finish_reason for output in mine] == [FinishReason.ABORT]
        for filler in fillers:
            core.abort(filler)
        core.step()
        assert_idle(core, 2)
    # And the engine still gives right answers.
    case = golden.prompts(name)[2]
    request = golden.make("after", case, max_tokens=20)
    expected = golden.core(name).generate([request])["after"].new_token_ids
    assert core.generate([request])["after"].new_token_ids == expected


async def test_abort_from_another_thread_frees_the_slot(golden, core_of):
    core = core_of("qwen3_dense_tied", max_num_seqs=1)
    core.start()
    core.submit(long_request(golden, "a"))
    core.submit(golden.make("b", (1, 2), max_tokens=3))
    threading.Timer(0.05, core.abort, ("a",)).start()
    seen = await collect(core, ["a", "b"])
    assert seen["a"][-1].finish_reason is FinishReason.ABORT
    assert seen["b"][-1].finish_reason is FinishReason.LENGTH
    assert_idle(core, 1)


@pytest.mark.parametrize("name", NAMES)
def test_neighbours_of_an_aborted_request_are_undisturbed(golden, core_of, name):
    requests = [golden.make(f"r{i}", p, max_tokens=24) for i, p in enumerate(golden.prompts(name)[:4])]
    expected = {r.request_id: golden.core(name).generate([r])[r.request_id].new_token_ids for r in requests}
    core = core_of(name, max_num_seqs=3)
    got = {request.request_id: [] for request in requests}
    for request in requests:
        core.submit(request)
    for step in range(200):
        if step == 2:
            core.abort("r1")
        for output in core.step().outputs:
            got[output.request_id] += output.new_token_ids
        if not core.has_work():
            break
    for request_id in ("r0", "r2", "r3"):
        assert got[request_id] == expected[request_id]


def test_deadlines_end_waiting_and_running_requests(golden, core_of):
    core = core_of("llada2_b8", max_num_seqs=1)
    soon = time.time() + 0.05
    core.submit(long_request(golden, "running", deadline=soon))
    core.submit(long_request(golden, "waiting", deadline=soon))
    core.step()
    time.sleep(0.06)
    ended = {output.request_id: output for output in core.step().outputs if output.finished}
    assert set(ended) == {"running", "waiting"}
    for output in ended.values():
        assert output.finish_reason is FinishReason.ERROR
        assert output.error.code == "deadline_exceeded"
    assert_idle(core, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_in_a_step_fails_its_requests_only(golden, core_of, name, monkeypatch):
    core = core_of(name, max_num_seqs=2)
    for request_id in ("a", "b", "c"):
        core.submit(golden.make(request_id, (1, 2, 3), max_tokens=20))
    core.step()
    original = core.engine.runner.forward
    monkeypatch.setattr(core.engine.runner, "forward", lambda rows, copies: 1 / 0)
    outputs = {output.request_id: output for output in core.step().outputs}
    assert set(outputs) == {"a", "b"}
    for output in outputs.values():
        assert output.finish_reason is FinishReason.ERROR
        assert output.error.code == "engine_step_failed"
        assert "division" not in output.error.message
    monkeypatch.setattr(core.engine.runner, "forward", original)
    expected = golden.core(name).generate([golden.make("c", (1, 2, 3), max_tokens=20)])["c"].new_token_ids
    got = []
    while core.has_work():
        got += [token for output in core.step().outputs for token in output.new_token_ids]
    assert got == expected
    assert core.stats().num_finished["error"] == 2
    assert_idle(core, 2)


@pytest.mark.parametrize("method", ["prepare", "apply"])
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_of_one_request_fails_it_alone(golden, core_of, name, method):
    requests = [golden.make(f"r{i}", p, max_tokens=16) for i, p in enumerate(golden.prompts(name)[:4])]
    expected = golden.core(name).generate(requests)
    core = core_of(name, max_num_seqs=4)
    for request in requests:
        core.submit(request)
    got = {request.request_id: [] for request in requests}
    first = core.step().outputs
    setattr(core._scheduler.get("r2"), method, lambda *args: 1 / 0)
    outputs = list(first)
    while core.has_work():
        outputs += core.step().outputs
    for output in outputs:
        got[output.request_id] += output.new_token_ids
        if output.request_id == "r2" and output.finished:
            assert output.error.code == "engine_step_failed"
    for request_id in ("r0", "r1", "r3"):
        assert got[request_id] == expected[request_id].new_token_ids
    assert_idle(core, 4)


async def test_a_faulty_callback_is_survived(golden, core_of):
    core = core_of("llada2_b8")
    core.start()
    core.submit(golden.make("a", (1,), max_tokens=2), on_finish=lambda output: 1 / 0)
    core.submit(golden.make("b", (1,), max_tokens=2))
    await collect(core, ["a", "b"])
    core.check_health()


def test_refused_requests_leave_nothing_behind(golden, core_of):
    core = core_of("llada2_b8", max_model_len=64)
    with pytest.raises(ContextLengthExceededError, match="64 tokens, but 72"):
        core.submit(golden.make("a", [1] * 60, max_tokens=5))
    with pytest.raises(InvalidRequestError) as caught:
        core.submit(golden.make("a", [1, 319], max_tokens=5))
    assert caught.value.param == "prompt"
    core.submit(golden.make("a", [1] * 60, max_tokens=4))
    with pytest.raises(InvalidRequestError, match="unique") as caught:
        core.submit(golden.make("a", [1], max_tokens=4))
    assert caught.value.param == "request_id"
    while core.has_work():
        core.step()
    core.submit(golden.make("a", [1], max_tokens=4))


async def test_a_dead_loop_is_seen(golden, core_of, monkeypatch):
    core = core_of("llada2_b8")
    core.start()
    core.check_health()

    def broken():
        raise SystemError("scheduler is broken")

    monkeypatch.setattr(core._scheduler, "schedule", broken)
    core.submit(golden.make("a", (1,), max_tokens=2))
    seen = []

    async def consume():
        async for step in core.steps():
            seen.extend(step.outputs)

    with pytest.raises(EngineDeadError, match="scheduler is broken"):
        await consume()
    assert [output.error.code for output in seen] == ["engine_dead"]
    assert seen[0].error.retryable
    with pytest.raises(EngineDeadError):
        core.check_health()
    with pytest.raises(EngineDeadError):
        core.submit(golden.make("b", (1,), max_tokens=2))


async def test_a_stuck_step_is_seen(golden, core_of, monkeypatch):
    core = core_of("llada2_b8", step_timeout_s=0.1)
    release = threading.Event()
    original = core.engine.execute

    def stuck(rows):
        release.wait(10)
        return original(rows)

    monkeypatch.setattr(core.engine, "execute", stuck)
    core.start()
    await asyncio.sleep(0.2)
    core.check_health()  # idle for long is healthy
    core.submit(golden.make("a", (1,), max_tokens=2))
    core.check_health()
    await asyncio.sleep(0.2)
    with pytest.raises(EngineDeadError, match="has not ended"):
        core.check_health()
    release.set()
    await collect(core, ["a"])
    core.check_health()


async def test_shutdown_ends_live_requests_and_is_idempotent(golden, core_of):
    core = core_of("qwen3_dense_tied", max_num_seqs=1)
    core.start()
    for request_id in ("a", "b"):
        core.submit(long_request(golden, request_id))
    consumer = asyncio.ensure_future(collect(core, ["a", "b"]))
    await asyncio.sleep(0.05)
    core.shutdown()
    core.shutdown()
    seen = await consumer
    for request_id in ("a", "b"):
        assert seen[request_id][-1].error.code == "engine_dead"
        assert seen[request_id][-1].error.retryable
    with pytest.raises(EngineDeadError, match="shut down"):
        core.check_health()
    with pytest.raises(EngineDeadError):
        core.submit(golden.make("c", (1,), max_tokens=2))


def test_an_idle_engine_does_not_spin(core_of):
    core = core_of("llada2_b8")
    core.start()
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1


def test_many_threads_may_submit_and_abort(golden, core_of):
    core = core_of("llada2_b8", max_num_seqs=4)
    core.start()

    def client(n):
        for i in range(10):
            core.submit(
                golden.make(f"{n}-{i}", (1, 2), max_tokens=2, diffusion=DiffusionParams(threshold=0.0))
            )
            if i % 2:
                core.abort(f"{n}-{i}")

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end = time.monotonic() + 30
    while core.has_work() and time.monotonic() < end:
        time.sleep(0.01)
    assert_idle(core, 4)
    assert sum(core.stats().num_finished.values()) == 80


def config_of(golden, name, **engine):
    return ModelConfig.model_validate(
        {"name": "m", "path": str(golden.path / name), "engine": {"max_model_len": 128, **engine}}
    )


def test_from_config(golden):
    config = config_of(golden, "llada2_b8", max_num_seqs=3, dtype="float32", device="cpu")
    core = EngineCore.from_config(config, golden.path / "llada2_b8")
    capabilities = core.capabilities
    assert (capabilities.max_num_seqs, capabilities.max_model_len, capabilities.block_length) == (3, 128, 8)
    assert capabilities.logprobs
    assert not capabilities.structured_output
    assert not capabilities.penalties
    request = golden.make("a", (1, 2, 3), max_tokens=9)
    expected = golden.core("llada2_b8").generate([request])["a"].new_token_ids
    assert core.generate([request])["a"].new_token_ids == expected
    core.shutdown()


def test_kv_memory_that_does_not_fit_is_refused_by_numbers(golden):
    config = config_of(golden, "qwen3_dense_tied", max_num_seqs=4, kv_cache_memory_bytes=1000, device="cpu")
    with pytest.raises(ModelLoadError) as caught:
        EngineCore.from_config(config, golden.path / "qwen3_dense_tied")
    for number in ("1000", "`max_num_seqs` 4", "`max_model_len` 128"):
        assert number in caught.value.message
