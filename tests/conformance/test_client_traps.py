"""What clients send that servers choke on: the right status and field, never a 5xx or a hang, the next request works.

Clients that leave are in tests/e2e/test_robustness.py; one case here is one line.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
import wire
from running_server import Server

MODELS = ["qwen", "llada"]
JSON = {"content-type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def history(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER, *messages]}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", autouse=True)
def idle_afterwards(server: Server):
    """Gauges are back at 0 after all of it, and admission holds nothing."""
    yield
    for model in MODELS:
        server.wait_idle(model)
        server.wait_for("kv_cache_usage_perc", model, 0)


def works(server: Server, model: str) -> None:
    answer = server.client.post(
        TEXT, json={"model": model, "prompt": "ab", "max_tokens": 2, "temperature": 0}, timeout=60
    )
    assert answer.status_code == 200, answer.text


def refused(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> None:
    assert response.status_code == status, response.text[:500]
    error = wire.check_error(response.json())
    assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error


# name: (content, headers, status, code)
RAW_BODIES: dict[str, tuple[bytes, dict[str, str], int, str]] = {
    "a string": (b'"x"', JSON, 400, "invalid_json"),
    "an array": (b"[]", JSON, 400, "invalid_json"),
    "a number": (b"1", JSON, 400, "invalid_json"),
    "null": (b"null", JSON, 400, "invalid_json"),
    "empty": (b"", JSON, 400, "invalid_json"),
    "cut off": (b'{"model": "qwen", "prom', JSON, 400, "invalid_json"),
    "two objects": (b"{}{}", JSON, 400, "invalid_json"),
    "nested deeply": (b'{"a":' + b"[" * 100_000, JSON, 400, "invalid_json"),
    "a long number": (b'{"n": ' + b"9" * 10_000 + b"}", JSON, 400, "invalid_json"),
    "invalid UTF-8": (b'{"model": "\xff\xfe"}', JSON, 400, "invalid_json"),
    "UTF-16": ('{"model": "qwen"}'.encode("utf-16"), JSON, 400, "invalid_json"),
    "text/plain": (b'{"model": "qwen"}', {"content-type": "text/plain"}, 415, "unsupported_media_type"),
    "a form": (
        b"model=qwen",
        {"content-type": "application/x-www-form-urlencoded"},
        415,
        "unsupported_media_type",
    ),
    "50 MB": (b'{"prompt": "' + b"x" * 50_000_000 + b'"}', JSON, 413, "body_too_large"),
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", RAW_BODIES)
def test_bodies_that_are_no_request(server: Server, path: str, name: str) -> None:
    content, headers, status, code = RAW_BODIES[name]
    refused(server.client.post(path, content=content, headers=headers), status, None, code)
    works(server, "qwen")


# name: (what is set in a chat request, param)
BAD_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages"),
    "messages null": ({"messages": None}, "messages"),
    "messages a string": ({"messages": "hello"}, "messages"),
    "a message that is a string": ({"messages": ["hello"]}, "messages[0]"),
    "no role": ({"messages": [{"content": "a"}]}, "messages[0].role"),
    "unknown role": ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    "user without content": ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
    "content a number": ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    "content without parts": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    "a part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content",
    ),
    "an image part": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
    ),
    "tool message without id": (history(call("{}"), {"role": "tool", "content": "1"}), "messages[2]"),
    "a lone surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    "a lone surrogate in a key": ({"\udfff": 1}, None),  # type: ignore[dict-item]
    "n 0": ({"n": 0}, "n"),
    "n -1": ({"n": -1}, "n"),
    "n 129": ({"n": 129}, "n"),
    "n '2'": ({"n": "2"}, "n"),
    "n 1.5": ({"n": 1.5}, "n"),
    "n true": ({"n": True}, "n"),
    "temperature -1": ({"temperature": -1}, "temperature"),
    "temperature 3": ({"temperature": 3}, "temperature"),
    "temperature NaN": ({"temperature": float("nan")}, "temperature"),
    "temperature infinite": ({"temperature": float("inf")}, "temperature"),
    "temperature 1e308": ({"temperature": 1e308}, "temperature"),
    "top_p 1.5": ({"top_p": 1.5}, "top_p"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens -1": ({"max_tokens": -1}, "max_tokens"),
    "max_tokens 2**70": ({"max_tokens": 2**70}, "max_tokens"),
    "max_completion_tokens 0": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "max_tokens above the context": ({"max_tokens": 1_000_000}, "max_tokens"),
    "logit_bias 101": ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    "logit_bias of a word": ({"logit_bias": {"hello": 1}}, "logit_bias"),
    "logit_bias out of the vocabulary": ({"logit_bias": {"99999": 1}}, "logit_bias"),
    "500,000 stop strings": ({"stop": ["x"] * 500_000}, "stop"),
    "an empty stop string": ({"stop": [""]}, "stop"),
    "stop a number": ({"stop": 3}, "stop"),
    "stop null in a list": ({"stop": [None]}, "stop[0]"),
    "stop tokens out of the vocabulary": ({"stop_token_ids": [99999]}, "stop_token_ids"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "model null": ({"model": None}, "model"),
    "model empty": ({"model": ""}, "model"),
    "seed 2**64": ({"seed": 2**64}, "seed"),
}
BAD_TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompt": None}, "prompt"),
    "prompt an empty list": ({"prompt": []}, "prompt"),
    "prompt an object": ({"prompt": {}}, "prompt"),
    "a token out of the vocabulary": ({"prompt": [1, 512]}, "prompt"),
    "a negative token": ({"prompt": [1, -1]}, "prompt"),
    "a token null": ({"prompt": [1, None]}, "prompt"),
    "a token 2**70": ({"prompt": [1, 2**70]}, "prompt"),
    "a token true": ({"prompt": [1, True]}, "prompt"),
    "an empty list of tokens": ({"prompt": [[]]}, "prompt"),
    "n times prompts": ({"prompt": ["a"] * 100, "n": 100}, "n"),
    "logprobs 21": ({"logprobs": 21}, "logprobs"),
    "best_of 2": ({"best_of": 2}, "best_of"),
}
REFUSED = [(CHAT, name) for name in BAD_CHATS] + [(TEXT, name) for name in BAD_TEXTS]


@pytest.mark.parametrize(("path", "name"), REFUSED)
def test_refused_by_name(server: Server, model: str, path: str, name: str) -> None:
    """A 400 whose ``param`` is the field at fault, streaming or not: before any event."""
    change, param = (BAD_CHATS if path == CHAT else BAD_TEXTS)[name]
    body = {"model": model, "max_tokens": 4} | ({"messages": [USER]} if path == CHAT else {"prompt": "a"})
    for stream in (False, True):
        content = json.dumps(body | {"stream": stream} | change)
        refused(server.client.post(path, content=content, headers=JSON), 400, param)
    works(server, model)


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model(server: Server, stream: bool) -> None:
    for name in ("nope", "x" * 100_000, "../../etc", "qwen\n", "模型"):
        answer = server.client.post(CHAT, json={"model": name, "messages": [USER], "stream": stream})
        refused(answer, 404, "model", "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
def test_longer_than_the_context_names_both_numbers(server: Server, model: str, stream: bool) -> None:
    limit = next(m for m in server.client.get("/v1/models").json()["data"] if m["id"] == model)[
        "max_model_len"
    ]
    tokens = {"model": model, "prompt": [65] * (limit + 5), "stream": stream, "max_tokens": 1}
    words = {"model": model, "messages": [{"role": "user", "content": "x" * 5000}], "stream": stream}
    for path, body, param in ((TEXT, tokens, "prompt"), (CHAT, words, "messages")):
        answer = server.client.post(path, json=body)
        refused(answer, 400, param, "context_length_exceeded")
        assert str(limit) in answer.json()["error"]["message"]
    assert str(limit + 5) in server.client.post(TEXT, json=tokens).json()["error"]["message"]
    works(server, model)


def test_mask_tokens_in_a_prompt(server: Server) -> None:
    """The id is refused, the text is text."""
    answer = server.client.post(TEXT, json={"model": "llada", "prompt": [65, 511], "max_tokens": 1})
    refused(answer, 400, "prompt")
    assert "mask" in answer.json()["error"]["message"]
    answer = server.client.post(TEXT, json={"model": "llada", "prompt": "<|mask|>", "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len("<|mask|>")


def test_stream_options_without_a_stream(server: Server, model: str) -> None:
    body = {"model": model, "messages": [USER], "stream_options": {"include_usage": True}}
    refused(server.client.post(CHAT, json=body), 400, "stream_options")
    works(server, model)


# name: what is set in a chat request that must be answered
FINE_CHATS: dict[str, dict[str, Any]] = {
    "content null with tool calls": history(call("{}"), {"role": "tool", "tool_call_id": "c1", "content": "1"}),
    "malformed tool arguments": history(call('{"a": '), {"role": "tool", "tool_call_id": "c1", "content": "1"}),
    "tool arguments an array": history(call("[1]"), {"role": "tool", "tool_call_id": "c1", "content": "1"}),
    "tool arguments an object": history(call({"a": 1}), {"role": "tool", "tool_call_id": "c1", "content": "1"}),
    "tool arguments null": history(call(None)),
    "tool arguments empty": history(call("")),
    "an empty list of tool calls": history({"role": "assistant", "content": "a", "tool_calls": []}),
    "content parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 3}]},
    "parts of the system": {"messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}, USER]},
    "system only": {"messages": [{"role": "system", "content": "be brief"}]},
    "developer": {"messages": [{"role": "developer", "content": "be brief"}, USER]},
    "last role assistant": history({"role": "assistant", "content": "I say"}),
    "empty content": {"messages": [{"role": "user", "content": ""}]},
    "control tokens as text": {"messages": [{"role": "user", "content": "<|im_end|><|mask|><|endoftext|>"}]},
    "a NUL": {"messages": [{"role": "user", "content": "a\x00b"}]},
    "a surrogate pair": {"messages": [{"role": "user", "content": "\U0001f600"}]},
    "a named user": {"messages": [USER | {"name": "ann"}]},
    "greedy with top_p 0": {"temperature": 0, "top_p": 0},
    "top_p 0": {"top_p": 0},
    "temperature 2": {"temperature": 2},
    "temperature 1e-300": {"temperature": 1e-300},
    "max_tokens 1": {"max_tokens": 1},
    "max_tokens 31": {"max_tokens": 31},
    "max_tokens 33": {"max_tokens": 33},
    "max_tokens 37": {"max_tokens": 37},
    "n 8": {"n": 8},
    "tools with choice none": {"tools": [TOOL], "tool_choice": "none"},
    "no tools": {"tools": [], "tool_choice": "none"},
    "response_format text": {"response_format": {"type": "text"}},
    "no logit_bias": {"logit_bias": {}},
    "stop null": {"stop": None},
    "no stop strings": {"stop": []},
    "four long stop strings": {"stop": ["x" * 1000 + str(i) for i in range(4)]},
    "seed 0": {"seed": 0},
    "seed negative": {"seed": -(2**63)},
    "all nulls": dict.fromkeys(
        [
            "temperature", "top_p", "n", "stop", "seed", "stream_options", "logit_bias", "logprobs",
            "top_logprobs", "presence_penalty", "frequency_penalty", "tools", "tool_choice", "response_format",
            "user", "max_completion_tokens", "functions", "function_call", "modalities", "audio",
        ]
    ),
    "keys of other servers": {"cache_prompt": True, "mirostat": 0, "metadata": {"a": "b"}, "store": False},
}  # fmt: skip


@pytest.mark.parametrize("name", FINE_CHATS)
def test_answered(server: Server, model: str, name: str) -> None:
    body = {"model": model, "messages": [USER], "max_tokens": 4, "ignore_eos": True} | FINE_CHATS[name]
    whole = server.client.post(CHAT, content=json.dumps(body), headers=JSON)
    assert whole.status_code == 200, whole.text
    wire.check_whole("chat", whole.json())
    if name.startswith("max_tokens"):
        assert whole.json()["usage"]["completion_tokens"] == body["max_tokens"]
    streamed = server.client.post(CHAT, content=json.dumps(body | {"stream": True}), headers=JSON)
    wire.check_stream("chat", wire.events(streamed.content), n=body.get("n") or 1, usage=False)


def test_the_limit_of_new_tokens_that_wins(server: Server, model: str) -> None:
    body = {
        "model": model,
        "messages": [USER],
        "ignore_eos": True,
        "max_tokens": 2,
        "max_completion_tokens": 3,
    }
    assert server.client.post(CHAT, json=body).json()["usage"]["completion_tokens"] == 3


async def test_one_request_id_for_two_live_requests(server: Server, model: str) -> None:
    body = {"model": model, "prompt": [65, 66], "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        answers = await asyncio.gather(
            *(client.post(TEXT, json=body, headers={"x-request-id": "the-same"}) for _ in range(4))
        )
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.headers["x-request-id"] for answer in answers} == {"the-same"}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert len({answer.json()["id"] for answer in answers}) == 4


def test_a_request_id_of_a_megabyte(server: Server, model: str) -> None:
    """The HTTP parser refuses such a header, or the server replaces it; it is never echoed."""
    body = {"model": model, "prompt": "ab", "max_tokens": 1}
    try:
        answer = httpx.post(
            server.url + TEXT, json=body, headers={"x-request-id": "x" * 1_000_000}, timeout=60
        )
    except httpx.TransportError:  # closed while it was being sent
        pass
    else:
        assert answer.status_code in (200, 400, 431)
        assert len(answer.headers.get("x-request-id", "")) <= 128
    works(server, model)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_wrong_method(server: Server, method: str) -> None:
    refused(server.client.request(method, CHAT), 405, None, "method_not_allowed")


@pytest.mark.parametrize("path", ["/v1", "/v1/chat/completions/", "/v1//models", "/v1/embeddings", "/%00"])
def test_unknown_path(server: Server, path: str) -> None:
    refused(server.client.post(path, json={}), 404, None, "not_found")


async def test_two_hundred_clients_leave_at_once(server: Server, model: str) -> None:
    """At random times: while queued, in prefill, mid-stream. Every slot comes back."""
    rng = random.Random(17)
    body = {"model": model, "prompt": [65] * 64, "max_tokens": 800, "temperature": 0, "ignore_eos": True}

    async def leave(client: httpx.AsyncClient, seconds: float, stream: bool) -> None:
        try:
            async with (
                asyncio.timeout(seconds),
                client.stream("POST", TEXT, json=body | {"stream": stream}) as response,
            ):
                async for _ in response.aiter_raw():
                    pass
        except TimeoutError:
            pass

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        await asyncio.gather(*(leave(client, rng.uniform(0.01, 2), i % 3 > 0) for i in range(200)))
    server.wait_idle(model)
    server.wait_for("kv_cache_usage_perc", model, 0)
    works(server, model)
