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


def answer_to(body: dict[str, Any]) -> dict[str, Any]:
    """The message for the body of a chat request. A tool is called until it has answered, with what the question
    has in quotes; an object has the keys that the question has in quotes."""
    last = body["messages"][-1]
    text = last["content"] if isinstance(last["content"], str) else ""
    quoted = QUOTED.findall(text)
    if body.get("tools") and last["role"] == "user":
        function = body["tools"][0]["function"]
        wanted = function["parameters"]["properties"]
        arguments = dict.fromkeys(wanted, quoted[0] if quoted else "a pirate")
        call = {"name": function["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"role": "assistant", "content": None, "tool_calls": [_numbered(call)]}
    if body.get("response_format", {}).get("type") == "json_object":
        return {"role": "assistant", "content": json.dumps(dict.fromkeys(quoted, "why"))}
    return {"role": "assistant", "content": "It is done."}


def _numbered(function: dict[str, Any]) -> dict[str, Any]:
    return {"id": "call_0", "type": "function", "function": function, "index": 0}


class Recorder(httpx.BaseTransport):
    """Answers by the rules instead of a server, and appends ``{"body", "message"}`` to a file of JSON lines."""

    def __init__(self, sheet: Path) -> None:
        self.sheet = sheet

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.read())
        message = answer_to(body)
        with self.sheet.open("a") as lines:
            lines.write(json.dumps({"body": body, "message": message}) + "\n")
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        head = {"id": "chatcmpl-0", "created": 0, "model": body["model"]}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            return httpx.Response(200, json=head | {"object": "chat.completion", "choices": [choice]})
        choice = {"index": 0, "delta": message, "finish_reason": reason}
        chunk = head | {"object": "chat.completion.chunk", "choices": [choice]}
        events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=events)
