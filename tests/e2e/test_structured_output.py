"""Answers in a form that was asked for, from models whose weights are random: the grammar alone makes the form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
from running_server import GOLDEN, Server, engine, serve
from tool_templates import TEMPLATE, tool

#: Finite, so that it ends whatever the model is like.
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blüe"]},
        "sure": {"type": "boolean"},
        "marks": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 2},
    },
    "required": ["colour", "sure", "marks"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "hello"}]


def body(**fields) -> dict:
    return {"model": "qwen", "messages": MESSAGES, "temperature": 1, "seed": 1, **fields}


def post(server: Server, path: str, content: dict) -> dict:
    response = server.client.post(path, json=content)
    assert response.status_code == 200, response.text
    return response.json()


def streamed_text(server: Server, content: dict) -> str:
    text = ""
    with server.client.stream("POST", "/v1/chat/completions", json=content | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    return text


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_a_schema_is_kept(server: Server, temperature: float) -> None:
    content = body(response_format=FORMAT, temperature=temperature, n=4)
    for choice in post(server, "/v1/chat/completions", content)["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_a_stream_is_the_whole(server: Server) -> None:
    content = body(response_format=FORMAT)
    whole = post(server, "/v1/chat/completions", content)["choices"][0]["message"]["content"]
    assert streamed_text(server, content) == whole
    jsonschema.validate(json.loads(whole), SCHEMA)


def test_a_json_object_begins_as_one_and_is_cut_by_the_limit(server: Server) -> None:
    (choice,) = post(
        server, "/v1/chat/completions", body(response_format={"type": "json_object"}, max_tokens=8)
    )["choices"]
    assert choice["message"]["content"].startswith("{")
    assert choice["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    ("constraint", "allowed"),
    [
        ({"choice": ["yes", "no", "öfter"]}, {"yes", "no", "öfter"}),
        ({"regex": "a{3}b|c/d"}, {"aaab", "c/d"}),
        ({"grammar": 'start: "x" y\ny: "1" | "2"'}, {"x1", "x2"}),
        ({"json": {"type": "boolean"}}, {"true", "false"}),
    ],
)
def test_other_constraints(server: Server, constraint: dict, allowed: set[str]) -> None:
    content = {"model": "qwen", "prompt": "hello", "temperature": 1, "n": 4, "structured_outputs": constraint}
    for choice in post(server, "/v1/completions", content)["choices"]:
        assert choice["text"] in allowed
        assert choice["finish_reason"] == "stop"


def test_the_responses_api(server: Server) -> None:
    text = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    answer = post(server, "/v1/responses", {"model": "qwen", "input": "hello", "text": text})
    assert answer["status"] == "completed"
    jsonschema.validate(json.loads(answer["output"][0]["content"][0]["text"]), SCHEMA)


@pytest.mark.parametrize("model", ["llada", "words"])
def test_block_diffusion_models_refuse_it_by_name(server: Server, model: str) -> None:
    response = server.client.post("/v1/chat/completions", json=body(model=model, response_format=FORMAT))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"


def test_refused_schemas_do_not_reach_the_engine(server: Server) -> None:
    for schema in ({"not": {}}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}):
        broken = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        response = server.client.post("/v1/chat/completions", json=body(response_format=broken))
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("response_format.json_schema.schema")
    test_a_stream_is_the_whole(server)


def test_tool_calls_that_are_required(own_backend: str, tmp_path: Path) -> None:
    """A copy of the checkpoint with a template that knows tools."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / "qwen3_dense_untied", directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tools = [tool("paint", colour=SCHEMA["properties"]["colour"]), tool("stop")]
    models = [{"name": "qwen", "path": str(directory), "engine": engine(own_backend)}]
    with serve({"models": models}, tmp_path) as server:
        content = body(tools=tools, tool_choice="required", parallel_tool_calls=False, n=4)
        for choice in post(server, "/v1/chat/completions", content)["choices"]:
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] is None
            (call,) = choice["message"]["tool_calls"]
            schemas = {item["function"]["name"]: item["function"]["parameters"] for item in tools}
            jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
        named = content | {"tool_choice": {"type": "function", "function": {"name": "stop"}}, "n": 1}
        (choice,) = post(server, "/v1/chat/completions", named)["choices"]
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "stop", "arguments": "{}"}
