"""Checks bytes from the wire against the public OpenAPI document, and against the order that streams keep."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import jsonschema

DOCUMENT = json.loads((Path(__file__).parents[1] / "data/openai/openai_subset.json").read_text())

Kind = Literal["chat", "completion"]
PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
WHOLE: dict[Kind, str] = {"chat": "CreateChatCompletionResponse", "completion": "CreateCompletionResponse"}
PART: dict[Kind, str] = {
    "chat": "CreateChatCompletionStreamResponse",
    "completion": "CreateCompletionResponse",
}


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    return jsonschema.Draft202012Validator(schema)


def check(name: str, value: Any) -> None:
    """Raises ``jsonschema.ValidationError`` unless ``value`` is what the document's schema ``name`` says."""
    _validator(name).validate(value)


def check_error(value: Any) -> dict[str, Any]:
    """The ``error`` of an error body: all four keys are there, and nothing beside."""
    check("ErrorResponse", value)
    assert set(value) == {"error"}
    assert set(value["error"]) == {"message", "type", "param", "code"}
    assert value["error"]["message"]
    return value["error"]


def check_whole(kind: Kind, value: dict[str, Any]) -> None:
    """One whole response: the schema, and that choices are numbered in order and usage adds up."""
    check(WHOLE[kind], value)
    assert [choice["index"] for choice in value["choices"]] == list(range(len(value["choices"])))
    usage = value["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def check_part(kind: Kind, value: dict[str, Any]) -> None:
    """One chunk. The document gives chunks of text completions no null finish reason, though the API sends it."""
    if kind == "completion":
        choices = [c | {"finish_reason": c["finish_reason"] or "stop"} for c in value["choices"]]
        value = value | {"choices": choices}
    check(PART[kind], value)


def events(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of each event of a stream that ended well; checks framing and the end."""
    text = raw.decode("utf-8")
    assert text.endswith("data: [DONE]\n\n"), text[-200:]
    frames = text.removesuffix("data: [DONE]\n\n").split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        assert frame.startswith("data: "), frame[:200]
        assert "\n" not in frame, frame[:200]
        found.append(json.loads(frame.removeprefix("data: ")))
    return found


def check_stream(kind: Kind, chunks: Iterable[dict[str, Any]], *, n: int, usage: bool) -> list[str]:
    """All chunks of one response; ``usage``: a last chunk with the usage was asked for. The texts by choice."""
    chunks = list(chunks)
    for chunk in chunks:
        check_part(kind, chunk)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        counts = last["usage"]
        assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    by_choice: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for chunk in chunks:
        assert len(chunk["choices"]) == 1
        by_choice[chunk["choices"][0]["index"]].append(chunk["choices"][0])
    assert sorted(by_choice) == list(range(n))
    return [_check_choice(kind, by_choice[index]) for index in range(n)]


def _check_choice(kind: Kind, parts: list[dict[str, Any]]) -> str:
    *before, finish = (part["finish_reason"] for part in parts)
    assert finish
    assert not any(before)
    if kind == "completion":
        return "".join(part["text"] for part in parts)
    first, *others = (part["delta"] for part in parts)
    assert (first["role"], first["content"]) == ("assistant", "")
    assert not any(delta.get("role") for delta in others)
    assert others[-1] == {}
    return "".join(delta.get("content") or "" for delta in (first, *others))
