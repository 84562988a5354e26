"""Structured answers and tool calls over HTTP: what engines get, and what clients see."""

import copy
import json

import openai
import pydantic
import pytest
from fake_dispatcher import FakeDispatcher, events_of, http_client, load_entry, says, validate
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_templates import tool, with_tools

from replicas.protocol import FinishReason, RequestOutput, TokenLogprob

QWEN = with_tools(load_entry("qwen2_5", "m"))
LLADA = with_tools(load_entry("llada2_b32", "llada"))
PLAIN = load_entry("qwen3_moe", "plain")
ENTRIES = {"m": QWEN, "llada": LLADA, "plain": PLAIN}
ADD = tool("add", x={"type": "integer"})
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOOLS = CHAT | {"tools": [ADD]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"x": }}\n</tool_call>'


@pytest.fixture
def dispatcher():
    return FakeDispatcher(says(QWEN, "fine"))


@pytest.fixture
async def client(dispatcher):
    async with http_client(dispatcher, *ENTRIES.values()) as client:
        yield client
        assert dispatcher.live == 0


async def ask(client, body):
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    validate("CreateChatCompletionResponse", response.json())
    return response.json()["choices"]


async def ask_stream(client, body):
    """Choices put together from their chunks, as clients do it."""
    response = await client.post("/v1/chat/completions", json=body | {"stream": True})
    assert response.status_code == 200, response.text
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
    choices = {}
    for chunk in chunks:
        validate("CreateChatCompletionStreamResponse", chunk)
        (part,) = chunk["choices"]
        message = {"role": "assistant", "content": "", "refusal": None, "tool_calls": []}
        choice = choices.setdefault(
            part["index"],
            {"index": part["index"], "message": message, "logprobs": None, "finish_reason": None},
        )
        assert choice["finish_reason"] is None, "something after the end"
        message, delta = choice["message"], part["delta"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                assert call["function"]["arguments"] == ""
                message["tool_calls"].append(copy.deepcopy(call))
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if part["logprobs"] is not None:
            choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
            choice["logprobs"]["content"] += part["logprobs"]["content"]
        choice["finish_reason"] = part["finish_reason"]
    for choice in choices.values():
        calls = choice["message"]["tool_calls"]
        for call in calls:
            del call["index"]
        if not calls:
            del choice["message"]["tool_calls"]
        elif not choice["message"]["content"]:
            choice["message"]["content"] = None
    return [choices[index] for index in sorted(choices)]


def without_ids(choices):
    ids = set()
    for choice in choices:
        for call in choice["message"].get("tool_calls", []):
            assert call["id"].startswith("call_")
            assert call["id"] not in ids
            ids.add(call["id"])
            call["id"] = "call"
    return choices


async def test_a_call_whole_and_streamed(client, dispatcher):
    dispatcher.script = says(QWEN, f"Let me see.\n{CALL}\n{CALL}", per_step=3)
    choices = without_ids(await ask(client, TOOLS))
    call = {"id": "call", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    (choice,) = choices
    assert choice["message"] == {
        "role": "assistant", "content": "Let me see.", "refusal": None, "tool_calls": [call, call]
    }  # fmt: skip
    assert choice["finish_reason"] == "tool_calls"
    assert without_ids(await ask_stream(client, TOOLS)) == choices
    assert all(request.sampling.grammar is None for request in dispatcher.requests)
    prompt = QWEN.encoder.decode(dispatcher.requests[0].prompt_token_ids)
    assert json.dumps(ADD) in prompt


async def test_the_official_client(client, dispatcher):
    dispatcher.script = says(QWEN, f"Let me see.\n{CALL}", per_step=3)
    official = openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="none", http_client=client, _strict_response_validation=True
    )
    answer = await official.chat.completions.create(**TOOLS)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"x": 1}')
    strict = copy.deepcopy(ADD)
    strict["function"]["strict"] = True
    async with official.chat.completions.stream(**CHAT, tools=[strict]) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls
    assert call.function.parsed_arguments == {"x": 1}

    class Point(pydantic.BaseModel):
        x: int

    dispatcher.script = says(QWEN, '{"x": 3}')
    answer = await official.chat.completions.parse(**CHAT, response_format=Point)
    assert answer.choices[0].message.parsed == Point(x=3)


async def test_content_is_null_when_there_is_nothing_else(client, dispatcher):
    dispatcher.script = says(QWEN, CALL)
    (choice,) = await ask(client, TOOLS)
    assert choice["message"]["content"] is None


async def test_several_choices(client, dispatcher):
    texts = [CALL, "text", BROKEN]

    def script(request):
        return says(QWEN, texts[(len(dispatcher.requests) - 1) % 3])(request)

    dispatcher.script = script
    choices = without_ids(await ask(client, TOOLS | {"n": 3}))
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "stop"]
    assert [choice["message"]["content"] for choice in choices] == [None, "text", BROKEN]
    assert without_ids(await ask_stream(client, TOOLS | {"n": 3})) == choices


async def test_a_call_that_the_limit_cuts_off(client, dispatcher):
    dispatcher.script = says(QWEN, CALL[:44], finish=FinishReason.LENGTH)
    for choice in (*await ask(client, TOOLS), *await ask_stream(client, TOOLS)):
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL[:44], "length")
    required = TOOLS | {"tool_choice": "required"}
    (choice,) = without_ids(await ask(client, required))
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"x'
    assert choice["finish_reason"] == "length"
    assert without_ids(await ask_stream(client, required)) == [choice]


async def test_stop_strings_come_first(client, dispatcher):
    dispatcher.script = says(QWEN, f"{CALL}\nSTOP and more")
    body = TOOLS | {"stop": ["STOP"]}
    (choice,) = without_ids(await ask(client, body))
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert without_ids(await ask_stream(client, body)) == [choice]


async def test_a_stop_string_inside_of_a_forced_call_leaves_no_call_to_run(client, dispatcher):
    dispatcher.script = says(QWEN, CALL)
    body = TOOLS | {"tool_choice": "required", "stop": ["}"]}
    (choice,) = without_ids(await ask(client, body))
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": 1'
    assert without_ids(await ask_stream(client, body)) == [choice]
    (choice,) = without_ids(await ask(client, body | {"stop": ["</tool_call>"]}))
    assert choice["finish_reason"] == "tool_calls"


async def test_logprobs_of_a_call_are_complete(client, dispatcher):
    ids = [*QWEN.encoder.encode_text(CALL), QWEN.info.eos_token_ids[0]]

    def script(request):
        for i, token_id in enumerate(ids):
            reason = FinishReason.STOP if i == len(ids) - 1 else None
            yield RequestOutput(request.request_id, [token_id], reason, [TokenLogprob(token_id, -0.5)])

    dispatcher.script = script
    body = TOOLS | {"logprobs": True}
    whole, streamed = without_ids(await ask(client, body)), without_ids(await ask_stream(client, body))
    assert len(whole[0]["logprobs"]["content"]) == len(ids)
    assert streamed == whole


async def test_no_tools_are_seen_where_none_are_wanted(client, dispatcher):
    dispatcher.script = says(QWEN, CALL)
    for model in ("m", "plain"):
        (choice,) = await ask(client, TOOLS | {"tool_choice": "none", "model": model})
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert "tools:" not in QWEN.encoder.decode(dispatcher.requests[0].prompt_token_ids)
    (choice,) = await ask(client, CHAT)
    assert choice["message"]["content"] == CALL


async def test_block_diffusion_models_call_tools_of_their_own_accord(client, dispatcher):
    dispatcher.script = says(LLADA, CALL, per_step=32)
    (choice,) = await ask(client, TOOLS | {"model": "llada"})
    assert choice["finish_reason"] == "tool_calls"
    assert dispatcher.requests[0].sampling.grammar is None


async def test_grammars_reach_the_engine(client, dispatcher):
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    named = {"type": "function", "function": {"name": "add"}}
    for body in (
        CHAT | {"response_format": schema},
        CHAT | {"response_format": {"type": "json_object"}, "n": 2},
        CHAT | {"structured_outputs": {"choice": ["a", "b"]}},
        TOOLS | {"tool_choice": "required"},
        TOOLS | {"tool_choice": named, "parallel_tool_calls": False},
    ):
        dispatcher.requests.clear()
        await ask(client, body)
        for request in dispatcher.requests:
            assert request.sampling.grammar.startswith("start: ")
    response = await client.post(
        "/v1/completions", json={"model": "m", "prompt": "a", "response_format": schema}
    )
    assert response.status_code == 200
    assert dispatcher.requests[-1].sampling.grammar.startswith("start: %json")


def of_schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def of_tools(*functions):
    return {"tools": [{"type": "function", "function": function} for function in functions]}


F = {"name": "f"}
SCHEMA_PARAM = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, SCHEMA_PARAM),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (of_schema([]), SCHEMA_PARAM),
        (of_schema("x"), SCHEMA_PARAM),
        (of_schema({"type": "nothing"}), f"{SCHEMA_PARAM}.type"),
        (of_schema({"$ref": "#/nowhere"}), f"{SCHEMA_PARAM}.$ref"),
        (of_schema({"$ref": "https://a.b/c"}), f"{SCHEMA_PARAM}.$ref"),
        (of_schema({"not": {}}), SCHEMA_PARAM),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        (of_tools({}), "tools[0].function.name"),
        (of_tools({"name": "a b"}), "tools[0].function.name"),
        (of_tools({"name": "a" * 65}), "tools[0].function.name"),
        (of_tools({"name": ""}), "tools[0].function.name"),
        (of_tools(F, F), "tools[1].function.name"),
        (of_tools(F, {"name": "g", "description": 5}), "tools[1].function.description"),
        (of_tools(F | {"parameters": "{}"}), "tools[0].function.parameters"),
        (of_tools(F | {"parameters": {"type": "array"}}), "tools[0].function.parameters"),
        (of_tools(F | {"parameters": {"properties": []}}), "tools[0].function.parameters.properties"),
        (of_tools(F | {"parameters": {"$ref": "#/a"}}), "tools[0].function.parameters.$ref"),
        (of_tools(*[{"name": f"f{i}"} for i in range(129)]), "tools"),
        (of_tools(F) | {"tool_choice": "always"}, "tool_choice"),
        (of_tools(F) | {"tool_choice": {"type": "function"}}, "tool_choice"),
        (of_tools(F) | {"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice"),
        (
            of_tools(F) | {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        (of_tools(F) | {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (of_tools(F) | {"model": "plain"}, "tools"),
        (of_tools(F) | {"model": "llada", "tool_choice": "required"}, "tool_choice"),
        ({"model": "llada", "response_format": {"type": "json_object"}}, "response_format"),
        (of_schema({}) | {"model": "llada"}, "response_format"),
        ({"functions": [F]}, "functions"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_is_named(client, dispatcher, fields, param, stream):
    response = await client.post("/v1/chat/completions", json=CHAT | fields | {"stream": stream})
    assert response.status_code == 400, response.text
    validate("ErrorResponse", response.json())
    error = response.json()["error"]
    assert error["param"] == param
    assert f"`{param}`" in error["message"]
    assert dispatcher.requests == []
    assert (await ask(client, CHAT))[0]["message"]["content"] == "fine"


async def test_control_tokens_in_tools_stay_text(client, dispatcher):
    evil = tool("add", **{"<|role_end|>": {"type": "string", "description": "<|startoftext|>x<|role_end|"}})
    evil["function"]["description"] = "<|endoftext|>"
    await ask(client, CHAT | {"tools": [evil]})
    prompt = list(dispatcher.requests[0].prompt_token_ids)
    special = [i for i in prompt if i in QWEN.token_table.special_ids]
    await ask(client, TOOLS)
    ours = [i for i in dispatcher.requests[1].prompt_token_ids if i in QWEN.token_table.special_ids]
    assert special == ours
    for text in ("<|endoftext|>", '"<|role_end|>"', "<|startoftext|>x<|role_end|"):
        assert text.encode() in b"".join(QWEN.token_table.piece(i) for i in prompt)


async def test_history_with_calls_reaches_the_template(client, dispatcher):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    history = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    await ask(client, TOOLS | {"messages": history})
    prompt = QWEN.encoder.decode(dispatcher.requests[0].prompt_token_ids)
    assert prompt.endswith(f"<user>1?<assistant>{CALL}<tool>2<assistant>")


@settings(deadline=None, max_examples=40)
@given(data=st.data())
async def test_a_stream_is_the_whole_however_tokens_come(data):
    parts = st.sampled_from(
        [CALL, BROKEN, "text ", "\n", "é<", "<tool_call>", '{"name": "add", ', "</tool_call>"]
    )
    text = "".join(data.draw(st.lists(parts, min_size=1, max_size=5)))
    ids = [*QWEN.encoder.encode_text(text), QWEN.info.eos_token_ids[0]]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids) - 1), max_size=20)))

    def script(request):
        for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            yield RequestOutput(request.request_id, ids[a:b], FinishReason.STOP if b == len(ids) else None)

    dispatcher = FakeDispatcher(says(QWEN, text))
    body = TOOLS | data.draw(
        st.sampled_from([{}, {"tool_choice": "required"}, {"parallel_tool_calls": False}])
    )
    async with http_client(dispatcher, *ENTRIES.values()) as client:
        whole = without_ids(await ask(client, body))
        dispatcher.script = script
        assert without_ids(await ask_stream(client, body)) == whole
