"""Replicas come, go and die under load."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
from running_server import GOLDEN, Server, engine, read_stream, serve


def model(backend: str, **autoscaling) -> dict:
    return {
        "name": "qwen",
        "path": str(GOLDEN / "qwen3_dense_untied"),
        "engine": engine(backend, max_num_seqs=4),
        "resources": {"num_cpus": 0.5, "health_check_period_s": 1},
        "autoscaling": autoscaling,
    }


BODY = {"model": "qwen", "prompt": [65, 66, 67, 68] * 8, "temperature": 0, "ignore_eos": True}


async def completion(
    client: httpx.AsyncClient, max_tokens: int, begun: asyncio.Semaphore | None = None
) -> tuple[str, str | None]:
    return await read_stream(client, BODY | {"max_tokens": max_tokens}, begun, may_be_refused=True)


async def test_a_killed_replica_fails_only_what_had_begun(own_backend: str, tmp_path: Path) -> None:
    config = {"models": [model(own_backend, min_replicas=2, max_replicas=2)]}
    with serve(config, tmp_path) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            await two_replicas(server)
            expected, error = await completion(client, 900)
            assert error is None
            # 12 requests on 2 x 4 slots: eight run, the others wait with nothing emitted.
            begun = asyncio.Semaphore(0)
            requests = [asyncio.create_task(completion(client, 900, begun)) for _ in range(12)]
            for _ in range(8):
                await begun.acquire()
            server.replica_processes("qwen")[0].kill()
            done, pending = await asyncio.wait(requests, timeout=100)
            assert not pending, "a request hangs"
            results = [task.result() for task in done]
            lost = [text for text, error in results if error is not None]
            assert {error for _, error in results} == {None, "replica_lost"}
            assert 1 <= len(lost) <= 4, "only requests in the dead replica's slots had begun"
            assert all(text and expected.startswith(text) for text in lost)
            assert all(text == expected for text, error in results if error is None)
            assert await completion(client, 20) == (await completion(client, 20))
            await two_replicas(server)
            server.wait_idle("qwen")


async def test_a_second_replica_comes_with_the_load_and_goes_after_it(
    own_backend: str, tmp_path: Path
) -> None:
    autoscaling = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1, "downscale_delay_s": 4}
    config = {"models": [model(own_backend, **autoscaling)]}
    with serve(config, tmp_path) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            assert len(server.replica_processes("qwen")) == 1
            expected, _ = await completion(client, 100)
            serves = asyncio.Event()

            async def user() -> set[tuple[str, str | None]]:
                answers = set()
                while not serves.is_set():
                    answers.add(await completion(client, 100))
                return answers

            started = time.monotonic()
            users = [asyncio.create_task(user()) for _ in range(60)]
            while len(server.replica_processes("qwen")) < 2:
                assert time.monotonic() - started < 10, "the second replica did not start within 10 s"
                await asyncio.sleep(0.2)
            while serving_replicas(server) < 2:
                assert time.monotonic() - started < 120, "the second replica does not serve"
                await asyncio.sleep(0.5)
            serves.set()
            answers = set().union(*await asyncio.gather(*users))
            assert answers == {(expected, None)}
            deadline = time.monotonic() + 60
            while len(server.replica_processes("qwen")) > 1:
                assert time.monotonic() < deadline, "the second replica did not go after the load"
                await asyncio.sleep(0.5)
            assert (await completion(client, 20))[1] is None


def serving_replicas(server: Server) -> int:
    """Replicas that have emitted tokens."""
    name = "blockserve:engine_decode_tokens_total{"
    return sum(value > 0 for key, value in server.metrics().items() if key.startswith(name))


async def two_replicas(server: Server) -> None:
    deadline = time.monotonic() + 90
    while True:
        replicas = [k for k in server.metrics() if k.startswith("blockserve:num_requests_running{")]
        if len(replicas) == 2 and len(server.replica_processes("qwen")) == 2:
            return
        assert time.monotonic() < deadline, f"two replicas expected, seen: {replicas}"
        await asyncio.sleep(0.3)
