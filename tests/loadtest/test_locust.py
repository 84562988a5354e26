"""The load test against a stub whose timing and answers are known."""

from __future__ import annotations

import asyncio
import csv
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"
FIRST_TOKEN_S, GAP_S, TOKENS = 0.3, 0.1, 7


def stub(wrong_every: int = 0, broken_after: int = 0) -> FastAPI:
    """Streams seven tokens: the first after 0.3 s, then one each 0.1 s. Every n-th answer is wrong; after
    ``broken_after`` requests the connection ends in the middle of each."""
    app = FastAPI()
    count = 0

    @app.get("/v1/models")
    def models() -> dict:
        return {"object": "list", "data": [{"id": "stub", "object": "model"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        nonlocal count
        count += 1
        body = await request.json()
        prompt = body["messages"][0]["content"]
        text = f"{len(prompt)}-" + ("x" if wrong_every and count > 4 and count % wrong_every == 0 else "y")

        async def events():
            yield sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            for i in range(TOKENS):
                if broken_after and count > broken_after and i == 3:
                    raise ConnectionError("broken on purpose")
                await asyncio.sleep(GAP_S if i else FIRST_TOKEN_S)
                yield sse({"choices": [{"index": 0, "delta": {"content": text}}]})
            yield sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            yield sse({"choices": [], "usage": {"completion_tokens": TOKENS}})
            yield "data: [DONE]\n\n"

        if not body.get("stream"):
            message = {"role": "assistant", "content": text * TOKENS}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return JSONResponse({"choices": [choice], "usage": {"completion_tokens": TOKENS}})
        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def sse(payload: dict) -> str:
    return f"data: {json.dumps(payload)}\n\n"


@pytest.fixture
def serve_stub() -> Iterator:
    servers = []

    def start(app: FastAPI) -> str:
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        servers.append((server, thread))
        while not server.started:
            thread.join(0.05)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join()


def run_locust(host: str, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", host]
    command += ["--headless", "-u", "3", "-r", "3", "-t", "4s", "--prompts", "3", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_times_are_the_clients_and_answers_are_verified(serve_stub, tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.csv"
    done = run_locust(serve_stub(stub()), "--rows-csv", str(rows_file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong answers: 0" in done.stdout
    rows = list(csv.DictReader(rows_file.open()))
    assert len(rows) >= 3
    whole = FIRST_TOKEN_S + (TOKENS - 1) * GAP_S
    for row in rows:
        # A stream that is handed over all at once would show the whole time here.
        assert FIRST_TOKEN_S * 1000 <= float(row["ttft_ms"]) < (FIRST_TOKEN_S + whole) / 2 * 1000
        assert float(row["e2e_ms"]) >= whole * 1000
        assert int(row["completion_tokens"]) == int(row["chunks"]) == TOKENS
        assert float(row["tokens_per_chunk"]) == 1
        assert row["problem"] == ""
        assert float(row["tpot_ms"]) >= GAP_S * 1000 * 0.8


def test_a_wrong_answer_fails_the_run(serve_stub, tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.csv"
    done = run_locust(serve_stub(stub(wrong_every=3)), "--rows-csv", str(rows_file))
    assert done.returncode == 1
    assert "wrong answer to" in done.stdout + done.stderr
    problems = [row["problem"] for row in csv.DictReader(rows_file.open())]
    wrong = [problem for problem in problems if problem.startswith("wrong answer to")]
    assert 0 < len(wrong) < len(problems)
    assert f"wrong answers: {len(wrong)}\n" in done.stdout


def test_answers_without_streaming_are_verified_too(serve_stub) -> None:
    right = run_locust(serve_stub(stub()), "--no-stream")
    assert right.returncode == 0, right.stdout + right.stderr
    assert "E2E" in right.stdout + right.stderr
    assert "TTFT" not in right.stdout + right.stderr
    wrong = run_locust(serve_stub(stub(wrong_every=3)), "--no-stream")
    assert wrong.returncode == 1


def test_a_connection_that_breaks_is_a_failure_with_its_row(serve_stub, tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.csv"
    done = run_locust(serve_stub(stub(broken_after=3)), "--rows-csv", str(rows_file))
    assert done.returncode == 1
    rows = list(csv.DictReader(rows_file.open()))
    assert rows
    assert all("ChunkedEncodingError" in row["problem"] for row in rows)


def test_an_unknown_model_is_named(serve_stub) -> None:
    done = run_locust(serve_stub(stub()), "--model", "other")
    assert done.returncode != 0
    assert "other" in done.stdout + done.stderr


def test_a_server_with_keys(serve_stub, monkeypatch) -> None:
    app = stub()

    @app.middleware("http")
    async def needs_key(request: Request, call_next):
        if request.headers.get("authorization") != "Bearer a-key-of-the-load-test":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        return await call_next(request)

    host = serve_stub(app)
    monkeypatch.setenv("LOAD_KEY", "a-key-of-the-load-test")
    right = run_locust(host, "--api-key-env", "LOAD_KEY", "--no-stream")
    assert right.returncode == 0, right.stdout + right.stderr
    assert "a-key-of-the-load-test" not in right.stdout + right.stderr
    without = run_locust(host)
    assert without.returncode != 0
    assert "HTTP 401" in without.stdout + without.stderr
    unset = run_locust(host, "--api-key-env", "LOAD_KEY_THAT_IS_NOT_SET")
    assert unset.returncode != 0
    assert "LOAD_KEY_THAT_IS_NOT_SET is not set" in unset.stdout + unset.stderr
