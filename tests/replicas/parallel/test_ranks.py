"""Rank processes: commands, errors, death and end, with a toy in place of a model."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from toy_rank import EndsWhenRead, ToyRank

from replicas.errors import BlockserveError, EngineDeadError, ModelLoadError
from replicas.parallel import ranks as ranks_module
from replicas.parallel.channel import Command, CommandChannel
from replicas.parallel.local import LocalLauncher
from replicas.parallel.process_group import connect, join, listen
from replicas.parallel.ranks import Ranks

Start = Callable[[int], tuple[Ranks, ToyRank, list[psutil.Process]]]


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def listening() -> set[int]:
    """Ports that this process listens on."""
    return {c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def wait_for_death(ranks: Ranks) -> str:
    """The message of the health check once it fails."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            ranks.check_health()
        except EngineDeadError as error:
            return error.message
        time.sleep(0.01)
    raise AssertionError("nobody noticed")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ranks with a ``ToyRank`` each; afterwards no process and no socket may be left."""
    before, ports = children(), listening()
    started: list[Ranks] = []

    def run(size: int) -> tuple[Ranks, ToyRank, list[psutil.Process]]:
        ranks = Ranks(size, ToyRank, LocalLauncher())
        started.append(ranks)
        return ranks, ToyRank(ranks.group, ranks.device), [p for p in children() if p not in before]

    yield run
    for ranks in started:
        ranks.shutdown()
    assert [p for p in children() if p not in before] == []
    assert listening() == ports


def test_commands_errors_and_the_end(start: Start) -> None:
    ranks, own, processes = start(3)
    assert len(processes) == 2
    for value in (1.0, 2.0, 5.0):
        ranks.send("add", value)
        own.add(value)
    sums = [6.0, 12.0, 30.0]
    assert ranks.call("sums", local=own.sums) == [(rank, sums) for rank in range(3)]
    for length in (1, 4000, 4096, 4200, 1_000_000):
        assert ranks.call("length", b"x" * length) == [None, length, length]
    with pytest.raises(ModelLoadError, match="`width` does not fit rank 2"):
        ranks.call("refuse", 2, local=lambda: own.refuse(2))
    with pytest.raises(ModelLoadError, match="`width` does not fit rank 0"):
        ranks.call("refuse", 0, local=lambda: own.refuse(0))
    with pytest.raises(BlockserveError, match="ZeroDivisionError"):
        ranks.call("divide", 1)
    assert ranks.call("refuse", 3, local=lambda: own.refuse(3)) == [0, 1, 2], "an answered error is survived"
    ranks.send("add", 1.0)
    own.add(1.0)
    assert ranks.call("sums", local=own.sums) == [(rank, [*sums, 6.0]) for rank in range(3)]

    used = sum(sum(p.cpu_times()[:2]) for p in processes)
    time.sleep(1)
    assert sum(sum(p.cpu_times()[:2]) for p in processes) - used < 0.2, "idle ranks use the CPU"

    ranks.shutdown()
    ranks.shutdown()
    assert not any(p.is_running() for p in processes)
    with pytest.raises(EngineDeadError, match="shut down"):
        ranks.send("add", 1.0)


def test_a_rank_that_dies_idle_is_seen_and_ends_the_others(start: Start) -> None:
    ranks, own, processes = start(3)
    processes[0].kill()
    assert "was killed by signal 9" in wait_for_death(ranks)
    for command in (lambda: ranks.send("add", 1.0), lambda: ranks.call("sums", local=own.sums)):
        with pytest.raises(EngineDeadError, match="signal 9"):
            command()
    assert psutil.wait_procs(processes, timeout=30)[1] == []


def test_a_rank_that_dies_at_work_ends_the_call_and_the_others(start: Start) -> None:
    ranks, own, processes = start(3)
    ranks.send("sleep", 10_000)
    threading.Timer(0.2, processes[1].kill).start()
    with pytest.raises(EngineDeadError, match="signal 9"):
        ranks.call("sums", local=own.sums)
    assert psutil.wait_procs(processes, timeout=30)[1] == []


def test_an_exception_without_reply_ends_all(start: Start) -> None:
    ranks, own, processes = start(3)
    ranks.send("divide", 2)
    with pytest.raises(EngineDeadError, match=r"rank [12] .* ended with status 1"):
        ranks.call("sums", local=own.sums)
    assert psutil.wait_procs(processes, timeout=30)[1] == []


def test_a_rank_that_hangs_can_be_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, own, processes = start(2)
    processes[0].send_signal(signal.SIGSTOP)
    threading.Timer(0.2, ranks.kill).start()
    with pytest.raises(EngineDeadError, match="were killed"):
        ranks.call("sums", local=own.sums)


@pytest.mark.parametrize("where", ["waiting for a command", "at work"])
def test_a_rank_that_hangs_does_not_stop_the_shutdown(
    start: Start, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    ranks, _, processes = start(2)
    monkeypatch.setattr(ranks_module, "STOP_TIMEOUT_S", 0.5)
    if where == "at work":
        ranks.send("sleep", 10_000)
    else:
        processes[0].send_signal(signal.SIGSTOP)
    ranks.shutdown()
    assert not processes[0].is_running()


def test_ranks_end_with_their_parent() -> None:
    """However it ends, and whatever they do."""
    code = (
        "import os, time, psutil\n"
        "from toy_rank import ToyRank\n"
        "from replicas.parallel.local import LocalLauncher\n"
        "from replicas.parallel.ranks import Ranks\n"
        "ranks = Ranks(3, ToyRank, LocalLauncher())\n"
        "ranks.send('sleep', 10_000)\n"
        "print(*(p.pid for p in psutil.Process().children()), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder.parents[2]), str(folder)])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    left = psutil.wait_procs(left, timeout=30)[1]
    for process in left:
        process.kill()
    assert left == [], "ranks outlive their parent"


def test_a_rank_that_does_not_start_is_named() -> None:
    before = children()
    with pytest.raises(
        ModelLoadError, match=r"2 tensor-parallel ranks did not start: .* ended with status 7"
    ):
        Ranks(2, EndsWhenRead(), LocalLauncher())
    assert children() == before


def test_waiting_for_a_command_has_no_timeout() -> None:
    """The time to join is limited, an idle engine's is not. Two ranks in threads of this process."""
    timeout = timedelta(seconds=2)
    store = listen("127.0.0.1", timeout)
    received: list[Command] = []

    def follow() -> None:
        other = connect("127.0.0.1", store.port, timeout)
        control, _ = join(other, 1, 2, host="127.0.0.1", device=torch.device("cpu"), timeout=timeout)
        received.append(CommandChannel(control, 1, 2).receive())

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    control, _ = join(store, 0, 2, host="127.0.0.1", device=torch.device("cpu"), timeout=timeout)
    time.sleep(3)
    CommandChannel(control, 0, 2).send(Command("add", (1.0,)))
    thread.join(10)
    assert received == [Command("add", (1.0,))]


def test_joining_has_a_timeout() -> None:
    store = listen("127.0.0.1", timedelta(seconds=1))
    with pytest.raises(RuntimeError):
        join(store, 0, 2, host="127.0.0.1", device=torch.device("cpu"), timeout=timedelta(seconds=1))
