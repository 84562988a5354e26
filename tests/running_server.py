"""A real server: `blockserve serve` in a process of its own, on real checkpoints, on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from local_ports import free_port

GOLDEN = Path(__file__).parent / "golden"
START_TIMEOUT_S = 240
NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


class Server:
    """A running `blockserve serve`; ``url`` is its address, ``process`` the foreground process."""

    def __init__(self, process: subprocess.Popen, url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.client = httpx.Client(base_url=url, timeout=120)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics: ``name{labels}`` -> value."""
        samples = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def total(self, name: str, model: str) -> float:
        """Sum of one metric over all label sets of a model."""
        return sum(
            value
            for key, value in self.metrics().items()
            if key.split("{")[0] == f"blockserve:{name}" and f'model_name="{model}"' in key
        )

    def wait_for(self, name: str, model: str, expected: float, timeout_s: float = 20) -> None:
        """Waits until a gauge has a value: engine gauges are refreshed about once a second."""
        deadline = time.monotonic() + timeout_s
        while (value := self.total(name, model)) != expected:
            assert time.monotonic() < deadline, f"{name} of {model} is {value}, expected {expected}"
            time.sleep(0.2)

    def wait_idle(self, model: str) -> None:
        self.wait_for("num_requests_running", model, 0)
        self.wait_for("num_requests_waiting", model, 0)

    def replica_processes(self, deployment: str) -> list[psutil.Process]:
        """Replica actors of a deployment, among this server's own descendants."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                title = " ".join(process.cmdline())
                if "ServeReplica" in title and deployment.lower() in title.lower():
                    found.append(process)
        return found


def engine(backend: str, **arguments) -> dict:
    """An ``engine:`` section; vLLM without compiling, which takes minutes."""
    return {"backend": backend, "dtype": "float32", "max_num_seqs": 8, "enforce_eager": True} | arguments


def golden(name: str, file: str) -> list[dict]:
    return json.loads((GOLDEN / name / file).read_text())


@contextlib.contextmanager
def serve(config: dict, folder: Path) -> Iterator[Server]:
    """Starts a server on a Blockserve configuration tree (what stands under ``args``)."""
    port = free_port()
    file = folder / "config.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "proxy_location": "HeadOnly",
                "http_options": {"host": "127.0.0.1", "port": port},
                "applications": [
                    {
                        "name": "blockserve",
                        "route_prefix": "/",
                        "import_path": "deployments.app:build",
                        "args": config,
                    }
                ],
            }
        )
    )
    log = folder / "server.log"
    command = [sys.executable, "-m", "deployments.cli", "serve", str(file)]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        _wait_ready(server)
        yield server
    finally:
        server.client.close()
        descendants = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=90)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        left = [p for p in psutil.wait_procs(descendants, timeout=20)[1] if p.is_running()]
        for leftover in left:
            leftover.kill()
    assert not left, f"left behind after Ctrl-C: {[p.pid for p in left]}\n{log.read_text()[-2000:]}"
    assert process.returncode == 0, f"exit status {process.returncode}\n{log.read_text()[-2000:]}"


def _wait_ready(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert server.process.poll() is None, f"the server ended:\n{server.log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"not ready:\n{server.log.read_text()[-4000:]}"
        with contextlib.suppress(httpx.HTTPError):
            if server.client.get("/ready").status_code == 200:
                return
        time.sleep(0.5)


async def read_stream(
    client: httpx.AsyncClient,
    body: dict,
    begun: asyncio.Semaphore | None = None,
    *,
    may_be_refused: bool = False,
) -> tuple[str, str | None]:
    """Text of a streamed completion, and the code of the error that ended it (None: it ended well). Releases
    ``begun`` at the first text. ``may_be_refused``: the error may also come as an HTTP status, before the stream."""
    text = ""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            await response.aread()
            assert may_be_refused, response.text
            return text, response.json()["error"]["code"]
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return text, None
            event = json.loads(line[len("data: ") :])
            if "error" in event:
                return text, event["error"]["code"]
            new = event["choices"][0]["text"] if event["choices"] else ""
            if new and not text and begun is not None:
                begun.release()
            text += new
    raise AssertionError(f"the stream ended without [DONE] and without an error, after {text!r}")
