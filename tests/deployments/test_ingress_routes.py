"""Chat and text completions over HTTP, whole and streamed, checked against the OpenAI document."""

import asyncio
import json
import logging
import re
from contextlib import asynccontextmanager

import httpx
import pytest
from fake_dispatcher import (
    FakeDispatcher,
    config_for,
    events_of,
    load_entry,
    says,
    up,
    validate,
    validate_completion_chunk,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import BlockserveConfig
from deployments import app as application
from deployments.ingress import create_app
from deployments.openai.contracts import ModelState
from deployments.openai.metrics import request_logger
from replicas.errors import ModelLoadError
from replicas.protocol import FinishReason, RequestOutput

LLADA = load_entry("llada2_b32", "org/llada")
QWEN = load_entry("qwen2_5", "qwen")
MODELS = {entry.name: entry for entry in (LLADA, QWEN)}
TEXT = "Grüße an 👨‍👩‍👧 und 한국!"
CHAT = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def client_for(dispatcher, **sections):
    app = create_app(config_for(LLADA, QWEN, **sections), MODELS, dispatcher)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        client.app = app
        yield client


@pytest.mark.parametrize("per_step", [1, 7, 100])
async def test_chat(per_step):
    async with client_for(FakeDispatcher(says(QWEN, TEXT, per_step=per_step))) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 200
    body = response.json()
    validate("CreateChatCompletionResponse", body)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    prompt_tokens = len("<user>hi") + 1 + len("<assistant>")
    assert usage["prompt_tokens"] == prompt_tokens
    assert usage["completion_tokens"] == len(TEXT.encode()) + 1  # EOS counts, as it does for vLLM
    assert usage["total_tokens"] == prompt_tokens + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("per_step", [1, 7, 100])
@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"continuous_usage_stats": True}])
@pytest.mark.parametrize("n", [1, 3])
async def test_chat_stream_is_exactly_the_sequence_of_the_contract(per_step, options, n):
    body = CHAT | {"stream": True, "n": n, "stream_options": options}
    async with client_for(FakeDispatcher(says(QWEN, TEXT, per_step=per_step))) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
    for chunk in chunks:
        validate("CreateChatCompletionStreamResponse", chunk)
    assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1
    if options and options.get("include_usage"):
        usage = chunks.pop()
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == n * (len(TEXT.encode()) + 1)
    continuous = bool(options and options.get("continuous_usage_stats"))
    assert all(("usage" in chunk) == continuous for chunk in chunks)
    if continuous:
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == n * (len(TEXT.encode()) + 1)
    for index in range(n):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        first, *middle, last = choices
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all(list(choice["delta"]) == ["content"] and choice["delta"]["content"] for choice in middle)
        assert "".join(choice["delta"]["content"] for choice in middle) == TEXT
        assert last["delta"] == {}
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


async def test_completion_and_its_stream():
    async with client_for(
        FakeDispatcher(says(LLADA, TEXT, finish=FinishReason.LENGTH, per_step=5))
    ) as client:
        body = {"model": "org/llada", "prompt": ["a", "bc"], "n": 2, "max_tokens": 99, "echo": True}
        whole = (await client.post("/v1/completions", json=body)).json()
        streamed = await client.post(
            "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
        )
    validate("CreateCompletionResponse", whole)
    assert [choice["text"] for choice in whole["choices"]] == ["a" + TEXT] * 2 + ["bc" + TEXT] * 2
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 6  # per prompt, not per choice
    *chunks, usage, done = events_of(streamed.text)
    assert done == "[DONE]"
    assert usage["usage"] == whole["usage"]
    for chunk in chunks:
        validate_completion_chunk(chunk)
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]


@pytest.mark.parametrize("max_tokens", [1, 31, 33, 37])
async def test_usage_counts_exactly_the_tokens_given(max_tokens):
    script = says(LLADA, "x" * max_tokens, per_step=32, finish=FinishReason.LENGTH)
    async with client_for(FakeDispatcher(script)) as client:
        body = {"model": "org/llada", "prompt": "a", "max_tokens": max_tokens}
        usage = (await client.post("/v1/completions", json=body)).json()["usage"]
    assert usage["completion_tokens"] == max_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("per_step", [1, 4, 100])
async def test_a_stop_string_cuts_counts_and_aborts(stream, per_step):
    dispatcher = FakeDispatcher(says(QWEN, "one two three four", per_step=per_step))
    async with client_for(dispatcher) as client:
        body = {"model": "qwen", "prompt": "a", "stop": ["three", "zzz"], "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        response = await client.post("/v1/completions", json=body)
    if stream:
        *chunks, last, _ = events_of(response.text)
        text, usage = "".join(c["choices"][0]["text"] for c in chunks), last["usage"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        text, usage = response.json()["choices"][0]["text"], response.json()["usage"]
        assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert text == "one two "
    assert usage["completion_tokens"] == len("one two three")
    assert dispatcher.live == 0
    assert len(dispatcher.aborted) == (per_step < 100)


async def test_min_tokens_come_before_stop_strings():
    async with client_for(FakeDispatcher(says(QWEN, "abXcdXe"))) as client:
        body = {"model": "qwen", "prompt": "a", "stop": "X", "min_tokens": 4}
        response = await client.post("/v1/completions", json=body)
    assert response.json()["choices"][0]["text"] == "abXcd"


async def test_a_stop_token_is_not_shown():
    script = says(QWEN, "abc", finish=FinishReason.LENGTH)

    def ends_at_c(request):
        for output in script(request):
            output.finish_reason = output.finish_reason and FinishReason.STOP
            yield output

    async with client_for(FakeDispatcher(ends_at_c)) as client:
        (token,) = QWEN.encoder.encode_text("c")
        body = {"model": "qwen", "prompt": "a", "stop_token_ids": [token]}
        response = (await client.post("/v1/completions", json=body)).json()
    assert response["choices"][0]["text"] == "ab"
    assert response["usage"]["completion_tokens"] == 3


HEAVY = st.text(
    st.one_of(st.sampled_from("👨‍👩‍👧🏽한힣ᄒ\u0301\u200dعر abé\n"), st.characters(codec="utf-8")),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(
    text=HEAVY,
    junk=st.binary(max_size=4),
    stop=st.lists(HEAVY.filter(lambda s: 1 <= len(s) <= 3), max_size=2),
    per_step=st.integers(1, 9),
)
async def test_a_stream_joined_is_the_whole_answer(text, junk, stop, per_step):
    """Whatever the bytes, however they come in steps."""
    data = text.encode() + junk
    bodies = []
    for steps, stream in ((per_step, True), (1000, False)):
        async with client_for(FakeDispatcher(says(QWEN, data, per_step=steps))) as client:
            body = {"model": "qwen", "prompt": "a", "stop": stop, "stream": stream}
            bodies.append((await client.post("/v1/completions", json=body)).text)
    streamed = "".join(c["choices"][0]["text"] for c in events_of(bodies[0])[:-1])
    whole = json.loads(bodies[1])["choices"][0]["text"]
    assert streamed == whole
    assert data.decode(errors="replace").startswith(whole)
    assert not any(s in whole for s in stop)
    if not any(s in data.decode(errors="replace") for s in stop):
        assert whole == data.decode(errors="replace")


async def test_models():
    async with client_for(FakeDispatcher(says(QWEN, ""))) as client:
        listed = (await client.get("/v1/models")).json()
        validate("ListModelsResponse", listed)
        assert [model["id"] for model in listed["data"]] == ["org/llada", "qwen"]
        assert (await client.get("/v1/models/org/llada")).json() == listed["data"][0]
        assert (await client.get("/v1/models/nope")).status_code == 404


async def test_health_ready_version_and_page():
    dispatcher = FakeDispatcher(says(QWEN, ""))
    async with client_for(dispatcher) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.head("/health")).status_code == 200
        dispatcher.states = {"org/llada": ModelState(False, "loading weights"), "qwen": up()}
        response = await client.get("/ready")
        assert response.status_code == 503
        validate("ErrorResponse", response.json())
        assert response.json()["models"] == [
            {"id": "org/llada", "ready": False, "reason": "loading weights", "replicas": 0},
            {"id": "qwen", "ready": True, "reason": "", "replicas": 1},
        ]
        dispatcher.states["org/llada"] = up()
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/version")).json()["version"]
        html = await client.get("/")
        assert html.headers["content-type"].startswith("text/html")
        assert "http://" not in html.text
        assert "https://" not in html.text


async def test_the_own_openapi_document_has_no_dangling_reference():
    async with client_for(FakeDispatcher(says(QWEN, ""))) as client:
        response = await client.get("/openapi.json")
    schemas = response.json()["components"]["schemas"]
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', response.text))
    bodies = {
        "ChatCompletionRequest",
        "CompletionRequest",
        "ResponsesRequest",
        "TokenizeRequest",
        "DetokenizeRequest",
    }
    assert bodies | {"ChatMessage", "Tool", "ErrorResponse"} <= names <= schemas.keys()


async def test_a_tokenizer_that_cannot_be_loaded_keeps_no_other_model_back(monkeypatch):
    def load(model):
        if model.name == "bad":
            raise ModelLoadError("no tokenizer")
        return QWEN

    monkeypatch.setattr(application, "_load_entry", load)
    bad = QWEN.config.model_copy(update={"name": "bad"})
    ingress = application.Ingress(BlockserveConfig(models=(bad, QWEN.config)), {})
    loading = asyncio.create_task(ingress._load_models())
    for _ in range(400):
        await asyncio.sleep(0.05)
        if ingress.models:
            break
    assert list(ingress.models) == [QWEN.name]
    assert not loading.done()
    loading.cancel()


async def test_a_model_whose_tokenizer_is_loading_is_503():
    app = create_app(config_for(LLADA, QWEN), {"qwen": QWEN}, FakeDispatcher(says(QWEN, "")))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post("/v1/completions", json={"model": "org/llada", "prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_not_ready")
        assert "retry-after" in response.headers


async def test_metrics():
    dispatcher = FakeDispatcher(says(QWEN, "abcd", per_step=2))
    dispatcher.states = {"qwen": up(running=2, waiting=5, kv_usage=0.25, num_forwards=9, steps=8)}
    async with client_for(dispatcher) as client:
        await client.post("/v1/completions", json={"model": "qwen", "prompt": "abc"})
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    for line in [
        'blockserve:num_requests_running{model_name="qwen",replica="replica-1"} 2.0',
        'blockserve:num_requests_waiting{model_name="qwen",replica="replica-1"} 5.0',
        'blockserve:kv_cache_usage_perc{model_name="qwen",replica="replica-1"} 0.25',
        'blockserve:model_forwards_total{model_name="qwen",replica="replica-1"} 9.0',
        'blockserve:prompt_tokens_total{model_name="qwen"} 3.0',
        'blockserve:generation_tokens_total{model_name="qwen"} 5.0',
        'blockserve:request_success_total{finished_reason="stop",model_name="qwen"} 1.0',
        'blockserve:time_to_first_token_seconds_count{model_name="qwen"} 1.0',
        'blockserve:inter_token_latency_seconds_count{model_name="qwen"} 3.0',
        'blockserve:e2e_request_latency_seconds_count{model_name="qwen"} 1.0',
    ]:
        assert line in lines, line


async def test_a_log_line_per_request_without_the_prompt(caplog, monkeypatch):
    monkeypatch.setattr(request_logger, "handlers", [caplog.handler])
    monkeypatch.setattr(request_logger, "propagate", False)  # whatever Serve made of its logger
    with caplog.at_level(logging.INFO, request_logger.name):
        async with client_for(FakeDispatcher(says(QWEN, "an answer"))) as client:
            body = {"model": "qwen", "prompt": "secret words"}
            await client.post("/v1/completions", json=body, headers={"x-request-id": "abc-1"})
    (record,) = [r for r in caplog.records if r.name == request_logger.name]
    line = json.loads(record.message)
    assert line["request_id"] == "abc-1"
    assert (line["model"], line["completion_tokens"], line["finish_reason"]) == ("qwen", 10, "stop")
    assert line["e2e_s"] >= line["ttft_s"] >= 0
    assert "secret" not in caplog.text
    assert "an answer" not in caplog.text


async def test_held_back_outputs_before_the_first_text():
    """A first output without tokens, then half a character: the stream starts, and says nothing wrong."""
    euro = says(QWEN, "€")

    def script(request):
        yield RequestOutput(request.request_id)
        yield from euro(request)

    async with client_for(FakeDispatcher(script)) as client:
        response = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    contents = [e["choices"][0]["delta"].get("content") for e in events_of(response.text)[:-1]]
    assert contents == ["", "€", None]
