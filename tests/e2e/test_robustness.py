"""Clients that leave, ask for nonsense or come all at once; whatever arrives, the next request works."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest
from running_server import GOLDEN, Server, engine, serve

MODELS = ["qwen", "llada"]


def long_body(model: str, **extra) -> dict:
    return {
        "model": model,
        "prompt": [65, 66, 67, 68] * 8,
        "max_tokens": 900,
        "temperature": 0,
        "ignore_eos": True,
        **extra,
    }


def assert_still_works(server: Server, model: str) -> None:
    response = server.client.post(
        "/v1/completions", json={"model": model, "prompt": "ab", "max_tokens": 4, "temperature": 0}
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("model", MODELS)
async def test_client_gone_mid_stream_queued_and_in_prefill(server: Server, model: str) -> None:
    """100 clients leave at random moments: some stream, some wait for a slot, some are in prefill."""
    rng = random.Random(3)

    async def leave(client: httpx.AsyncClient, index: int) -> None:
        body = long_body(model, stream=index % 4 != 0)
        if index % 5 == 0:
            body["prompt"] = [65 + index % 26] * 800
            body["max_tokens"] = 100
        try:
            async with asyncio.timeout(rng.uniform(0.01, 1.0)):
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code == 200
                    async for _ in response.aiter_raw():
                        if rng.random() < 0.1:
                            return
        except TimeoutError:
            pass

    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        for start in range(0, 100, 25):
            await asyncio.gather(*(leave(client, start + i) for i in range(25)))
    server.wait_idle(model)
    server.wait_for("kv_cache_usage_perc", model, 0)
    assert_still_works(server, model)


BAD_BODIES = {
    "prompt longer than the context": (
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        400,
        "messages",
    ),
    "n is 0": ({"n": 0}, 400, "n"),
    "empty messages": ({"messages": []}, 400, "messages"),
    "max_tokens is negative": ({"max_tokens": -1}, 400, "max_tokens"),
    "unknown model": ({"model": "nope"}, 404, "model"),
    "temperature out of range": ({"temperature": 3}, 400, "temperature"),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_requests_are_named(server: Server, model: str, stream: bool, name: str) -> None:
    change, status, param = BAD_BODIES[name]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "stream": stream,
    } | change
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    if "longer" in name:
        assert error["code"] == "context_length_exceeded"
    assert_still_works(server, model)


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": 1}'])
def test_broken_bodies(server: Server, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = server.client.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert_still_works(server, "qwen")


async def test_requests_are_seen_together_in_the_engine(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=long_body("qwen", max_tokens=100)) for _ in range(16))
        )
    assert [answer.status_code for answer in answers] == [200] * 16
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    server.wait_for("max_running_requests_seen", "qwen", 16)


async def test_burst_far_above_the_bound(own_backend: str, tmp_path: Path) -> None:
    config = {
        "models": [
            {
                "name": "qwen",
                "path": str(GOLDEN / "qwen3_dense_untied"),
                "engine": engine(own_backend, max_num_seqs=4),
            }
        ],
        "admission": {"max_live_requests": 12},
    }
    with serve(config, tmp_path) as server:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            bodies = [long_body("qwen", max_tokens=60, stream=i % 2 == 0) for i in range(150)]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 12
        for answer in answers:
            if answer.status_code == 429:
                assert float(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "queue_full"
            elif "event-stream" in answer.headers["content-type"]:
                assert answer.text.rstrip().endswith("data: [DONE]")
        server.wait_idle("qwen")
        assert_still_works(server, "qwen")
