"""The client and the figures of ``blockserve bench server``; the servers themselves are started by hand only."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from loadtest.server_bench import bench, client, servers


async def completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if body["prompt"] == [9] and request.headers.get("authorization") != "Bearer a-key-of-the-bench":
        return web.json_response({"error": {"message": "no key"}}, status=401)
    if body["prompt"] == [0]:
        return web.json_response({"error": {"message": "no"}}, status=400)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for i in range(body["max_tokens"]):
        await asyncio.sleep(0.02)
        event = {"choices": [{"text": f"{body['prompt'][0]}.{i} "}]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
    await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
    return response


@pytest.fixture
async def url():
    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    yield f"http://{host}:{port}"
    await runner.cleanup()


async def test_the_client_runs_all_requests_and_times_the_first_chunk(url: str) -> None:
    bodies = [{"prompt": [i], "max_tokens": 3} for i in range(1, 6)]
    result = await client.run(url, bodies, concurrency=2)
    assert [request["text"] for request in result["requests"]] == [f"{i}.0 {i}.1 {i}.2 " for i in range(1, 6)]
    assert [request["tokens"] for request in result["requests"]] == [3] * 5
    assert all(0.02 <= request["ttft_s"] < request["end_s"] for request in result["requests"])
    # Two users, five requests: three one after the other.
    assert result["wall_s"] >= 3 * 3 * 0.02


async def test_a_refused_request_ends_the_run(url: str) -> None:
    with pytest.raises(RuntimeError, match="status 400"):
        await client.run(url, [{"prompt": [0], "max_tokens": 3}], concurrency=1)


async def test_the_client_shows_its_key(url: str) -> None:
    bodies = [{"prompt": [9], "max_tokens": 1}]
    assert (await client.run(url, bodies, 1, "a-key-of-the-bench"))["requests"][0]["tokens"] == 1
    with pytest.raises(RuntimeError, match="status 401"):
        await client.run(url, bodies, 1)


def test_both_servers_ask_for_the_key_and_no_command_line_holds_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("BENCH_KEY", "a-key-of-the-bench")
    workload = servers.Workload("m", "float32", 1, 128, 128, 1 << 20, True, 1, api_key_env="BENCH_KEY")
    command = servers._blockserve(workload, 1, tmp_path) + servers._vllm(workload, 1)
    assert "a-key-of-the-bench" not in " ".join(command)
    text = (tmp_path / "config.yaml").read_text()
    assert "a-key-of-the-bench" not in text
    application = json.loads(text)["applications"][0]
    assert application["args"]["security"] == {"api_keys_env": "BENCH_KEY"}
    assert servers._environment("vllm", workload)["VLLM_API_KEY"] == "a-key-of-the-bench"


def run_of(
    system: str, concurrency: int, tokens_per_s: float, texts: list[str], round_index: int = 0
) -> dict:
    return {
        "round": round_index,
        "system": system,
        "concurrency": concurrency,
        "tokens_per_s": tokens_per_s,
        "ttft_p50_s": 1 / tokens_per_s,
        "front_cpu_ms_per_token": 0.5,
        "other_cpu_ms_per_token": 0.1,
        "texts": texts,
    }


def test_other_texts_are_void() -> None:
    runs = [run_of("blockserve", 1, 10, ["a"]), run_of("vllm", 1, 10, ["a"]), run_of("vllm", 8, 10, ["b"])]
    assert bench._void(runs) == []
    assert bench._void([*runs, run_of("blockserve", 8, 10, ["c"])]) == ["blockserve at 8: other texts"]


def test_ratios_are_of_medians() -> None:
    runs = [run_of("blockserve", 1, value, ["a"], i) for i, value in enumerate((8, 9, 100))]
    runs += [run_of("vllm", 1, value, ["a"], i) for i, value in enumerate((10, 10, 30))]
    options = bench.ServerBenchOptions(
        workload=None,
        vocab_size=10,
        concurrency=(1,),
        prompt_tokens=1,
        output_tokens=1,
        requests=1,
        repeat=3,
        against=("vllm",),
        seed=0,
        json_file=None,
    )
    (row,) = bench._summary(runs, options, ("blockserve", "vllm"))
    assert row["ratios"]["vllm"]["tokens_per_s"] == pytest.approx(0.9)
    text = bench._render({"rows": [row], "void": ["x"]}, ("blockserve", "vllm"))
    assert "0.90" in text
    assert "VOID: x" in text


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("ray::ServeReplica:blockserve:Ingress", "front"),
        ("ray::ServeReplica:blockserve:Engine-bench.generate", "front"),
        ("ray::ProxyActor", "front"),
        ("VLLM::EngineCore", "engine"),
        ("ray::ServeController", "other"),
        ("/x/raylet", "other"),
    ],
)
def test_whose_time_counts_for_blockserve(title: str, kind: str) -> None:
    server = servers.Server.__new__(servers.Server)
    server.name = "blockserve"
    assert server._kind(title, None) == kind
