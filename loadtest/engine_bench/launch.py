"""Starts a worker process and waits for its answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from loadtest.engine_bench.environment import available_cpus
from loadtest.engine_bench.spec import WorkerSpec

_ROOT = Path(__file__).resolve().parents[2]


def launch(spec: WorkerSpec) -> dict[str, Any]:
    """The worker's result, or ``{"error": one line, "log": end of its stderr}`` when it failed or died.

    The worker and what it started are gone when this returns, however it returns.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "loadtest.engine_bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=worker_environment(spec),
            start_new_session=True,
        )
        with _group_killed(process):
            output, _ = process.communicate(json.dumps(asdict(spec)).encode())
        result = _parse(output)
        if result is None:
            lines = _tail(log).strip().splitlines()
            reason = f": {lines[-1].strip()}" if lines else ""
            result = {"error": f"the worker ended with status {process.returncode}{reason}"}
        if "error" in result:
            result["log"] = _tail(log)
        return result


def worker_environment(spec: WorkerSpec) -> dict[str, str]:
    """The environment of a worker: the same number of threads for all libraries, nothing from a network."""
    threads = str(spec.threads)
    cpus = available_cpus()[: spec.threads]
    environment = os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if spec.system.startswith("vllm"):
        environment |= {
            # In one process, so that it can be stepped and its memory is seen.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # The default leaves a core to other processes.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
    return environment


@contextmanager
def _group_killed(process: subprocess.Popen) -> Iterator[None]:
    try:
        yield
    finally:
        # Compilers that the worker started belong to its session.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _parse(output: bytes) -> dict[str, Any] | None:
    try:
        result = json.loads(output)
    except ValueError:
        return None
    return result if isinstance(result, dict) else None


def _tail(log: IO[bytes], size: int = 4000) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - size))
    return log.read().decode(errors="replace")
