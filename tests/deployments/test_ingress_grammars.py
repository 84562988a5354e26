"""Whatever a grammar lets through is what the client asked for: random tokens among those that it allows."""

import json
import random

import jsonschema
import pytest
from fake_dispatcher import FakeDispatcher, http_client, load_entry
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tool_templates import tool, with_tools

from replicas.protocol import FinishReason, RequestOutput

QWEN = with_tools(load_entry("qwen2_5", "m"))
EOS = QWEN.info.eos_token_ids[0]
VOCABULARY = from_tokenizer(QWEN.tokenizer, n_vocab=QWEN.info.vocab_size, eos_token=EOS)
SCHEMA = {
    "type": "object",
    "properties": {"c": {"enum": ["red", "blüe"]}, "m": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "required": ["c", "m"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [tool("paint", c={"enum": ["red", "blüe"]}), tool("stop")]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def obeys(request):
    """An engine that knows nothing but the grammar."""
    matcher = LLMatcher(VOCABULARY, request.sampling.grammar, log_level=0)
    assert not matcher.get_error()
    rng = random.Random(request.sampling.seed)
    for step in range(request.sampling.max_tokens):
        allowed = [i for i, bias in enumerate(matcher.compute_logit_bias()) if bias]
        token_id = rng.choice(allowed)
        last = step == request.sampling.max_tokens - 1
        reason = FinishReason.STOP if token_id == EOS else FinishReason.LENGTH if last else None
        yield RequestOutput(request.request_id, [token_id], reason)
        if reason:
            return
        assert matcher.consume_token(token_id)


@pytest.fixture
async def client():
    async with http_client(FakeDispatcher(obeys), QWEN) as client:
        yield client


async def choices(client, **fields):
    response = await client.post("/v1/chat/completions", json=CHAT | {"n": 16, "seed": 1} | fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


async def test_a_schema(client):
    kind = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    texts = set()
    for choice in await choices(client, response_format=kind):
        assert choice["finish_reason"] == "stop"
        texts.add(choice["message"]["content"])
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert len(texts) > 3


@pytest.mark.parametrize("parallel", [False, True])
async def test_required_calls(client, parallel):
    schemas = {item["function"]["name"]: item["function"]["parameters"] for item in TOOLS}
    seen = set()
    numbers = set()
    for choice in await choices(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel):
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        calls = choice["message"]["tool_calls"]
        numbers.add(len(calls))
        for call in calls:
            jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
            seen.add(call["function"]["name"])
    assert seen == {"paint", "stop"}
    assert (numbers == {1}) == (not parallel)


async def test_a_named_call(client):
    named = {"type": "function", "function": {"name": "stop"}}
    for choice in await choices(client, tools=TOOLS, tool_choice=named):
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "stop", "arguments": "{}"}


async def test_calls_or_an_answer_in_a_format(client):
    kind = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    reasons = set()
    for choice in await choices(client, tools=TOOLS, response_format=kind):
        reasons.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert reasons == {"stop", "tool_calls"}


async def test_no_blanks_but_those_of_json_dumps(client):
    for choice in await choices(client, response_format={"type": "json_object"}, max_tokens=60):
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            json.loads(text)
