"""``/v1/responses``: the official client as it is, its types as the schema, and errors under this API's names."""

import json

import httpx
import openai
import pydantic
import pytest
from fake_dispatcher import FakeDispatcher, config_for, fails, http_client, load_entry, says, validate
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from tool_templates import tool, with_tools

from deployments.ingress import create_app
from replicas import errors
from replicas.protocol import FinishReason, RequestOutput, TokenLogprob

QWEN = with_tools(load_entry("qwen2_5", "m"))
LLADA = load_entry("llada2_b32", "llada")
ENTRIES = {"m": QWEN, "llada": LLADA}
BODY = {"model": "m", "input": "hi"}
ADD = {"type": "function"} | tool("add", x={"type": "integer"})["function"]
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def dispatcher():
    return FakeDispatcher(says(QWEN, "Grüße!", per_step=2))


@pytest.fixture
async def http(dispatcher):
    async with http_client(dispatcher, *ENTRIES.values()) as client:
        yield client
        assert dispatcher.live == 0


@pytest.fixture
def client(http):
    return openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key="none",
        max_retries=0,
        http_client=http,
        _strict_response_validation=True,
    )


async def ask(http, **fields):
    response = await http.post("/v1/responses", json=BODY | fields)
    assert response.status_code == 200, response.text
    Response.model_validate(response.json(), strict=True)
    return response.json()


async def ask_stream(http, **fields):
    """The events, each checked on its own, and all of them against what they build up."""
    response = await http.post("/v1/responses", json=BODY | fields | {"stream": True})
    assert response.status_code == 200, response.text
    events = []
    for part in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event, strict=True)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert_consistent(events)
    return events


def assert_consistent(events):
    """Deltas make up what `done` says, and that is what the last response holds."""
    output, built = [], {}
    for event in events:
        kind, at = event["type"].removeprefix("response."), event.get("output_index")
        if kind == "output_item.added":
            assert at == len(output)
            assert event["item"]["status"] == "in_progress"
            output.append(event["item"])
            built[at] = ""
        elif kind.endswith(".delta"):
            assert event["item_id"] == output[at]["id"]
            built[at] += event["delta"]
        elif kind in ("output_text.done", "function_call_arguments.done"):
            assert event["text" if "text" in kind else "arguments"] == built[at]
        elif kind == "output_item.done":
            assert event["item"]["id"] == output[at]["id"]
            output[at] = event["item"]
    if events[-1]["type"] != "response.failed":
        assert events[-1]["response"]["output"] == output


def without_ids(response):
    output = [item | {"id": "", "call_id": ""} for item in response["output"]]
    return response | {"id": "", "created_at": 0, "completed_at": 0, "output": output}


async def test_the_official_client(client, dispatcher):
    answer = await client.responses.create(
        model="m", input="hi", instructions="Be short.", temperature=0, metadata={"a": "b"}, store=False
    )
    assert answer.output_text == "Grüße!"
    assert (answer.status, answer.instructions, answer.metadata) == ("completed", "Be short.", {"a": "b"})
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.input_tokens_details.cached_tokens == 3
    prompt = QWEN.encoder.decode(dispatcher.requests[0].prompt_token_ids)
    assert prompt == "<system>Be short.<user>hi<assistant>"


async def test_the_official_clients_stream(client):
    stream = await client.responses.create(model="m", input="hi", stream=True)
    events = [event async for event in stream]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Grüße!"
    async with client.responses.stream(model="m", input="hi") as helper:
        assert "".join([e.delta async for e in helper if e.type == "response.output_text.delta"]) == "Grüße!"
        assert (await helper.get_final_response()).output_text == "Grüße!"


async def test_the_official_client_parses_answers(client, dispatcher):
    class Point(pydantic.BaseModel):
        x: int

    dispatcher.script = says(QWEN, '{"x": 3}')
    answer = await client.responses.parse(model="m", input="hi", text_format=Point)
    assert answer.output_parsed == Point(x=3)
    assert dispatcher.requests[0].sampling.grammar.startswith("start: %json")


async def test_a_conversation_with_a_tool(client, dispatcher):
    dispatcher.script = says(QWEN, f"Let me see.\n{CALL}\n{CALL}", per_step=3)
    answer = await client.responses.create(model="m", input="1?", tools=[ADD])
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    _, call, _ = answer.output
    assert (call.name, call.arguments, call.status) == ("add", '{"x": 1}', "completed")
    dispatcher.script = says(QWEN, "2")
    history = [{"role": "user", "content": "1?"}, *(item.model_dump() for item in answer.output[:2])]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
    answer = await client.responses.create(model="m", input=history, tools=[ADD])
    assert answer.output_text == "2"
    prompt = QWEN.encoder.decode(dispatcher.requests[1].prompt_token_ids)
    assert prompt.endswith(f"<user>1?<assistant>Let me see.{CALL}<tool>2<assistant>")


async def test_choices_of_tools_make_a_grammar(http, dispatcher):
    dispatcher.script = says(QWEN, CALL)
    for choice in ("required", {"type": "function", "name": "add"}):
        answer = await ask(http, tools=[ADD], tool_choice=choice)
        assert answer["tool_choice"] == choice
        assert '"<tool_call>"' in dispatcher.requests[-1].sampling.grammar
        assert [item["type"] for item in answer["output"]] == ["function_call"]


TEXTS = ["", "Grüße", CALL, f"a\n{CALL}\n{CALL}b", "<tool_call>{"]


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("text", TEXTS)
async def test_a_stream_ends_with_the_whole_response(http, dispatcher, text, finish):
    ids = QWEN.encoder.encode_text(text) if text else []

    def script(request):
        for token_id in ids:
            yield RequestOutput(request.request_id, [token_id])
        yield RequestOutput(request.request_id, [QWEN.info.eos_token_ids[0]], finish)

    dispatcher.script = script
    whole = await ask(http, tools=[ADD])
    events = await ask_stream(http, tools=[ADD])
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    status = "completed" if finish is FinishReason.STOP else "incomplete"
    assert (whole["status"], events[-1]["type"]) == (status, f"response.{status}")
    assert (whole["incomplete_details"] is None) == (status == "completed")
    assert whole["output"][-1]["status"] == status
    assert whole["store"] is False


@settings(deadline=None, max_examples=30)
@given(data=st.data())
async def test_events_are_consistent_however_tokens_come(data):
    text = "".join(data.draw(st.lists(st.sampled_from([CALL, "text", "\n", "<tool_call>", "é"]), min_size=1)))
    per_step = data.draw(st.integers(1, 200))
    forced = data.draw(st.sampled_from(["auto", "required"]))
    async with http_client(FakeDispatcher(says(QWEN, text, per_step=per_step)), *ENTRIES.values()) as http:
        whole = await ask(http, tools=[ADD], tool_choice=forced)
        events = await ask_stream(http, tools=[ADD], tool_choice=forced)
    assert without_ids(events[-1]["response"]) == without_ids(whole) | {
        "usage": events[-1]["response"]["usage"]
    }


async def test_logprobs(http, dispatcher):
    ids = QWEN.encoder.encode_text("abc")

    def script(request):
        for i, token_id in enumerate(ids):
            reason = FinishReason.LENGTH if i == 2 else None
            logprobs = [TokenLogprob(token_id, -0.5, ((token_id, -0.5),))]
            yield RequestOutput(request.request_id, [token_id], reason, logprobs)

    dispatcher.script = script
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = await ask(http, **fields)
    assert [item["token"] for item in whole["output"][0]["content"][0]["logprobs"]] == ["a", "b", "c"]
    events = await ask_stream(http, **fields)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [item for delta in deltas for item in delta] == whole["output"][0]["content"][0]["logprobs"]
    assert dispatcher.requests[0].sampling.logprobs == 1


async def test_other_fields_reach_the_engine(http, dispatcher):
    await ask(http, max_output_tokens=7, temperature=0.5, top_p=0.25, seed=3, top_k=4)
    sampling = dispatcher.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.25)
    assert (sampling.seed, sampling.top_k) == (3, 4)
    await ask(http, model="llada", steps=5)
    assert dispatcher.requests[1].diffusion.steps == 5


async def test_parts_and_roles(http, dispatcher):
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"role": "user", "content": "<|role_end|>"},
    ]
    await ask(http, input=items, store=True, include=["reasoning.encrypted_content"], unknown=1)
    ids = dispatcher.requests[0].prompt_token_ids
    assert b"<system>d" in b"".join(map(QWEN.token_table.piece, ids))
    assert sum(i in QWEN.token_table.special_ids for i in ids) == 4  # one end per message


FORMAT = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ""}, "model"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"input": "x" * 5000}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": "x"}, "top_k"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [ADD, ADD]}, "tools[1].name"),
        ({"tools": [ADD | {"parameters": {"type": "x"}}]}, "tools[0].parameters.type"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choice": "never"}, "tool_choice"),
        ({"tools": [ADD], "model": "llada"}, "tools"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": FORMAT | {"schema": {"not": {}}}}}, "text.format.schema"),
        ({"text": {"format": FORMAT | {"schema": {"$ref": "#/a"}}}}, "text.format.schema.$ref"),
        ({"text": {"format": FORMAT}, "model": "llada"}, "text.format"),
        ({"stop": ["x"] * 99}, "stop"),
        ({"stream_options": {"include_usage": 5}}, "stream_options.include_usage"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "model": "llada"}, "structured_outputs"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"chat_template": "x"}, "chat_template"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"best_of": 2}, "best_of"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_is_named(http, dispatcher, fields, param, stream):
    response = await http.post("/v1/responses", json=BODY | fields | {"stream": stream})
    assert response.status_code == 400, response.text
    validate("ErrorResponse", response.json())
    error = response.json()["error"]
    assert error["param"] == param
    assert f"`{param}`" in error["message"]
    assert dispatcher.requests == []
    assert (await ask(http))["status"] == "completed"


async def test_stream_options_need_a_stream(http):
    response = await http.post("/v1/responses", json=BODY | {"stream_options": {"include_usage": True}})
    assert response.status_code == 400
    assert "stream_options" in response.json()["error"]["message"]
    await ask_stream(http, stream_options={"include_usage": True})


async def test_extensions_do_what_they_do_in_chats(http, dispatcher):
    response = await ask(http, stop=["ß"], structured_outputs={"regex": "[a-z]+"})
    assert response["output"][0]["content"][0]["text"] == "Grü"
    assert "[a-z]+" in dispatcher.requests[0].sampling.grammar


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_fails_at_the_engine_has_its_own_name(http, dispatcher, stream):
    bounds = errors.InvalidRequestError("`grammar`: reached its bounds", param="grammar")
    dispatcher.script = fails(bounds)
    fields = {"text": {"format": FORMAT}, "stream": stream}
    response = await http.post("/v1/responses", json=BODY | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "text.format")
    assert error["message"] == "`text.format`: reached its bounds"
    dispatcher.script = fails(bounds, RequestOutput("x", QWEN.encoder.encode_text("{")))
    events = await ask_stream(http, text={"format": FORMAT})
    assert events[-1]["response"]["error"]["code"] == "invalid_prompt"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/responses"])
async def test_lone_surrogates_in_arguments_stay_escaped(http, path):
    """Arguments are JSON within JSON; a model may write such a text, and its client sends it back."""
    arguments = r'{"x": "\ud800"}'
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "y"},
    ]
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}
    fields = {"input": [item]} if path == "/v1/responses" else {"messages": messages}
    response = await http.post(path, json={"model": "m"} | fields)
    assert response.status_code == 200, response.text


async def test_null_is_absent_in_items_too(http):
    await ask(http, input=[{"type": None, "role": "user", "content": "hi"}])


async def test_the_limit_of_live_tokens_has_each_apis_own_name(dispatcher):
    config = config_for(QWEN, admission={"max_live_tokens": 10})
    transport = httpx.ASGITransport(app=create_app(config, {"m": QWEN}, dispatcher))
    messages = [{"role": "user", "content": "hi"}]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for path, body, param in (
            ("responses", BODY, "max_output_tokens"),
            ("completions", {"model": "m", "prompt": "hi"}, "max_tokens"),
            ("chat/completions", {"model": "m", "messages": messages}, "max_tokens"),
            (
                "chat/completions",
                {"model": "m", "messages": messages, "max_completion_tokens": 30},
                "max_completion_tokens",
            ),
        ):
            response = await http.post(f"/v1/{path}", json=body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert error["message"].startswith(f"`{param}`: ")


@pytest.mark.parametrize("stream", [False, True])
async def test_failures_before_the_first_token_are_statuses(http, dispatcher, stream):
    dispatcher.script = fails(errors.QueueFullError("full"))
    response = await http.post("/v1/responses", json=BODY | {"stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")


async def test_a_failure_in_the_middle_is_an_event(http, client, dispatcher):
    dispatcher.script = fails(
        errors.ReplicaLostError("the replica died"), RequestOutput("x", QWEN.encoder.encode_text("a"))
    )
    events = await ask_stream(http)
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.failed"
    assert response["error"] == {"code": "server_error", "message": "the replica died"}
    assert (response["status"], response["usage"]) == ("failed", None)
    stream = await client.responses.create(**BODY, stream=True)
    assert [event.type async for event in stream][-1] == "response.failed"
