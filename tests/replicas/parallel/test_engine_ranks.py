"""The engine on several ranks: the reference's tokens, faults, and ranks that stay in step."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from configs.schema import ModelConfig
from replicas.engine import slot_engine
from replicas.engine.core import EngineCore
from replicas.engine.rank import KVLimits
from replicas.engine.rank_processes import check_divisible, check_kv_memory_on_all, load_on_all, start_ranks
from replicas.errors import EngineDeadError, ModelLoadError
from replicas.model_info import load_model_info
from replicas.models.registry import load_model
from replicas.parallel.local import LocalLauncher
from replicas.parallel.ranks import Ranks
from replicas.protocol import DiffusionParams, FinishReason, GenerationRequest, SamplingParams
from replicas.verify import run_verify

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def config_of(name: str, **engine) -> ModelConfig:
    engine = {"device": "cpu", "dtype": "float32", "tensor_parallel_size": 2, "num_threads": 1} | engine
    return ModelConfig.model_validate({"name": "m", "path": str(GOLDEN / name), "engine": engine})


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two ranks for engines that leave them alive."""
    ranks = start_ranks(2, torch.device("cpu"))
    yield ranks
    ranks.shutdown()


@pytest.fixture
def core() -> Iterator[EngineCore]:
    """An engine of its own on two ranks; nothing may be left of it."""
    before = children()
    core = EngineCore.from_config(config_of("llada2_b8", max_num_seqs=4), GOLDEN / "llada2_b8")
    yield core
    core.shutdown()
    assert children() == before


def other_rank(core: EngineCore) -> psutil.Process:
    ranks = core.engine.runner._ranks
    assert isinstance(ranks._launcher, LocalLauncher)
    (process,) = ranks._launcher.processes
    return psutil.Process(process.pid)


def cases(name: str) -> list[dict]:
    found = json.loads((GOLDEN / name / "generate_llada20.json").read_text())
    return [case for case in found if not case["params"].get("temperature")]


def request(case: dict, request_id: str, **sampling) -> GenerationRequest:
    params = case["params"]
    diffusion = DiffusionParams(
        steps=params.get("steps", 32),
        threshold=params.get("threshold", 0.95),
        minimal_topk=params.get("minimal_topk", 1),
        eos_early_stop=params.get("eos_early_stop", False),
    )
    limits = SamplingParams(**{"max_tokens": params["gen_length"]} | sampling)
    return GenerationRequest(request_id, "m", tuple(case["prompt_ids"]), limits, diffusion)


def expected(case: dict) -> list[int]:
    return case["output_ids"][: case["params"]["gen_length"]]


def long_request(request_id: str) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=400, ignore_eos=True)
    return GenerationRequest(request_id, "m", (1, 2, 3), sampling, DiffusionParams(threshold=1.0))


@pytest.mark.parametrize(
    ("size", "names", "total"),
    [
        (2, ["llada2_tp", "qwen2_5", "qwen3_dense_untied", "qwen3_moe"], 5),
        # Four ranks and two KV heads: each is held twice.
        (4, ["llada2_tp", "qwen2_5"], 3),
    ],
)
def test_generations_equal_the_reference(size: int, names: list[str], total: int) -> None:
    before = children()
    lines: list[str] = []
    folders = [GOLDEN / name for name in names]
    status = run_verify(folders, concurrent=8, tensor_parallel_size=size, out=lines.append)
    text = "\n".join(lines)
    assert status == 0, text
    assert text.count(f"on {size} ranks") == total
    assert sum("on 1 rank," in line + "," for line in lines) == len(lines) - 1 - total
    assert children() == before


def test_sizes_that_do_not_divide_are_named() -> None:
    """Before any process starts, and without hiding other directories."""
    tied = GOLDEN / "qwen3_dense_tied"
    message = r"`num_key_value_heads` \(3\) must be a multiple or a divisor of `tensor_parallel_size` \(2\)"
    with pytest.raises(ModelLoadError, match=message):
        EngineCore.from_config(config_of("qwen3_dense_tied"), tied)
    message = r"`num_attention_heads` \(6\) must be a multiple of `tensor_parallel_size` \(4\)"
    with pytest.raises(ModelLoadError, match=message):
        check_divisible(load_model_info(tied), 4)
    message = r"`moe_intermediate_size` \(48\) must be a multiple of `tensor_parallel_size` \(5\)"
    info = load_model_info(GOLDEN / "llada2_b8")
    info.config.update(num_attention_heads=10, num_key_value_heads=5)
    with pytest.raises(ModelLoadError, match=message):
        check_divisible(info, 5)


def test_verify_names_a_directory_that_does_not_divide() -> None:
    lines: list[str] = []
    folders = [GOLDEN / "qwen3_dense_tied", GOLDEN / "qwen2_5"]
    assert run_verify(folders, concurrent=8, tensor_parallel_size=2, out=lines.append) == 1
    assert "`num_key_value_heads` (3)" in lines[0]
    assert "14/14 equal" in lines[2]
    assert lines[-1].endswith(": 1 failed")


def test_a_load_error_on_any_rank_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(ModelLoadError, match="1000 are available"):
        EngineCore.from_config(config_of("llada2_b8", kv_cache_memory_bytes=1000), GOLDEN / "llada2_b8")
    for file in ("config.json", "meta.json"):
        (tmp_path / file).write_bytes((GOLDEN / "llada2_b8" / file).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        EngineCore.from_config(config_of("llada2_b8"), tmp_path)
    assert children() == before


def test_a_rank_has_its_share_of_the_memory(two: Ranks) -> None:
    info = load_model_info(GOLDEN / "llada2_b8")
    rank, memories = load_on_all(two, info, torch.float32, 1)
    assert len(memories) == 2
    assert memories[0] == memories[1], "both are on this machine"
    limits = KVLimits(4, 128, None, 0.5)
    # keys and values, layers, slots, tokens, heads of one rank (half of 2), head_dim, bytes
    own = 2 * 3 * 4 * 128 * 1 * rank.model.head_dim * 4
    assert check_kv_memory_on_all(two, rank, limits, memories) == [own, own]
    with pytest.raises(ModelLoadError, match=f"{own} bytes are needed"):
        check_kv_memory_on_all(two, rank, KVLimits(4, 128, own - 1, 0.5), memories)
    with pytest.raises(ModelLoadError, match="for 2 ranks"):
        check_kv_memory_on_all(two, rank, KVLimits(4, 128, None, 1e-9), memories)


def test_ranks_stay_in_step_over_cycles_of_ends_aborts_and_faults(core: EngineCore, monkeypatch) -> None:
    rng = itertools.cycle(["end", "abort", "fault before", "fault in sampling", "fault after"])
    found = cases("llada2_b8")
    original = slot_engine.select_tokens
    forwards = 0
    for cycle, kind in zip(range(25), rng, strict=False):
        batch = [found[(cycle + i) % len(found)] for i in range(5)]
        ids = [f"{cycle}-{i}" for i in range(5)]
        for request_id, case in zip(ids, batch, strict=True):
            core.submit(request(case, request_id))
        outputs = {request_id: [] for request_id in ids}
        for step in itertools.count():
            if step == 1 and kind == "abort":
                core.abort(ids[0])
                core.abort(ids[4])
            if step == 1 and kind in ("fault before", "fault after"):
                method = "prepare" if kind == "fault before" else "apply"
                for state in list(core._scheduler.running)[:1]:
                    monkeypatch.setattr(state, method, lambda *args: 1 / 0)
            failing = step == 1 and kind == "fault in sampling"
            monkeypatch.setattr(slot_engine, "select_tokens", divide if failing else original)
            for output in core.step().outputs:
                outputs[output.request_id].append(output)
            if not core.has_work():
                break
        reasons = [outputs[request_id][-1].finish_reason for request_id in ids]
        for request_id, case in zip(ids, batch, strict=True):
            if outputs[request_id][-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                tokens = [token for output in outputs[request_id] for token in output.new_token_ids]
                assert tokens == expected(case)
        assert (FinishReason.ABORT in reasons) == (kind == "abort")
        assert (FinishReason.ERROR in reasons) == kind.startswith("fault"), kind
        assert core.stats().free_slots == 4
        by_rank = core.engine.runner.num_forwards_by_rank()
        assert by_rank[0] == by_rank[1] > forwards
        forwards = by_rank[0]
        core.check_health()


def test_prefixes_are_copied_on_every_rank(core: EngineCore) -> None:
    """Eight requests that begin alike, on four slots: the first one computes it, the others copy it."""
    system = [(7 * i * i + 3) % 290 + 5 for i in range(40)]
    requests = [
        GenerationRequest(
            f"r{i}",
            "m",
            (*system, 9 + i, 17),
            SamplingParams(max_tokens=20, ignore_eos=True),
            DiffusionParams(threshold=0.9),
        )
        for i in range(8)
    ]
    info = load_model_info(GOLDEN / "llada2_b8")
    model = load_model(info, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    alone = EngineCore.from_model(model, info, max_num_seqs=1, enable_prefix_caching=False)
    cold = {request.request_id: alone.generate([request])[request.request_id] for request in requests}
    copies = []
    forward = core.engine.runner.forward

    def spy(rows, copied):
        copies.extend(copied)
        return forward(rows, copied)

    core.engine.runner.forward = spy
    got = core.generate(requests)
    assert {key: output.new_token_ids for key, output in got.items()} == {
        key: output.new_token_ids for key, output in cold.items()
    }
    assert sum(output.num_cached_tokens == 40 for output in got.values()) == 7
    assert any(num_tokens == 40 for _, _, num_tokens in copies)


def divide(*args, **kwargs):
    return 1 / 0


def test_a_reader_that_fails_between_parts_of_the_logits_loses_its_step_only(two: Ranks, monkeypatch) -> None:
    """Ten requests decide 320 positions: the other rank still waits for the last 64 when sampling fails."""
    info = load_model_info(GOLDEN / "llada2_tp")
    rank, _ = load_on_all(two, info, torch.float32, 1)
    core = EngineCore.from_model(rank.model, info, max_num_seqs=10, max_model_len=128)
    core.engine.runner.lead(two, owned=False)
    for i in range(10):
        core.submit(short(str(i)))
    with monkeypatch.context() as patch:
        patch.setattr(slot_engine, "select_tokens", divide)
        outputs = core.step().outputs
    assert len(outputs) == 10
    assert {output.error.code for output in outputs} == {"engine_step_failed"}
    assert core.engine.runner.num_forwards_by_rank() == [1, 1]
    (case, *_) = (
        case for case in cases("llada2_tp") if len(case["prompt_ids"]) + case["params"]["gen_length"] < 96
    )
    output = core.generate([request(case, "next")])["next"]
    assert output.new_token_ids == expected(case)
    core.shutdown()
    two.check_health()


def short(request_id: str) -> GenerationRequest:
    return GenerationRequest(request_id, "m", (1,), SamplingParams(max_tokens=32), DiffusionParams())


@pytest.mark.parametrize("where", ["rank 0", "another rank"])
def test_a_fault_in_a_forward_ends_the_engine(core: EngineCore, monkeypatch, where: str) -> None:
    core.submit(long_request("a"))
    core.step()
    model = core.engine.model
    if where == "rank 0":
        monkeypatch.setattr(model, "forward", divide)
    else:
        core.engine.runner._ranks.send("no_such_method")
    core.submit(long_request("b"))
    outputs = {output.request_id: output for output in core.step().outputs}
    assert set(outputs) == {"a", "b"}
    for output in outputs.values():
        assert output.error.code == "engine_dead"
        assert output.error.retryable
        assert "tensor-parallel rank" in output.error.message
    with pytest.raises(EngineDeadError, match="tensor-parallel rank"):
        core.check_health()
    with pytest.raises(EngineDeadError):
        core.submit(long_request("c"))
    assert core.stats().free_slots == 4


@pytest.mark.parametrize("busy", [True, False])
async def test_a_killed_rank_ends_requests_with_a_retryable_error(core: EngineCore, busy: bool) -> None:
    process = other_rank(core)
    begun = asyncio.Event()
    errors = {}

    async def read() -> None:
        async for step in core.steps():
            for output in step.outputs:
                begun.set()
                if output.finished:
                    errors[output.request_id] = output.error

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    core.check_health()
    if busy:
        for i in range(6):
            core.submit(long_request(str(i)))
        await begun.wait()
        process.kill()
        with pytest.raises(EngineDeadError):
            await reader
        assert set(errors) == {str(i) for i in range(6)}
        assert all(error.code == "engine_dead" and error.retryable for error in errors.values())
    else:
        process.kill()
    while True:
        try:
            core.check_health()
        except EngineDeadError:
            break
        await asyncio.sleep(0.02)
    core.shutdown()
    if not busy:
        await reader
    assert not process.is_running()


def test_a_step_that_hangs_ends_at_shutdown(core: EngineCore, monkeypatch) -> None:
    monkeypatch.setattr("replicas.engine.step_thread._JOIN_TIMEOUT_S", 0.5)
    process = other_rank(core)
    finished = []
    process.suspend()
    core.start()
    core.submit(long_request("a"), on_finish=finished.append)
    while not core._scheduler.running:
        time.sleep(0.01)
    time.sleep(0.2)
    core.shutdown()
    (output,) = finished
    assert output.error.retryable
