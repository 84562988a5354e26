"""The response that always cleans up, apart from any server."""

import asyncio

import pytest
from starlette.requests import Request

from deployments.openai.errors import ClientGoneError
from deployments.openai.framing import frame
from deployments.openai.sse import EventStreamResponse, unless_disconnected


class Connection:
    """An ASGI connection whose client leaves when ``leave`` is set."""

    def __init__(self, send_error=None):
        self.leave = asyncio.Event()
        self.sent = []
        self._send_error = send_error

    async def receive(self):
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if self._send_error and message["type"] == "http.response.body":
            raise self._send_error
        self.sent.append(message)


class Stream:
    """A response over events; counts how often its parts are closed."""

    def __init__(self, endless=False):
        self.closed = self.on_close_calls = 0
        self._endless = endless
        self.response = EventStreamResponse(self._events(), self._on_close)

    async def _events(self):
        try:
            yield b"a"
            yield b"b"
            if self._endless:
                await asyncio.Event().wait()
        finally:
            self.closed += 1

    async def _on_close(self):
        assert self.closed  # the stream ends before what it holds is given back
        self.on_close_calls += 1

    async def run(self, connection):
        await self.response({"type": "http"}, connection.receive, connection.send)


async def test_a_whole_stream():
    connection, stream = Connection(), Stream()
    await stream.run(connection)
    assert [message.get("body") for message in connection.sent] == [None, b"a", b"b", b""]
    assert [message.get("more_body") for message in connection.sent] == [None, True, True, False]
    assert b"content-length" not in dict(connection.sent[0]["headers"])
    assert (stream.closed, stream.on_close_calls) == (1, 1)


async def test_the_client_leaves():
    connection, stream = Connection(), Stream(endless=True)
    task = asyncio.create_task(stream.run(connection))
    await asyncio.sleep(0.01)
    assert stream.on_close_calls == 0
    connection.leave.set()
    await asyncio.wait_for(task, 1)
    assert (stream.closed, stream.on_close_calls) == (1, 1)


async def test_the_server_cancels():
    connection, stream = Connection(), Stream(endless=True)
    task = asyncio.create_task(stream.run(connection))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (stream.closed, stream.on_close_calls) == (1, 1)


@pytest.mark.parametrize(("error", "raised"), [(OSError("gone"), None), (RuntimeError("bug"), RuntimeError)])
async def test_sending_fails(error, raised):
    connection, stream = Connection(error), Stream()
    if raised:
        with pytest.raises(raised):
            await stream.run(connection)
    else:
        await stream.run(connection)
    assert (stream.closed, stream.on_close_calls) == (1, 1)


async def test_unless_disconnected():
    connection = Connection()
    request = Request({"type": "http"}, connection.receive)
    assert await unless_disconnected(request, asyncio.sleep(0, "done")) == "done"

    ended = asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(unless_disconnected(request, work()))
    await asyncio.sleep(0.01)
    connection.leave.set()
    with pytest.raises(ClientGoneError):
        await asyncio.wait_for(task, 1)
    assert ended.is_set()


def test_a_frame_is_one_event():
    assert frame({"text": "a\n\nb\u2028é"}) == 'data: {"text":"a\\n\\nb\u2028é"}\n\n'.encode()
