"""What a model with sense would answer to a suite's questions, by rules, and a transport that writes both down.

Used inside of the clients' environment; ``tool_model.fit`` teaches the sheet to a model, which is then served.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx

QUOTED = re.compile(r"'([^']+)'")
NUMBER = re.compile(r"\d+")


def answer_to(body: dict[str, Any]) -> dict[str, Any]:
    """The message for the body of a chat request.

    A tool is called until it has answered; arguments and JSON are what their schema says, with the number and the
    quoted text of the question. An object without a schema has the keys that the question has in quotes.
    """
    question = text_of(body["messages"][-1])
    wanted = body.get("response_format", {})
    if body.get("tools") and body["messages"][-1]["role"] == "user":
        functions = {tool["function"]["name"]: tool["function"] for tool in body["tools"]}
        choice = body.get("tool_choice")
        named = choice["function"]["name"] if isinstance(choice, dict) else next(iter(functions))
        arguments = json.dumps(_value(functions[named]["parameters"], question), ensure_ascii=False)
        call = {"id": "call_0", "type": "function", "function": {"name": named, "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call | {"index": 0}]}
    if wanted.get("type") == "json_schema":
        content = json.dumps(_value(wanted["json_schema"]["schema"], question), ensure_ascii=False)
    elif wanted.get("type") == "json_object":
        content = json.dumps(dict.fromkeys(QUOTED.findall(question), "why"))
    else:
        content = "It is done."
    return {"role": "assistant", "content": content}


def text_of(message: dict[str, Any]) -> str:
    """A message's text, content parts joined; empty when it has none."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _value(schema: dict[str, Any], question: str) -> Any:
    kind = schema.get("type") or schema["anyOf"][0]["type"]
    if kind == "object":
        return {name: _value(part, question) for name, part in schema.get("properties", {}).items()}
    if kind == "integer":
        return int((NUMBER.findall(question) or ["3"])[0])
    assert kind == "string", schema
    return (QUOTED.findall(question) or ["why"])[0]


class Recorder(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers by the rules instead of a server, and appends ``{"body", "message"}`` to a file of JSON lines."""

    def __init__(self, sheet: Path) -> None:
        self.sheet = sheet

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._answer(json.loads(request.read()))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self._answer(json.loads(await request.aread()))

    def _answer(self, body: dict[str, Any]) -> httpx.Response:
        message = answer_to(body)
        with self.sheet.open("a") as lines:
            lines.write(json.dumps({"body": body, "message": message}) + "\n")
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        head = {"id": "chatcmpl-0", "created": 0, "model": body["model"]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            whole = head | {"object": "chat.completion", "choices": [choice], "usage": usage}
            return httpx.Response(200, json=whole)
        choice = {"index": 0, "delta": message, "finish_reason": reason}
        kind = {"object": "chat.completion.chunk"}
        chunks = [head | kind | {"choices": [choice]}, head | kind | {"choices": [], "usage": usage}]
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=events)
