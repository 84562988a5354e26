"""Rank 0's hold on the others: start, commands, health, end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from replicas.errors import EngineDeadError, ModelLoadError
from replicas.parallel.channel import Command, CommandChannel, Reply
from replicas.parallel.group import SINGLE_RANK
from replicas.parallel.process_group import join, listen
from replicas.parallel.worker import STOP, OnExit, RankSpec, Target, call, up_key

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.02
#: How long a broken connection waits for the news which rank has ended.
_BLAME_TIMEOUT_S = 1.0


class Launcher(Protocol):
    """Runs ``run_rank`` for other ranks in processes of their own, and ends them."""

    #: The address of rank 0 for the others.
    host: str

    def device(self, kind: str, rank: int) -> str:
        """The device of a rank: ``kind`` (``cpu`` or ``cuda``) with an index where one is needed."""

    def launch(self, specs: Sequence[RankSpec], on_exit: OnExit) -> None: ...

    def kill(self) -> None:
        """Ends all ranks that still run, at once; callable from any thread, more than once."""

    def join(self, timeout_s: float) -> bool:
        """Whether all have ended within ``timeout_s``."""


class Ranks:
    """Ranks 1 to ``size`` - 1, each with a ``target`` object whose methods rank 0 calls by name.

    The ranks live and die together: when one ends, all others are ended at once, whatever they do, and every call
    here raises ``EngineDeadError``. Not thread-safe but for ``check_health``, ``kill`` and ``shutdown``.
    """

    def __init__(self, size: int, target: Target, launcher: Launcher, *, device: str = "cpu") -> None:
        """Starts the ranks and waits until all have joined. ``device``: ``cpu`` or ``cuda``.

        Raises ``ModelLoadError`` when one of them does not come up.
        """
        self.size = size
        self._launcher = launcher
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._failed = threading.Event()
        self._ended = False
        self._channel: CommandChannel | None = None
        self._store: dist.TCPStore | None = None
        self.group = SINGLE_RANK
        timeout = timedelta(seconds=START_TIMEOUT_S)
        try:
            self._store = store = listen(launcher.host, timeout)
            launcher.launch(
                [
                    RankSpec(
                        rank,
                        size,
                        launcher.host,
                        store.port,
                        launcher.device(device, rank),
                        target,
                        timeout,
                    )
                    for rank in range(1, size)
                ],
                self._on_exit,
            )
            self._wait_until_up(store)
            self.device = torch.device(launcher.device(device, 0))
            control, self.group = join(
                store, 0, size, host=launcher.host, device=self.device, timeout=timeout
            )
        except BaseException as error:
            self.shutdown()
            if isinstance(error, Exception) and not isinstance(error, ModelLoadError):
                reason = self._failure or f"{type(error).__name__}: {error}"
                raise ModelLoadError(f"the {size} tensor-parallel ranks did not start: {reason}") from error
            raise
        self._channel = CommandChannel(control, 0, size)

    def send(self, method: str, *args: Any) -> None:
        """Lets every other rank call ``method``; does not wait. An exception there ends the rank."""
        channel = self._healthy_channel()
        try:
            channel.send(Command(method, args))
        except RuntimeError as error:
            raise self.fail(error, "lost the others") from error

    def call(self, method: str, *args: Any, local: Callable[[], Any] | None = None) -> list[Any]:
        """What ``method`` returns on every rank, by rank; rank 0's own is ``local()``, run at the same time.

        Raises the first error by rank, if there are any; the ranks then go on.
        """
        channel = self._healthy_channel()
        try:
            channel.send(Command(method, args, reply=True))
            replies = channel.gather(call(local) if local is not None else Reply())
        except RuntimeError as error:
            raise self.fail(error, "lost the others") from error
        for rank, reply in enumerate(replies):
            if reply.error is not None:
                if rank:
                    logger.error("%s failed on rank %d", method, rank)
                raise reply.error
        return [reply.value for reply in replies]

    def check_health(self) -> None:
        """Raises ``EngineDeadError`` when a rank has ended."""
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        if self._ended:
            raise EngineDeadError("the tensor-parallel ranks were shut down")

    def fail(self, error: BaseException, what: str = "failed in a forward") -> EngineDeadError:
        """Ends all ranks because of ``error``, after which they would be out of step; the error to raise. It does not
        show ``error``'s text, which may hold anything."""
        self._failed.wait(_BLAME_TIMEOUT_S if isinstance(error, RuntimeError) else 0)
        self._give_up(f"tensor-parallel rank 0 {what} ({type(error).__name__})")
        return EngineDeadError(self._failure or "the tensor-parallel ranks were shut down")

    def kill(self) -> None:
        """Ends the ranks at once, also when they hang; a command that waits for them then fails."""
        self._give_up("the tensor-parallel ranks were killed")

    def shutdown(self) -> None:
        """Ends the ranks and waits until they are gone; idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            channel = self._channel if self._failure is None else None
        try:
            if channel is not None:
                channel.send(Command(STOP), timedelta(seconds=STOP_TIMEOUT_S))
        except RuntimeError:
            channel = None
        if channel is None or not self._launcher.join(STOP_TIMEOUT_S):
            self._launcher.kill()
            if not self._launcher.join(STOP_TIMEOUT_S):
                logger.error(
                    "tensor-parallel ranks are still there %g s after they were killed", STOP_TIMEOUT_S
                )
        self.group.close()
        if self._channel is not None:
            self._channel.close()
        self._channel = self._store = None

    def _healthy_channel(self) -> CommandChannel:
        self.check_health()
        assert self._channel is not None
        return self._channel

    def _wait_until_up(self, store: dist.TCPStore) -> None:
        keys = [up_key(rank) for rank in range(1, self.size)]
        deadline = time.monotonic() + START_TIMEOUT_S
        while not store.check(keys):
            if self._failed.wait(_POLL_S):
                raise RuntimeError(self._failure)
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all were up after {START_TIMEOUT_S:g} s")

    def _on_exit(self, rank: int, how: str) -> None:
        if not self._ended:
            self._give_up(f"tensor-parallel rank {rank} {how}")

    def _give_up(self, reason: str) -> None:
        with self._lock:
            if self._failure is not None or self._ended:
                return
            self._failure = reason
            logger.error("%s; all %d ranks end", reason, self.size)
        # Their sockets close, so whatever waits for them, here too, fails; NCCL has to be told.
        self._launcher.kill()
        if self.group.size > 1 and self.device.type == "cuda":
            try:
                self.group.abort()
            except Exception:
                logger.exception("ending the collectives of a dead group failed")
        self._failed.set()
