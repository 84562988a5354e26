"""A replica whose model is shared by two ranks: it answers, and it comes back whole when one rank dies."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import httpx
import psutil
from running_server import GOLDEN, Server, golden, read_stream, serve

MODEL = {
    "name": "qwen",
    "path": str(GOLDEN / "qwen3_dense_untied"),
    "engine": {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "tensor_parallel_size": 2},
    "resources": {"num_cpus": 0.5, "health_check_period_s": 1},
}
BODY = {"model": "qwen", "temperature": 0, "ignore_eos": True}


async def test_a_killed_rank_ends_its_replica_which_comes_back(tmp_path: Path) -> None:
    case = next(case for case in golden("qwen3_dense_untied", "greedy.json") if case["finish"] != "eos")
    body = BODY | {"prompt": case["prompt_ids"], "max_tokens": case["max_tokens"]}
    with serve({"models": [MODEL]}, tmp_path) as server:
        (replica,) = server.replica_processes("qwen")
        (rank,) = rank_processes(server)
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            usage, before = answer.json()["usage"], answer.json()["choices"][0]
            assert usage["completion_tokens"] == len(case["output_ids"])
            assert before["text"] == text_of(case["output_ids"])

            long = BODY | {"prompt": case["prompt_ids"], "max_tokens": 150}
            expected, error = await read_stream(client, long)
            assert error is None
            begun = asyncio.Semaphore(0)
            requests = [asyncio.create_task(read_stream(client, long, begun)) for _ in range(5)]
            for _ in range(4):
                await begun.acquire()
            rank.kill()
            replica.wait(timeout=30)
            done, pending = await asyncio.wait(requests, timeout=100)
            assert not pending, "a request hangs"
            results = [task.result() for task in done]
            lost = [text for text, error in results if error is not None]
            assert {error for _, error in results} <= {None, "replica_lost", "engine_dead"}
            assert all(expected.startswith(text) for text in lost)
            assert all(text == expected for text, error in results if error is None)
            after = await client.post("/v1/completions", json=body)
            assert after.status_code == 200, after.text
            assert after.json()["choices"][0] == before
            assert [p.pid for p in server.replica_processes("qwen")] != [replica.pid]
            assert len(rank_processes(server)) == 1


def rank_processes(server: Server) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RankActor" in " ".join(process.cmdline()):
                found.append(process)
    return found


def text_of(ids: list[int]) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "qwen3_dense_untied")
    return tokenizer.decode(ids, skip_special_tokens=True)
