"""The Serve deployment around an engine: one stream per batch, metrics, health, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal

from ray import serve

from configs.schema import ModelConfig
from replicas.checkpoints import resolve_checkpoint
from replicas.errors import BlockserveError, DeadlineExceededError, EngineDeadError
from replicas.protocol import (
    Engine,
    EngineCapabilities,
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestError,
    RequestOutput,
)

logger = logging.getLogger("ray.serve")

#: Seconds between signs of life on a batch's stream while its requests get nothing.
PING_INTERVAL_S = 1.0
#: Between the news that the engine is dead and the end of the process: lets the errors go out.
EXIT_GRACE_S = 0.5
#: ``as_of`` of the routing stats is rounded to this (seconds), so that an idle replica is not news.
ROUTING_CLOCK_S = 10.0

Envelope = (
    tuple[Literal["hdr"], str] | tuple[Literal["out"], list[RequestOutput]] | tuple[Literal["ping"], None]
)
#: Makes the engine of a replica; it travels to the replica by pickle.
Loader = Callable[[ModelConfig], Engine]


def load_engine(config: ModelConfig) -> Engine:
    """Builds the engine that ``config.engine.backend`` names, on this machine. Raises ``ModelLoadError``."""
    path = resolve_checkpoint(config.path)
    if config.engine.backend == "vllm":
        from replicas.vllm_engine.loading import load_vllm_engine

        return load_vllm_engine(config, path)
    from replicas.engine.core import EngineCore  # torch is imported where it is used

    return EngineCore.from_config(config, path)


class EngineReplica:
    """One engine and the streams of the batches it works on.

    ``load`` runs in a thread, so the event loop answers while weights load; Serve counts the replica as
    starting until the constructor returns. A dead or stuck engine ends the process: a caller's stream then
    breaks at once and the router drops the replica, instead of waiting for three failed health checks.
    """

    async def __init__(self, config: ModelConfig, load: Loader = load_engine) -> None:
        self.replica_id = _replica_id()
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, _BatchStream] = {}
        self._dead: EngineDeadError | None = None
        self._closing = False
        self._engine = await asyncio.to_thread(load, config)
        self._reader = asyncio.create_task(self._read_steps())

    async def generate_batch(
        self, requests: Sequence[GenerationRequest], **_hints: Any
    ) -> AsyncGenerator[Envelope, None]:
        """Runs a batch; ``("hdr", replica_id)`` first, then ``("out", outputs)`` per engine step that had
        something for it, ``("ping", None)`` about every second without; ends when all its requests have.

        A request that cannot run gets an output with ``error``; the others go on. Closing or cancelling the
        generator aborts what has not ended. A request id that is live already (a call that Serve sent
        twice) is aborted and started again. Keyword arguments are hints for the router.
        """
        stream = _BatchStream()
        if self._dead is not None:
            # The caller's next attempt must not find this replica once more: answer by ending.
            await asyncio.sleep(2 * EXIT_GRACE_S)
        try:
            yield ("hdr", self.replica_id)
            for request in requests:
                await self._submit(request, stream)
            while stream.live or stream.outputs:
                if stream.outputs:
                    outputs, stream.outputs = stream.outputs, []
                    yield ("out", outputs)
                    continue
                stream.wakeup.clear()
                try:
                    async with asyncio.timeout(PING_INTERVAL_S):
                        await stream.wakeup.wait()
                except TimeoutError:
                    self._abort_expired(stream)
                    yield ("ping", None)
        finally:
            stream.closed = True
            for request_id in list(stream.live):
                self._engine.abort(request_id)

    async def abort(self, request_ids: Sequence[str], **_hints: Any) -> None:
        """Ends requests in any phase; unknown ids are ignored. Their streams get finish reason ABORT."""
        for request_id in request_ids:
            self._engine.abort(request_id)

    async def engine_stats(self) -> tuple[str, EngineStats]:
        return self.replica_id, self._engine.stats()

    async def capabilities(self) -> EngineCapabilities:
        return self._engine.capabilities

    def check_health(self) -> None:
        """Called by Serve every ``health_check_period_s``. Raises ``EngineDeadError``."""
        if self._dead is None:
            try:
                self._engine.check_health()
            except Exception as error:
                self._die(error)
        if self._dead is not None:
            raise self._dead

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Logical queue depth for ``QueueDepthPolicy``. Always numbers: Serve turns the metrics of a replica
        off for good when the first value it gets is not one."""
        stats = self._engine.stats()
        return {
            "waiting": float(stats.waiting),
            "running": float(stats.running),
            "queued_tokens": float(stats.queued_tokens),
            "kv_usage": float(stats.kv_usage),
        }

    def record_routing_stats(self) -> dict[str, Any]:
        """Load for the router. Rounded, because every change is broadcast to every handle."""
        stats = self._engine.stats()
        return {
            "waiting": stats.waiting,
            "running": stats.running,
            "total_slots": stats.total_slots,
            "queued_tokens": _two_digits(stats.queued_tokens),
            "as_of": time.time() // ROUTING_CLOCK_S * ROUTING_CLOCK_S,
        }

    def __del__(self) -> None:
        """Serve's hook after the drain."""
        self._closing = True
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()

    async def _submit(self, request: GenerationRequest, stream: _BatchStream) -> None:
        request_id = request.request_id
        if request_id in stream.live:
            return
        try:
            if self._dead is not None:
                raise self._dead
            while request_id in self._streams:
                self._engine.abort(request_id)
                await asyncio.sleep(0.01)
            if request.deadline is not None and request.deadline <= time.time():
                raise DeadlineExceededError("the deadline passed before the request could start")
            self._engine.submit(request)
        except BlockserveError as error:
            stream.put(_failed(request_id, error.to_request_error()))
        except Exception as error:
            logger.exception("Submitting a request failed.")
            internal = BlockserveError(f"{type(error).__name__}: {error}")
            stream.put(_failed(request_id, internal.to_request_error()))
        else:
            # No await since submit, so no output can have been read in between.
            self._streams[request_id] = stream
            stream.live[request_id] = request

    async def _read_steps(self) -> None:
        """The engine's one consumer: hands every output to the stream of its batch."""
        try:
            async for step in self._engine.steps():
                for output in step.outputs:
                    stream = self._streams.get(output.request_id)
                    if stream is None:
                        continue
                    if output.finished:
                        del self._streams[output.request_id]
                    stream.put(output)
            if not self._closing:
                self._die(EngineDeadError("the engine's step loop has ended"))
        except Exception as error:
            self._die(error)

    def _abort_expired(self, stream: _BatchStream) -> None:
        """The last resort when the dispatcher, which watches deadlines too, is gone."""
        now = time.time()
        for request_id, request in stream.live.items():
            if request.deadline is not None and request.deadline < now:
                self._engine.abort(request_id)

    def _die(self, cause: Exception) -> None:
        if self._dead is not None or self._closing:
            return
        logger.error("The engine is dead; this replica exits.", exc_info=cause)
        error = EngineDeadError(str(cause) or type(cause).__name__)
        self._dead = error
        self._loop.call_soon_threadsafe(self._fail_all, error)

    def _fail_all(self, error: EngineDeadError) -> None:
        for request_id, stream in list(self._streams.items()):
            stream.put(_failed(request_id, error.to_request_error()))
        self._streams.clear()
        self._loop.call_later(EXIT_GRACE_S, _exit_process)


class _BatchStream:
    """Outputs of one batch that its generator has not sent yet; ``live``: its requests that go on."""

    def __init__(self) -> None:
        self.live: dict[str, GenerationRequest] = {}
        self.outputs: list[RequestOutput] = []
        self.wakeup = asyncio.Event()
        self.closed = False

    def put(self, output: RequestOutput) -> None:
        if output.finished:
            self.live.pop(output.request_id, None)
        if not self.closed:
            self.outputs.append(output)
            self.wakeup.set()


def _two_digits(value: int) -> int:
    """Rounded to two significant digits."""
    return round(value, -max(len(str(value)) - 2, 0))


def _failed(request_id: str, error: RequestError) -> RequestOutput:
    return RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=error)


def _replica_id() -> str:
    try:
        return serve.get_replica_context().replica_id.unique_id
    except serve.exceptions.RayServeException:  # outside Serve (tests)
        return f"local-{os.getpid()}"


def _exit_process() -> None:
    os._exit(1)
