"""What ranks 1 to n - 1 do: join the group, then carry out rank 0's commands until the last one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from replicas.errors import BlockserveError
from replicas.parallel.channel import Command, CommandChannel, Reply
from replicas.parallel.group import TensorParallelGroup
from replicas.parallel.process_group import connect, join

logger = logging.getLogger(__name__)

STOP = "stop"
#: Makes the object whose methods are called, from this rank's group and device. Travels by pickle.
Target = Callable[[TensorParallelGroup, torch.device], Any]
#: Called once for every rank that has ended, from any thread: its number and how it ended.
OnExit = Callable[[int, str], None]


@dataclass(frozen=True)
class RankSpec:
    """All that a rank needs to begin. ``store_host`` and ``store_port``: where rank 0's store listens."""

    rank: int
    size: int
    store_host: str
    store_port: int
    device: str
    target: Target
    start_timeout: timedelta


def up_key(rank: int) -> str:
    """The store's key that a rank sets when it is ready to join."""
    return f"up/{rank}"


def run_rank(spec: RankSpec, host: str) -> None:
    """Runs a rank in this process, reachable at ``host``, to its end: the stop command.

    An exception in a command without reply is raised: what the other ranks do next would not fit any more, so this
    one must end, and they with it. Raises ``RuntimeError`` when another rank has ended.
    """
    device = torch.device(spec.device)
    store = connect(spec.store_host, spec.store_port, spec.start_timeout)
    store.set(up_key(spec.rank), "")
    control, group = join(store, spec.rank, spec.size, host=host, device=device, timeout=spec.start_timeout)
    serve(CommandChannel(control, spec.rank, spec.size), spec.target(group, device))


def serve(channel: CommandChannel, target: Any) -> None:
    """The loop of ``run_rank``."""
    while True:
        command = channel.receive()
        if command.method == STOP:
            return
        if command.reply:
            channel.gather(call(partial(_run, target, command)))
        else:
            _run(target, command)


def call(function: Callable[[], Any]) -> Reply:
    """What ``function`` returns or raises, fit to travel."""
    try:
        return Reply(function())
    except BlockserveError as error:
        return Reply(error=error)
    except Exception as error:
        logger.exception("a command failed")
        return Reply(error=BlockserveError(f"{type(error).__name__}: {error}"))


def _run(target: Any, command: Command) -> Any:
    return getattr(target, command.method)(*command.args)
