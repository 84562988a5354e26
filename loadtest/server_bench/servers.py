"""Starts the two servers on the same model and arguments, and tells how much CPU time their front ends used."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Workload:
    """Model and engine arguments of both servers. ``api_key_env``: the environment variable with the key that both ask
    for; None is none."""

    path: str
    dtype: str
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int
    enforce_eager: bool
    threads: int
    api_key_env: str | None = None


class Server:
    """A running server. ``url``: its address; ``model``: what to ask for."""

    def __init__(self, name: str, url: str, process: subprocess.Popen) -> None:
        self.name, self.url, self.model = name, url, "bench"
        self._root = psutil.Process(process.pid)

    def front_end_cpu_s(self) -> float:
        """CPU seconds so far of all that stands between the client and the engine: of vLLM its API server; of
        Blockserve the proxy, the ingress and the replica. Ray's own processes are ``other_cpu_s``."""
        return sum(_cpu_s(process) for process, kind in self._processes() if kind == "front")

    def other_cpu_s(self) -> float:
        return sum(_cpu_s(process) for process, kind in self._processes() if kind == "other")

    def _processes(self) -> Iterator[tuple[psutil.Process, str]]:
        for process in [self._root, *self._root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                yield process, self._kind(" ".join(process.cmdline()), process)

    def _kind(self, title: str, process: psutil.Process) -> str:
        if "EngineCore" in title or "VLLM::Worker" in title:
            return "engine"
        if self.name == "vllm":
            return "front" if process.pid == self._root.pid else "other"
        return "front" if "ServeReplica" in title or "ProxyActor" in title or "haproxy" in title else "other"


@contextlib.contextmanager
def serve(name: str, workload: Workload) -> Iterator[Server]:
    """Starts ``blockserve`` or ``vllm``; ends it and all it started."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb+") as log:
        command = _blockserve(workload, port, Path(folder)) if name == "blockserve" else _vllm(workload, port)
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=_environment(name, workload), start_new_session=True
        )
        server = Server(name, f"http://127.0.0.1:{port}", process)
        descendants: list[psutil.Process] = []
        try:
            _wait_ready(server, process, Path(folder) / "log")
            descendants = psutil.Process(process.pid).children(recursive=True)
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for left in psutil.wait_procs(descendants, timeout=20)[1]:
                with contextlib.suppress(psutil.Error):
                    left.kill()


def _blockserve(workload: Workload, port: int, folder: Path) -> list[str]:
    engine: dict[str, Any] = {
        "backend": "vllm",
        "device": "cpu",
        "dtype": workload.dtype,
        "max_num_seqs": workload.max_num_seqs,
        "max_model_len": workload.max_model_len,
        "max_num_batched_tokens": workload.max_num_batched_tokens,
        "kv_cache_memory_bytes": workload.kv_cache_memory_bytes,
        "enforce_eager": workload.enforce_eager,
        "num_threads": workload.threads,
    }
    application: dict[str, Any] = {
        "name": "blockserve",
        "route_prefix": "/",
        "import_path": "deployments.app:build",
        "args": {
            "ingress": {"num_cpus": 0},
            "models": [{"name": "bench", "path": workload.path, "engine": engine}],
            "batching": {"max_batch_size": 32},
        },
    }
    if workload.api_key_env:
        application["args"]["security"] = {"api_keys_env": workload.api_key_env}
    file = folder / "config.yaml"
    # JSON is YAML.
    file.write_text(
        json.dumps(
            {
                "proxy_location": "HeadOnly",
                "http_options": {"host": "127.0.0.1", "port": port},
                "applications": [application],
            }
        )
    )
    return [sys.executable, "-m", "deployments.cli", "serve", str(file)]


def _vllm(workload: Workload, port: int) -> list[str]:
    flags = [
        ("--model", workload.path),
        ("--served-model-name", "bench"),
        ("--host", "127.0.0.1"),
        ("--port", port),
        ("--dtype", workload.dtype),
        ("--max-num-seqs", workload.max_num_seqs),
        ("--max-model-len", workload.max_model_len),
        ("--max-num-batched-tokens", workload.max_num_batched_tokens),
        ("--kv-cache-memory-bytes", workload.kv_cache_memory_bytes),
        ("--block-size", 32),
        ("--generation-config", "vllm"),
        ("--distributed-executor-backend", "uni"),
    ]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [str(part) for flag in flags for part in flag]
    command += ["--disable-uvicorn-access-log", "--no-enable-log-requests"]
    return [*command, "--enforce-eager"] if workload.enforce_eager else command


def _environment(name: str, workload: Workload) -> dict[str, str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if name == "vllm":
        # As Blockserve sets them for its engine.
        cpus = sorted(os.sched_getaffinity(0))
        binding = "nobind" if workload.threads < len(cpus) else ",".join(map(str, cpus))
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": binding,
            "OMP_NUM_THREADS": str(workload.threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        if workload.api_key_env:
            environment["VLLM_API_KEY"] = os.environ[workload.api_key_env]
    return environment


def _wait_ready(server: Server, process: subprocess.Popen, log: Path) -> None:
    path = "/ready" if server.name == "blockserve" else "/health"
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        if process.poll() is not None:
            raise RuntimeError(f"{server.name} ended with status {process.returncode}:\n{tail}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{server.name} is not ready after {START_TIMEOUT_S:.0f} s:\n{tail}")
        with contextlib.suppress(OSError), urllib.request.urlopen(server.url + path, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return times.user + times.system
    return 0.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
