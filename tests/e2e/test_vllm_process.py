"""vLLM's engine process dies under load: requests end, the replica comes back, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import httpx
import psutil
import pytest
from running_server import GOLDEN, NEEDS_VLLM, Server, engine, golden, read_stream, serve
from transformers import AutoTokenizer

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize("name", ["qwen3_dense_untied", "llada2_b32"])
async def test_a_killed_engine_process(name: str, tmp_path: Path) -> None:
    model = {
        "name": "m",
        "path": str(GOLDEN / name),
        "engine": engine("vllm", max_num_seqs=4),
        "resources": {"num_cpus": 0.5, "health_check_period_s": 1},
    }
    body = {
        "model": "m",
        "prompt": [65, 66, 67, 68] * 8,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 900,
    }
    with serve({"models": [model]}, tmp_path) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            expected, error = await read_stream(client, body)
            assert error is None
            begun = asyncio.Semaphore(0)
            ended: list[float] = []

            async def user() -> tuple[str, str | None]:
                result = await read_stream(client, body, begun)
                ended.append(time.monotonic())
                return result

            users = [asyncio.create_task(user()) for _ in range(6)]
            for _ in range(4):
                await begun.acquire()
            (core,) = engine_processes(server)
            replica = core.parent()
            core.kill()
            killed = time.monotonic()
            done, pending = await asyncio.wait(users, timeout=110)
            assert not pending, "a request hangs"
            results = [task.result() for task in done]
            lost = [text for text, error in results if error is not None]
            assert {error for _, error in results} <= {None, "replica_lost", "engine_dead"}
            assert all(expected.startswith(text) for text in lost)
            assert all(text == expected for text, error in results if error is None)
            in_time = sum(at - killed < 1.0 for at in ended)
            assert in_time >= len(lost), "what was in flight must end within a second"
            assert lost
            replica.wait(timeout=30)
            assert await read_stream(client, body) == (expected, None)
            (back,) = engine_processes(server)
            assert back.pid != core.pid
            assert back.parent().pid != replica.pid


@pytest.mark.slow
async def test_two_ranks(tmp_path: Path) -> None:
    model = {
        "name": "m",
        "path": str(GOLDEN / "llada2_tp"),
        "engine": engine("vllm", max_num_seqs=4, tensor_parallel_size=2),
        "resources": {"num_cpus": 0.5},
    }
    case = next(
        case
        for case in golden("llada2_tp", "generate_llada20.json")
        if not case["params"].get("temperature") and "minimal_topk" not in case["params"]
    )
    params = case["params"]
    body = {
        "model": "m",
        "prompt": case["prompt_ids"],
        "max_tokens": params["gen_length"],
        "steps": params.get("steps", 32),
        "threshold": params.get("threshold", 0.95),
        "temperature": 0,
    }
    with serve({"models": [model]}, tmp_path) as server:
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == len(case["output_ids"][: params["gen_length"]])
        text = AutoTokenizer.from_pretrained(GOLDEN / "llada2_tp").decode(
            case["output_ids"][: params["gen_length"]], skip_special_tokens=True
        )
        assert answer.json()["choices"][0]["text"] == text


def engine_processes(server: Server) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "VLLM::EngineCore" in " ".join(process.cmdline()):
                found.append(process)
    return found
