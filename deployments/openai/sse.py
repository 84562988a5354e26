"""Server-sent events: framing, the order of chunks, and a response that always cleans up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.openai.errors import ClientGoneError
from deployments.openai.generation import ChoiceDelta
from deployments.openai.protocol import StreamOptions
from deployments.openai.responses import ResponseBuilder
from replicas.errors import BlockserveError, SlowConsumerError

logger = logging.getLogger(__name__)


async def event_stream(
    builder: ResponseBuilder,
    first: ChoiceDelta,
    rest: AsyncGenerator[ChoiceDelta, None],
    options: StreamOptions,
    on_error: Callable[[BaseException], None],
) -> AsyncGenerator[bytes, None]:
    """The events of one response: what comes before its deltas, the deltas, and the end.

    ``first`` was taken from ``rest`` before the headers went out. A later failure is an event that ends the
    stream, without its proper end. Chunks of one delta go out together.
    """

    async with aclosing(rest):
        try:
            head = [builder.encode(chunk, options) for chunk in builder.first_chunks()]
            yield b"".join(head + [builder.encode(chunk, options) for chunk in builder.chunks(first)])
            async for delta in rest:
                if events := [builder.encode(chunk, options) for chunk in builder.chunks(delta)]:
                    yield b"".join(events)
            yield builder.end(options)
        except BlockserveError as error:
            on_error(error)
            yield builder.failure(error)
        except Exception as error:
            on_error(error)
            logger.exception("a stream failed")
            yield builder.failure(BlockserveError(str(error)))


class EventStreamResponse(Response):
    """Sends an event stream. Whatever happens (the client leaves, sending fails, this task is cancelled), the
    stream is closed and ``on_close`` is awaited, exactly once, before the response returns.

    A client that does not take an event for ``write_timeout_s`` ends its stream like one that has left;
    ``on_error`` is told. Starlette's own StreamingResponse leaves an abandoned generator to the garbage collector.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_close: Callable[[], Awaitable[object]],
        write_timeout_s: float | None = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close
        self._write_timeout_s = write_timeout_s
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send(send))
        watcher = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            try:
                await _cancel(sender, watcher)
            finally:
                await self._on_close()
        if not sender.cancelled():
            sender.result()

    async def _send(self, send: Send) -> None:
        limit = asyncio.timeout(None)
        try:
            async with aclosing(self._events) as events:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for event in events:
                    async with asyncio.timeout(self._write_timeout_s) as limit:
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # the client is gone, or reads nothing
            if limit.expired() and self._on_error is not None:
                message = f"the client took nothing of its stream for {self._write_timeout_s:g} s"
                self._on_error(SlowConsumerError(message))


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """The result of ``work``, which is cancelled (and awaited) when the client leaves first: then raises
    ``ClientGoneError``. The body must have been read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await _cancel(task, watcher)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
