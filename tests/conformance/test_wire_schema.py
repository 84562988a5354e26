"""Every response and every chunk, as bytes, against the public OpenAPI document; both families."""

from __future__ import annotations

from typing import Any

import pytest
import wire
from running_server import Server

MODELS = ["qwen", "llada"]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two choices": {"n": 2, "temperature": 1, "seed": 4},
    "stop string": {"stop": ["a", "e", "i"]},
    "one token": {"max_tokens": 1},
    "no stop": {"stop": [], "max_tokens": 37},
    "nulls": {"stop": None, "seed": None, "n": None, "logprobs": None, "stream_options": None, "user": None},
    "unknown keys": {"frobnicate": {"a": [1]}, "metadata": {}},
}


def body_of(kind: wire.Kind, model: str, change: dict[str, Any]) -> dict[str, Any]:
    prompt = (
        {"messages": [{"role": "user", "content": "héllo 👩‍👩‍👧"}]}
        if kind == "chat"
        else {"prompt": "héllo 👩‍👩‍👧"}
    )
    return {"model": model, "temperature": 0, "max_tokens": 40} | prompt | change


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("case", CASES)
def test_whole_and_streamed(server: Server, kind: wire.Kind, model: str, case: str) -> None:
    body = body_of(kind, model, CASES[case])
    whole = server.client.post(wire.PATHS[kind], json=body)
    assert whole.status_code == 200, whole.text
    assert whole.headers["content-type"] == "application/json"
    wire.check_whole(kind, whole.json())
    choices = whole.json()["choices"]
    texts = [choice["message"]["content"] if kind == "chat" else choice["text"] for choice in choices]
    for usage in (None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        streamed = server.client.post(
            wire.PATHS[kind], json=body | {"stream": True} | ({"stream_options": usage} if usage else {})
        )
        assert streamed.status_code == 200, streamed.text
        assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert streamed.headers["cache-control"] == "no-cache"
        assert streamed.headers["x-accel-buffering"] == "no"
        chunks = wire.events(streamed.content)
        assert wire.check_stream(kind, chunks, n=len(choices), usage=usage is not None) == texts
        if usage and "continuous_usage_stats" in usage:
            assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: Server, kind: wire.Kind, stream: bool) -> None:
    """Of the autoregressive model: its chunks with logprobs, and as many entries as tokens in the usage."""
    change = {"logprobs": True, "top_logprobs": 2} if kind == "chat" else {"logprobs": 2}
    body = body_of(kind, "qwen", change)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = server.client.post(wire.PATHS[kind], json=body)
    if stream:
        chunks = wire.events(response.content)
        wire.check_stream(kind, chunks, n=1, usage=True)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
        usage = chunks[-1]["usage"]
    else:
        wire.check_whole(kind, response.json())
        parts = [response.json()["choices"][0]["logprobs"]]
        usage = response.json()["usage"]
    key = "content" if kind == "chat" else "tokens"
    assert sum(len(part[key]) for part in parts if part) == usage["completion_tokens"]


def test_models(server: Server) -> None:
    listed = server.client.get("/v1/models").json()
    wire.check("ListModelsResponse", listed)
    for model in listed["data"]:
        one = server.client.get(f"/v1/models/{model['id']}").json()
        wire.check("Model", one)
        assert one == model


@pytest.mark.parametrize(
    ("given", "echo"),
    [
        ("abc-123", True),
        ("x" * 128, True),
        (None, False),
        ("x" * 129, False),
        ("a b", False),
    ],
)
def test_request_id_is_echoed_when_it_is_bounded(server: Server, given: str | None, echo: bool) -> None:
    headers = {} if given is None else {"x-request-id": given}
    response = server.client.get("/v1/models", headers=headers)
    (echoed,) = response.headers.get_list("x-request-id")
    assert (echoed == given) == echo
    assert echoed
