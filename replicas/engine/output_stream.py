"""From the step thread to the one consumer in an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator

from replicas.errors import EngineDeadError
from replicas.protocol import StepOutput

logger = logging.getLogger(__name__)


class OutputStream:
    """Keeps step outputs, in order, until the consumer takes them. ``put`` and ``end`` are called from any
    thread and never wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs: deque[StepOutput] = deque()
        self._consumer: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._ended = False
        self._error: EngineDeadError | None = None

    def put(self, output: StepOutput) -> None:
        with self._lock:
            self._outputs.append(output)
        self._wake()

    def end(self, error: EngineDeadError | None = None) -> None:
        """Nothing comes after what was put so far; the consumer then gets ``error``. The first call counts."""
        with self._lock:
            if not self._ended:
                self._ended, self._error = True, error
        self._wake()

    async def items(self) -> AsyncGenerator[StepOutput]:
        """All outputs until the end. Raises the error that the stream ended with, and ``RuntimeError`` for a
        second consumer at the same time."""
        arrived = asyncio.Event()
        with self._lock:
            if self._consumer is not None:
                raise RuntimeError("steps() has a consumer already")
            self._consumer = (asyncio.get_running_loop(), arrived)
        try:
            while True:
                arrived.clear()
                with self._lock:
                    items = list(self._outputs)
                    self._outputs.clear()
                    ended, error = self._ended, self._error
                for item in items:
                    yield item
                if items:
                    continue
                if error is not None:
                    raise EngineDeadError(error.message)
                if ended:
                    return
                await arrived.wait()
        finally:
            with self._lock:
                self._consumer = None

    def _wake(self) -> None:
        with self._lock:
            consumer = self._consumer
        if consumer is not None:
            loop, arrived = consumer
            try:
                loop.call_soon_threadsafe(arrived.set)
            except RuntimeError:
                logger.warning("the consumer's event loop is closed; its outputs are dropped")
