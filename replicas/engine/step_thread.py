"""The thread that steps an engine: its start, its end, and how others see that it lives."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from replicas.engine.output_stream import OutputStream
from replicas.engine.slot_engine import SlotEngine
from replicas.errors import EngineDeadError
from replicas.protocol import StepOutput

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 30.0
_ABORT_TIMEOUT_S = 5.0


class StepThread(ABC):
    """Calls ``step`` in a thread of its own while there are live requests, and waits on a condition variable
    while there are none. Subclasses say what a step is."""

    engine: SlotEngine

    def __init__(self, step_timeout_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._stream = OutputStream()
        # Guards everything below; held for moments only, never during a forward.
        self._condition = threading.Condition()
        self._live_ids: set[str] = set()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._dead: EngineDeadError | None = None
        self._progress_at = time.monotonic()

    @abstractmethod
    def step(self) -> StepOutput:
        """One step in the caller's thread."""

    @abstractmethod
    def _cut_off(self, error: EngineDeadError) -> None:
        """Ends all live requests with ``error``; the step thread has ended."""

    def start(self) -> None:
        """Starts the step thread; idempotent. ``steps`` does it too."""
        with self._condition:
            self._raise_if_ended()
            if self._thread is None:
                self._progress_at = time.monotonic()
                self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
                self._thread.start()

    async def steps(self) -> AsyncIterator[StepOutput]:
        """Outputs, in order, for the one consumer of this engine; starts the step thread. Ends at
        ``shutdown``, after the outputs of requests that it cut off; raises ``EngineDeadError`` when the step
        loop has died."""
        self.start()
        async with contextlib.aclosing(self._stream.items()) as items:
            async for item in items:
                yield item

    def check_health(self) -> None:
        """Raises ``EngineDeadError`` when the step loop or a tensor-parallel rank has ended, or when a step takes
        longer than ``step_timeout_s`` while there is work."""
        with self._condition:
            self._raise_if_ended()
            self.engine.runner.check_health()
            if self._thread is not None and not self._thread.is_alive():
                raise EngineDeadError("the engine's step thread has ended")
            age = time.monotonic() - self._progress_at
            if self._thread is not None and self._live_ids and age > self._step_timeout_s:
                raise EngineDeadError(
                    f"the engine has {len(self._live_ids)} requests but its step has not ended for "
                    f"{age:.1f} s (`step_timeout_s` is {self._step_timeout_s:g})"
                )

    def shutdown(self) -> None:
        """Stops the loop, ends what is live with a retryable error, frees memory; idempotent."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
            self._condition.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT_S)
            if thread.is_alive():
                # A step that waits for a tensor-parallel rank ends when the ranks do.
                self.engine.runner.abort()
                thread.join(_ABORT_TIMEOUT_S)
            if thread.is_alive():
                logger.error("the step thread did not end within %g s", _JOIN_TIMEOUT_S)
                self._stream.end()
                return
        self._cut_off(EngineDeadError("the engine was shut down"))
        self._stream.end()
        self.engine.close()

    def _run(self) -> None:
        try:
            while True:
                with self._condition:
                    while not (self._live_ids or self._closed or self._dead):
                        self._condition.wait()
                    if self._closed or self._dead:
                        break
                output = self.step()
                if output.outputs:
                    self._stream.put(output)
        except BaseException as error:
            logger.exception("the step loop died")
            with self._condition:
                self._dead = self._dead or EngineDeadError(f"the step loop died: {error!r}")
        if self._dead is not None:
            try:
                self._cut_off(self._dead)
            finally:
                self._stream.end(self._dead)

    def _raise_if_ended(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead.message)
        if self._closed:
            raise EngineDeadError("the engine was shut down")
