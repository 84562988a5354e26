"""The official Python client with strict validation of every response; both families."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import openai
import pytest
from running_server import Server

MODELS = ["qwen", "llada"]
MESSAGES = [{"role": "user", "content": "hello"}]
GREEDY = {"messages": MESSAGES, "temperature": 0, "max_completion_tokens": 40}
USAGE = {"include_usage": True}


def options(server: Server) -> dict:
    return {
        "base_url": f"{server.url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "timeout": 120,
        "_strict_response_validation": True,
    }


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(**options(server)) as client:
        yield client


def text_of(chunks: list, index: int = 0) -> str:
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index)


@pytest.mark.parametrize("model", MODELS)
def test_chat_plain_raw_and_streamed_agree(client: openai.OpenAI, model: str) -> None:
    plain = client.chat.completions.create(model=model, **GREEDY)
    text = plain.choices[0].message.content
    assert text
    assert plain.model == model
    raw = client.chat.completions.with_raw_response.create(model=model, **GREEDY)
    assert raw.headers["x-request-id"]
    assert raw.parse().choices[0].message.content == text
    chunks = list(client.chat.completions.create(model=model, stream=True, stream_options=USAGE, **GREEDY))
    assert text_of(chunks) == text
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    with client.chat.completions.with_streaming_response.create(model=model, **GREEDY) as response:
        assert response.parse().choices[0].message.content == text
    with client.chat.completions.stream(model=model, **GREEDY) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == text
        # `get_final_completion` raises where the limit ended the text.
        assert stream.current_completion_snapshot.choices[0].message.content == text


@pytest.mark.parametrize("model", MODELS)
async def test_async_client(server: Server, model: str) -> None:
    async with openai.AsyncOpenAI(**options(server)) as client:
        plain, stream = await asyncio.gather(
            client.chat.completions.create(model=model, **GREEDY),
            client.chat.completions.create(model=model, stream=True, **GREEDY),
        )
        assert text_of([chunk async for chunk in stream]) == plain.choices[0].message.content
        raw = await client.completions.with_raw_response.create(
            model=model, prompt="hello", max_tokens=5, temperature=0
        )
        assert raw.parse().usage.completion_tokens <= 5
        assert {item.id async for item in client.models.list()} >= set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_completions(server: Server, client: openai.OpenAI, model: str) -> None:
    request = {"model": model, "prompt": ["one", "two"], "max_tokens": 40, "temperature": 0}
    plain = client.completions.create(**request)
    assert [choice.index for choice in plain.choices] == [0, 1]
    # Not strict: the client's type has no null finish reason, though the API streams it.
    with openai.OpenAI(**options(server) | {"_strict_response_validation": False}) as loose:
        chunks = list(loose.completions.create(stream=True, stream_options=USAGE, **request))
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    for choice in plain.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason
    echo = client.completions.create(**request | {"prompt": "one", "echo": True})
    assert echo.choices[0].text == "one" + plain.choices[0].text


def test_models(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert {model.id for model in listed} >= set(MODELS)
    for model in listed:
        assert client.models.retrieve(model.id) == model


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_two_choices_and_seeds(client: openai.OpenAI, model: str, stream: bool) -> None:
    """Sampled: two choices differ, the same seed gives them again, another one does not."""

    def texts(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model=model, messages=MESSAGES, n=2, seed=seed, max_tokens=40, temperature=1, stream=stream
        )
        if not stream:
            return [choice.message.content for choice in answer.choices]
        chunks = list(answer)
        return [text_of(chunks, index) for index in (0, 1)]

    first = texts(1)
    assert first[0] != first[1]
    assert texts(1) == first
    assert texts(2) != first


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_stop(client: openai.OpenAI, model: str, stream: bool) -> None:
    whole = client.completions.create(model=model, prompt="stop", max_tokens=40, temperature=0).choices[0]
    stop = whole.text[11:13]
    answer = client.completions.with_raw_response.create(
        model=model, prompt="stop", max_tokens=40, temperature=0, stop=[stop, "\x00never"]
    ).parse()
    expected = whole.text[: whole.text.index(stop)]
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    # Chat too: its own text, cut at its own middle.
    request = {"model": model, **GREEDY}
    text = client.chat.completions.create(**request).choices[0].message.content
    stop = text[7:9]
    answer = client.chat.completions.create(stop=stop, stream=stream, **request)
    shown = text_of(list(answer)) if stream else answer.choices[0].message.content
    assert shown == text[: text.index(stop)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client: openai.OpenAI, model: str, stream: bool) -> None:
    request = {"model": model, **GREEDY, "logprobs": True, "top_logprobs": 3}
    if stream:
        chunks = [c for c in client.chat.completions.create(stream=True, **request) if c.choices]
        content = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
        text = text_of(chunks)
    else:
        choice = client.chat.completions.create(**request).choices[0]
        content, text = choice.logprobs.content, choice.message.content
    assert content
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert math.fsum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-4
        if model == "qwen":  # greedy; a block's positions are decided in any order, and may be edited later
            assert entry.token == entry.top_logprobs[0].token
    pieces = b"".join(bytes(entry.bytes) for entry in content)
    assert pieces.decode("utf-8", "replace").startswith(text)


@pytest.mark.parametrize("model", MODELS)
def test_completion_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="hello", max_tokens=20, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    assert len(logprobs.tokens) == answer.usage.completion_tokens
    assert all(value <= 0 for value in logprobs.token_logprobs)
    assert all(1 <= len(top) <= 3 for top in logprobs.top_logprobs)
    assert logprobs.text_offset == sorted(logprobs.text_offset)


ERRORS = {
    "unknown model": ({"model": "nope"}, openai.NotFoundError, "model"),
    "no messages": ({"messages": []}, openai.BadRequestError, "messages"),
    "temperature": ({"temperature": 3}, openai.BadRequestError, "temperature"),
    "too long": (
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        openai.BadRequestError,
        "messages",
    ),
    "too many choices": ({"n": 129}, openai.BadRequestError, "n"),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_the_right_classes(client: openai.OpenAI, model: str, stream: bool, name: str) -> None:
    change, kind, param = ERRORS[name]
    request = {"model": model, "messages": MESSAGES, "max_tokens": 4} | change
    with pytest.raises(kind) as caught:
        client.chat.completions.create(stream=stream, **request)
    assert type(caught.value) is kind
    assert caught.value.param == param
    assert caught.value.code
    assert caught.value.request_id


def test_errors_of_paths_and_bodies(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("nope")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model="qwen", input="a")
    assert unknown.value.code == "not_found"
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="qwen", prompt="x" * 20_000_000)
    assert large.value.status_code == 413
