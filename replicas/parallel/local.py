"""Ranks as child processes of this one: the engine without Ray."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from replicas.parallel.worker import OnExit, RankSpec, run_rank

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
#: The parent's import path comes first, so that all else can be imported as there. Not multiprocessing: it would run
#: the parent's main module again.
_BOOTSTRAP = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from replicas.parallel.local import main; main()"
)


class LocalLauncher:
    """A child process per rank, all on this machine; rank r has CUDA device r.

    A child ends when this process ends, however: it reads from a pipe that closes then.
    """

    host = _HOST

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []

    def device(self, kind: str, rank: int) -> str:
        return f"cuda:{rank}" if kind == "cuda" else kind

    def launch(self, specs: Sequence[RankSpec], on_exit: OnExit) -> None:
        for spec in specs:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
            self.processes.append(process)
            assert process.stdin is not None
            try:
                process.stdin.write(pickle.dumps(sys.path) + pickle.dumps(spec))
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended already, which the watcher reports
            watcher = threading.Thread(
                target=_watch, args=(process, spec.rank, on_exit), name=f"rank-{spec.rank}", daemon=True
            )
            self._watchers.append(watcher)
            watcher.start()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        for watcher in self._watchers:
            watcher.join(max(0.0, deadline - time.monotonic()))
        return not any(watcher.is_alive() for watcher in self._watchers)


def main() -> None:
    """The child's program; reads its ``RankSpec`` from standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then ends this one
    spec: RankSpec = pickle.load(sys.stdin.buffer)
    logging.basicConfig(format=f"rank {spec.rank}: %(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    status = 0
    try:
        run_rank(spec, _HOST)
    except Exception as error:
        logger.exception("this rank ends: %s", error)
        status = 1
    logging.shutdown()
    os._exit(status)  # at once: an interpreter that has loaded torch takes its time


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def _watch(process: subprocess.Popen[bytes], rank: int, on_exit: OnExit) -> None:
    status = process.wait()
    if process.stdin is not None:
        process.stdin.close()
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    on_exit(rank, f"(process {process.pid}) {how}")
