"""The response object of ``/v1/responses`` and the events that build it up."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from deployments.openai.contracts import ModelEntry
from deployments.openai.errors import error_body, status_of
from deployments.openai.framing import frame
from deployments.openai.generation import Choice, ChoiceDelta
from deployments.openai.protocol import StreamOptions
from deployments.openai.responses import ChatResponseBuilder, Json
from deployments.openai.responses_request import ResponsesRequest, TranslatedResponsesRequest
from deployments.openai.tool_calls import CallStart, Content
from deployments.openai.translate import TranslatedRequest
from replicas.errors import BlockserveError


class ResponsesBuilder(ChatResponseBuilder):
    """One choice, as output items: messages and function calls in the order in which the model made them.

    A whole response is what its events would have built, so it cannot differ from a stream.
    """

    id_prefix = "resp"

    def __init__(self, entry: ModelEntry, translated: TranslatedRequest, choices: list[Choice]) -> None:
        super().__init__(entry, translated, choices)
        assert isinstance(translated, TranslatedResponsesRequest)
        assert translated.body is not None
        self._body: ResponsesRequest = translated.body
        self._sampling = translated.requests[0].sampling
        self._status = "in_progress"
        self._error: Json | None = None
        self._output: list[Json] = []
        self._open: Json | None = None  # the item that is being made: the last of the output
        self._next_number = 0

    def add(self, delta: ChoiceDelta) -> None:
        for _ in self.chunks(delta):
            pass

    def response(self) -> Json:
        return self._response()

    def first_chunks(self) -> Iterator[Json]:
        yield self._event("response.created", response=self._response())
        yield self._event("response.in_progress", response=self._response())

    def chunks(self, delta: ChoiceDelta) -> Iterator[Json]:
        self._logprobs[0] += delta.logprobs
        for event in self._events(delta):
            if isinstance(event, Content):
                yield from self._text_event(event.text)
            elif isinstance(event, CallStart):
                yield from self._close("completed")
                yield from self._open_call(event)
            else:
                assert self._open is not None
                self._open["arguments"] += event.text
                yield self._item_event("response.function_call_arguments.delta", delta=event.text)
        if delta.finish_reason is not None:
            cut = delta.finish_reason == "length"
            if not self._output:
                yield from self._open_message()
            self._status = "incomplete" if cut else "completed"
            yield from self._close(self._status)
            yield self._event(f"response.{self._status}", response=self._response())

    def encode(self, chunk: Json, options: StreamOptions) -> bytes:
        return frame(chunk, chunk["type"])

    def end(self, options: StreamOptions) -> bytes:
        return b""

    def failure(self, error: BlockserveError) -> bytes:
        status = status_of(error)
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(status, "server_error")
        self._status = "failed"
        self._error = {"code": code, "message": error_body(error)["error"]["message"]}
        return self.encode(self._event("response.failed", response=self._response()), StreamOptions())

    # Output items

    def _open_message(self) -> Iterator[Json]:
        self._open = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self._output.append(self._open)
        yield self._output_event("response.output_item.added")
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._item_event("response.content_part.added", content_index=0, part=dict(part))
        self._open["content"].append(part)

    def _text_event(self, text: str) -> Iterator[Json]:
        if self._open is None or self._open["type"] != "message":
            yield from self._close("completed")
            yield from self._open_message()
        assert self._open is not None
        part = self._open["content"][0]
        logprobs = self._taken_logprobs()
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _open_call(self, event: CallStart) -> Iterator[Json]:
        self._taken_logprobs()  # those of a call have no place in a response
        self._open = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": event.call_id,
            "name": event.name,
            "arguments": "",
        }
        self._output.append(self._open)
        yield self._output_event("response.output_item.added")

    def _close(self, status: str) -> Iterator[Json]:
        item = self._open
        if item is None:
            return
        if item["type"] == "message":
            part = item["content"][0]
            part["logprobs"] += self._taken_logprobs()
            yield self._item_event(
                "response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]
            )
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            yield self._item_event(
                "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
        item["status"] = status
        yield self._output_event("response.output_item.done")
        self._open = None

    def _taken_logprobs(self) -> list[Json]:
        taken = self._take_logprobs(0)
        return [] if taken is None else taken["content"]

    # Events and the response itself

    def _event(self, kind: str, **fields: Any) -> Json:
        number, self._next_number = self._next_number, self._next_number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _output_event(self, kind: str) -> Json:
        assert self._open is not None
        item = self._open | ({"content": list(self._open["content"])} if "content" in self._open else {})
        return self._event(kind, output_index=len(self._output) - 1, item=item)

    def _item_event(self, kind: str, **fields: Any) -> Json:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self._output) - 1, **fields)

    def _response(self) -> Json:
        body, sampling = self._body, self._sampling
        finished = self._status in ("completed", "incomplete")
        text_format = body.text.format.model_dump(exclude_unset=True, by_alias=True)
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": list(self._output),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"} | text_format},
            "tool_choice": body.tool_choice or "auto",
            "tools": [self._tool(tool.model_dump(exclude_unset=True)) for tool in body.tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._responses_usage() if finished else None,
            "user": body.user,
            "metadata": body.metadata,
        }

    @staticmethod
    def _tool(given: Json) -> Json:
        return {"description": None, "parameters": None, "strict": False} | given

    def _responses_usage(self) -> Json:
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "num_forwards": usage["num_forwards"],
        }
