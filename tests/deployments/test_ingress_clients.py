"""A real server on a socket: the official client as it is, and clients that leave at every moment."""

import asyncio
import json
import random
import socket
import threading
import time

import httpx
import openai
import pytest
import uvicorn
from fake_dispatcher import FakeDispatcher, config_for, fails, load_entry, says, up

from deployments.ingress import create_app
from replicas import errors
from replicas.protocol import FinishReason, RequestOutput

ENTRY = load_entry("llada2_b32", "m")
TEXT = "Grüße an 👨‍👩‍👧!"
MESSAGES = [{"role": "user", "content": "hi"}]


class Server:
    """uvicorn in a thread, on a free port of 127.0.0.1."""

    def __init__(self, dispatcher: FakeDispatcher) -> None:
        self.dispatcher = dispatcher
        self.app = create_app(config_for(ENTRY), {"m": ENTRY}, dispatcher)
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.socket]})

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join()
        self.socket.close()

    def is_idle(self) -> bool:
        admission = self.app.state.admission
        return self.dispatcher.live == admission.live_requests("m") == admission.live_tokens("m") == 0

    def wait_for_live(self, n: int) -> None:
        while self.dispatcher.live < n:
            time.sleep(0.01)
        time.sleep(0.1)

    def wait_until_idle(self, seconds: float = 5.0) -> None:
        end = time.monotonic() + seconds
        while not self.is_idle():
            assert time.monotonic() < end, (self.dispatcher.live, self.app.state.admission.live_requests("m"))
            time.sleep(0.01)


@pytest.fixture(scope="module")
def running():
    dispatcher = FakeDispatcher(says(ENTRY, TEXT, per_step=3))
    dispatcher.states = {"m": up()}
    with Server(dispatcher) as server:
        yield server


@pytest.fixture
def server(running):
    running.dispatcher.script = says(ENTRY, TEXT, per_step=3)
    running.dispatcher.aborted.clear()
    yield running
    running.wait_until_idle()


@pytest.fixture
def client(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def test_openai_chat(client):
    answer = client.chat.completions.create(model="m", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == TEXT
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_chat_stream(client):
    stream = client.chat.completions.create(
        model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, n=2
    )
    chunks = list(stream)
    for index in (0, 1):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == TEXT
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
        assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
    assert chunks[-1].usage.completion_tokens > 0


def test_openai_completion_and_models(client):
    answer = client.completions.create(model="m", prompt="a", extra_body={"top_k": 3, "threshold": 0.5})
    assert answer.choices[0].text == TEXT
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"


def test_openai_completion_stream(server):
    # Not strict: the client's own type has no null finish reason, though the API streams it.
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        chunks = list(client.completions.create(model="m", prompt="a", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_openai_stream_helper(client):
    with client.chat.completions.stream(model="m", messages=MESSAGES) as stream:
        assert "".join(e.delta for e in stream if e.type == "content.delta") == TEXT
        assert stream.get_final_completion().choices[0].message.content == TEXT


async def test_openai_async_stream(server):
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", _strict_response_validation=True
    ) as client:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT


def test_openai_errors(server, client):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="m", messages=[])
    assert bad.value.param == "messages"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    server.dispatcher.script = fails(errors.QueueFullError("full"))
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    server.dispatcher.script = fails(errors.ReplicaLostError("died"), RequestOutput("x", [1]))
    with pytest.raises(openai.APIError, match="died"):
        list(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))


def endless(pause):
    def script(request):
        for step in range(10_000):
            yield pause
            yield RequestOutput(request.request_id, ENTRY.encoder.encode_text("ab"), num_forwards=step)
        yield RequestOutput(request.request_id, [], FinishReason.LENGTH)

    return script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause", [0.005, 30.0])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_aborts_its_request_at_once(server, stream, pause, n):
    """Mid-stream and while generating (short pauses), and while queued (a first token that never comes)."""
    server.dispatcher.script = endless(pause)
    body = {"model": "m", "messages": MESSAGES, "stream": stream, "n": n}
    async with httpx.AsyncClient(base_url=server.url) as client:

        async def ask():
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    pass

        task = asyncio.create_task(ask())
        await asyncio.to_thread(server.wait_for_live, n)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(server.wait_until_idle, 1.0)
    assert len(server.dispatcher.aborted) == n


async def test_two_hundred_clients_leave_at_random_times(server):
    server.dispatcher.script = endless(0.005)
    rng = random.Random(5)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=30) as client:

        async def ask(seconds, stream):
            body = {"model": "m", "messages": MESSAGES, "stream": stream}
            try:
                async with (
                    asyncio.timeout(seconds),
                    client.stream("POST", "/v1/chat/completions", json=body) as r,
                ):
                    async for _ in r.aiter_bytes():
                        pass
            except TimeoutError:
                return

        await asyncio.gather(*(ask(rng.uniform(0, 1.5), rng.random() < 0.7) for _ in range(200)))
        await asyncio.to_thread(server.wait_until_idle, 10.0)
        server.dispatcher.script = says(ENTRY, TEXT)
        answer = await client.post("/v1/chat/completions", json={"model": "m", "messages": MESSAGES})
        assert answer.json()["choices"][0]["message"]["content"] == TEXT
        metrics = (await client.get("/metrics")).text
        assert 'blockserve:request_failure_total{code="client_gone",model_name="m"}' in metrics


def test_tokens_arrive_one_by_one_and_not_at_the_end(server):
    """Each token is made only after the client has read the one before."""
    read = [threading.Event() for _ in "abc"]

    def script(request):
        for output, event in zip(says(ENTRY, "abc")(request), [*read, None], strict=True):
            yield output
            while event is not None and not event.is_set():
                yield 0.01

    server.dispatcher.script = script
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    contents = []
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=20) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and (
                content := json.loads(line[6:])["choices"][0]["delta"].get("content")
            ):
                contents.append(content)
                read[len(contents) - 1].set()
    assert contents == ["a", "b", "c"]


def test_raw_bytes_that_are_no_json_do_not_hurt_the_server(server):
    response = httpx.post(
        f"{server.url}/v1/completions",
        content=b"\x00\xff" * 100,
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400
    assert httpx.get(f"{server.url}/health").status_code == 200
