"""What clients send that servers choke on: always a 4xx in the envelope, and the next request works."""

import asyncio
import json
import logging

import httpx
import pytest
from fake_dispatcher import FakeDispatcher, config_for, events_of, fails, load_entry, says, validate

from deployments.ingress import create_app
from replicas import errors
from replicas.protocol import FinishReason, RequestOutput

ENTRY = load_entry("llada2_b32", "m")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
MAX_BODY = 50_000


@pytest.fixture
def dispatcher():
    return FakeDispatcher(says(ENTRY, "fine"))


@pytest.fixture
async def client(dispatcher):
    config = config_for(
        ENTRY, admission={"max_body_bytes": MAX_BODY, "max_live_requests": 4, "retry_after_s": 2.5}
    )
    app = create_app(config, {"m": ENTRY}, dispatcher)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        client.app = app
        yield client
        # Whatever the test did, the next request works and nothing is left.
        dispatcher.script = says(ENTRY, "fine")
        response = await client.post("/v1/chat/completions", json=CHAT)
        assert response.json()["choices"][0]["message"]["content"] == "fine"
        assert dispatcher.live == 0
        assert (app.state.admission.live_requests("m"), app.state.admission.live_tokens("m")) == (0, 0)


def refused(response, status, *, param=None, code=None, text=""):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    validate("ErrorResponse", body)
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["param"] == param
    assert text in error["message"]
    if code:
        assert error["code"] == code
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'"x"', "must be a JSON object, got a string"),
        (b"[]", "an array"),
        (b"1", "a number"),
        (b"1.5", "a number"),
        (b"true", "a boolean"),
        (b"null", "null"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b"[" * 40_000, "nested too deeply"),
        (b'{"n": ' + b"9" * 10_000 + b"}", "too long"),
    ],
)
async def test_bodies_that_are_no_json_objects(client, path, content, text):
    response = await client.post(path, content=content, headers=JSON)
    refused(response, 400, code="invalid_json", text=text)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (r'{"model": "m", "messages": [{"role": "user", "content": "a\ud800b"}]}', "messages[0].content"),
        (r'{"model": "m", "messages": [{"role": "user", "content": "x"}], "stop": ["\uDFFF"]}', "stop[0]"),
        (r'{"model": "m", "messages": [{"role": "user", "content": "x"}], "other": {"\ud800": 1}}', "other"),
    ],
)
async def test_lone_surrogates(client, body, param):
    response = await client.post("/v1/chat/completions", content=body, headers=JSON)
    refused(response, 400, param=param, text="surrogate")


async def test_lone_surrogates_in_a_schema_that_is_a_text(client):
    body = {"model": "m", "prompt": "x", "structured_outputs": {"json": r'{"properties": {"\ud800": 5}}'}}
    response = await client.post("/v1/completions", json=body)
    refused(response, 400, param="structured_outputs.json")


async def test_too_many_choices_are_refused_before_any_work(client, monkeypatch):
    monkeypatch.setattr(type(ENTRY.encoder), "encode_text", None)
    body = {"model": "m", "prompt": ["a"] * 1024, "n": 128, "logit_bias": {"1": 1}}
    refused(await client.post("/v1/completions", json=body), 400, param="n", text="131072")


async def test_surrogate_pairs_are_fine(client, dispatcher):
    body = r'{"model": "m", "messages": [{"role": "user", "content": "\ud83d\ude00"}]}'
    assert (await client.post("/v1/chat/completions", content=body, headers=JSON)).status_code == 200
    assert ENTRY.encoder.decode(dispatcher.requests[0].prompt_token_ids) == "<user>😀<assistant>"


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"]
)
async def test_wrong_content_types(client, kind):
    response = await client.post("/v1/completions", content=b"{}", headers={"content-type": kind})
    refused(response, 415, text=kind)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", None])
async def test_right_content_types(client, kind):
    content = json.dumps(CHAT).encode()
    headers = {"content-type": kind} if kind else {}
    response = await client.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 200


async def test_a_body_that_says_it_is_too_large_is_not_read(client):
    async def never():
        raise AssertionError("read")
        yield b""

    headers = JSON | {"content-length": "50000001"}
    response = await client.post("/v1/completions", content=never(), headers=headers)
    refused(response, 413, text=str(MAX_BODY))


async def test_a_body_that_turns_out_too_large(client):
    sent = 0

    async def chunks():
        nonlocal sent
        for _ in range(1000):
            sent += 10_000
            yield b" " * 10_000

    response = await client.post("/v1/completions", content=chunks(), headers=JSON)
    refused(response, 413, text=str(MAX_BODY))
    assert sent <= MAX_BODY + 20_000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"messages": []}, "messages"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"n": 5}, "n"),  # more choices than may ever live
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_fields(client, dispatcher, fields, param, stream):
    body = CHAT | fields | ({"stream": True} if stream and param != "stream_options" else {})
    response = await client.post("/v1/chat/completions", content=json.dumps(body), headers=JSON)
    refused(response, 400, param=param, text=f"`{param}`")
    assert dispatcher.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_longer_than_the_context(client, stream):
    body = CHAT | {"messages": [{"role": "user", "content": "x" * 2000}], "stream": stream}
    response = await client.post("/v1/chat/completions", json=body)
    refused(response, 400, param="messages", code="context_length_exceeded", text="1024 tokens")
    assert "has 2018 tokens" in response.json()["error"]["message"]


async def test_an_unknown_model(client):
    response = await client.post("/v1/chat/completions", json=CHAT | {"model": "gpt-5"})
    refused(response, 404, param="model", code="model_not_found", text="'gpt-5'")


async def test_unknown_paths_and_methods(client):
    refused(await client.get("/v1/nothing"), 404, text="/v1/nothing")
    refused(await client.post("/v1/embeddings", json={}), 404)
    response = await client.get("/v1/chat/completions")
    refused(response, 405, text="GET")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("abc-1:2/3", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False), ("é", False)],
)
async def test_request_ids_are_echoed_when_they_are_bounded(client, dispatcher, given, echoed):
    headers = {"x-request-id": given.encode()}
    response = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert (response.headers["x-request-id"] == given) == echoed
    assert response.headers.get_list("x-request-id") == [response.headers["x-request-id"]]
    assert 1 <= len(response.headers["x-request-id"]) <= 128
    assert dispatcher.requests[0].request_id != given


async def test_no_second_request_id_header_behind_serves_proxy(dispatcher):
    app = create_app(config_for(ENTRY), {"m": ENTRY}, dispatcher, add_request_id_header=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "a"})
        assert response.status_code == 200
        assert "x-request-id" not in response.headers


async def test_two_live_requests_with_one_request_id(client, dispatcher):
    headers = {"x-request-id": "same"}
    responses = await asyncio.gather(
        *(client.post("/v1/chat/completions", json=CHAT, headers=headers) for _ in range(2))
    )
    assert [response.status_code for response in responses] == [200, 200]
    assert len({request.request_id for request in dispatcher.requests}) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidRequestError("bad `steps`", param="steps"), 400, "invalid_request"),
        (errors.UnsupportedParameterError("no", param="ignore_eos"), 400, "unsupported_parameter"),
        (errors.QueueFullError("full"), 429, "queue_full"),
        (errors.DeadlineExceededError("late"), 408, "deadline_exceeded"),
        (errors.ModelNotReadyError("loading"), 503, "model_not_ready"),
        (errors.EngineDeadError("dead"), 503, "engine_dead"),
        (errors.ReplicaLostError("lost"), 503, "replica_lost"),
        (errors.StepFailedError("step"), 500, "engine_step_failed"),
        (errors.BlockserveError("secret inside"), 500, "internal_error"),
    ],
)
async def test_failures_before_the_first_token_are_statuses(client, dispatcher, stream, error, status, code):
    dispatcher.script = fails(error)
    response = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    refused(response, status, param=error.param, code=code)
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert "secret" not in response.text


async def test_a_failure_after_the_first_token_is_an_event(client, dispatcher):
    first = RequestOutput("x", ENTRY.encoder.encode_text("a"))
    dispatcher.script = fails(errors.ReplicaLostError("the replica died"), first)
    response = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert response.status_code == 200
    *chunks, last = events_of(response.text)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "a"]
    validate("ErrorResponse", last)
    assert last["error"]["code"] == "replica_lost"
    assert "[DONE]" not in response.text


async def test_one_failing_choice_fails_the_request_and_aborts_the_others(client, dispatcher):
    fine = says(ENTRY, "a long answer" * 10)

    def script(request):
        if len(dispatcher.requests) == 2:
            return fails(errors.StepFailedError("boom"))(request)
        return fine(request)

    dispatcher.script = script
    response = await client.post("/v1/chat/completions", json=CHAT | {"n": 3})
    refused(response, 500, code="engine_step_failed")
    assert len(dispatcher.aborted) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_by_the_server_is_a_503(client, dispatcher, stream):
    dispatcher.script = lambda request: [RequestOutput(request.request_id, finish_reason=FinishReason.ABORT)]
    response = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    refused(response, 503, code="request_aborted")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_a_500_without_its_inside(client, dispatcher, stream, caplog):
    def script(request):
        raise RuntimeError("secret inside")
        yield

    dispatcher.script = script
    with caplog.at_level(logging.ERROR):
        response = await client.post(
            "/v1/chat/completions", json=CHAT | {"stream": stream}, headers={"x-request-id": "find-me"}
        )
    refused(response, 500, code="internal_error")
    assert response.headers["x-request-id"] == "find-me"
    assert "secret" not in response.text
    assert "find-me" in caplog.text
    assert "secret inside" in caplog.text


async def test_a_bug_in_the_middle_of_a_stream(client, dispatcher, caplog):
    def script(request):
        yield RequestOutput(request.request_id, ENTRY.encoder.encode_text("a"))
        raise RuntimeError("secret inside")

    dispatcher.script = script
    response = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert events_of(response.text)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "secret inside" in caplog.text


async def test_a_stream_without_an_end_is_a_500(client, dispatcher):
    dispatcher.script = lambda request: [RequestOutput(request.request_id, [1])]
    refused(await client.post("/v1/chat/completions", json=CHAT), 500, code="internal_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_burst_above_the_bound_gets_429_and_the_rest_finishes(client, dispatcher, stream):
    dispatcher.script = lambda request: [0.2, *says(ENTRY, "fine")(request)]
    body = CHAT | {"stream": stream}
    responses = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(12)))
    full = [response for response in responses if response.status_code == 429]
    assert sorted({response.status_code for response in responses}) == [200, 429]
    assert len(full) == 8
    for response in full:
        refused(response, 429, code="queue_full")
        assert response.headers["retry-after"] == "3"
        assert response.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline(dispatcher, stream):
    config = config_for(ENTRY, admission={"request_timeout_s": 0.2})
    app = create_app(config, {"m": ENTRY}, dispatcher)
    dispatcher.script = lambda request: [30.0, *says(ENTRY, "late")(request)]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    refused(response, 408, code="deadline_exceeded")
    assert dispatcher.live == 0
    assert len(dispatcher.aborted) == 1


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "only"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "last"}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"arguments": "{"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a part"}]}],
        [{"role": "user", "content": ""}],
    ],
)
async def test_odd_but_valid_histories(client, messages):
    assert (await client.post("/v1/chat/completions", json=CHAT | {"messages": messages})).status_code == 200
