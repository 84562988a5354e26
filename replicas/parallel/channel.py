"""Commands from rank 0 to all others, and their answers, over gloo."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from replicas.errors import BlockserveError
from replicas.parallel.process_group import FOREVER

#: Bytes of a broadcast that most commands fit into; what is longer takes a second one.
FIRST_BYTES = 4096
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Command:
    """Call ``method`` with ``args`` of the object that a rank serves. ``reply``: rank 0 waits for the outcome."""

    method: str
    args: tuple[Any, ...] = ()
    reply: bool = False


@dataclass(frozen=True)
class Reply:
    """What one rank's call returned, or the error that it raised."""

    value: Any = None
    error: BlockserveError | None = None


class CommandChannel:
    """``backend``: gloo, of which ranks 1 to n - 1 all receive what rank 0 sends, in the same order. Messages are
    pickled: all ranks run the same code. Every call raises ``RuntimeError`` when a rank that it waits for has ended.
    """

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self._backend = backend
        self._rank = rank
        self._size = size

    def send(self, command: Command, timeout: timedelta = FOREVER) -> None:
        """Rank 0: returns when every rank waits for a command, or has taken this one; after ``timeout`` raises."""
        data = pickle.dumps(command, protocol=5)
        message = bytearray(max(FIRST_BYTES, _LENGTH_BYTES + len(data)))
        message[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
        message[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data
        buffer = torch.frombuffer(message, dtype=torch.uint8)
        self._broadcast(buffer[:FIRST_BYTES], timeout)
        if len(buffer) > FIRST_BYTES:
            self._broadcast(buffer[FIRST_BYTES:], timeout)

    def receive(self) -> Command:
        """The other ranks: waits for the next command, without a timeout and without using the CPU."""
        buffer = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._broadcast(buffer)
        message = buffer.numpy().tobytes()
        end = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "little")
        if end > FIRST_BYTES:
            rest = torch.empty(end - FIRST_BYTES, dtype=torch.uint8)
            self._broadcast(rest)
            message += rest.numpy().tobytes()
        return pickle.loads(message[_LENGTH_BYTES:end])

    def gather(self, reply: Reply) -> list[Reply]:
        """Every rank gives its own; rank 0 gets all of them by rank, the others an empty list."""
        data = torch.frombuffer(bytearray(pickle.dumps(reply, protocol=5)), dtype=torch.uint8)
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self._size)]
        self._backend.allgather([lengths], [torch.tensor([len(data)])]).wait()
        padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8)
        padded[: len(data)] = data
        parts = [torch.empty_like(padded) for _ in range(self._size)] if self._rank == 0 else []
        self._backend.gather([parts] if parts else [], [padded]).wait()
        return [
            pickle.loads(part[: int(length)].numpy().tobytes())
            for part, length in zip(parts, lengths, strict=False)
        ]

    def close(self) -> None:
        """Closes the sockets, whoever still holds this object."""
        self._backend = None

    def _broadcast(self, tensor: torch.Tensor, timeout: timedelta = FOREVER) -> None:
        options = dist.BroadcastOptions()
        options.timeout = timeout
        self._backend.broadcast([tensor], options).wait()
