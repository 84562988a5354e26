"""Response bodies and stream chunks of chat and text completions, as plain objects ready for JSON."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from deployments.openai.contracts import ModelEntry
from deployments.openai.detokenize import TokenTable
from deployments.openai.errors import error_body
from deployments.openai.framing import DONE, frame
from deployments.openai.generation import Choice, ChoiceDelta
from deployments.openai.protocol import StreamOptions
from deployments.openai.tool_calls import CallArguments, CallStart, Content, Event, ToolCallParser
from deployments.openai.translate import TranslatedRequest
from replicas.errors import BlockserveError
from replicas.protocol import TokenLogprob

Json = dict[str, Any]


class ResponseBuilder:
    """Builds one response, whole or in chunks: one id and one time for all of its parts.

    Feed it every delta. A whole response joins the texts of the deltas, so it cannot differ from a stream.
    """

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def __init__(self, entry: ModelEntry, translated: TranslatedRequest, choices: list[Choice]) -> None:
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = entry.name
        self._table: TokenTable = entry.token_table
        self._translated = translated
        self._choices = choices
        self._logprobs_wanted = translated.requests[0].sampling.logprobs is not None
        self._texts: list[list[str]] = [[] for _ in choices]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in choices]

    # Whole responses

    def add(self, delta: ChoiceDelta) -> None:
        self._texts[delta.index].append(delta.text)
        self._logprobs[delta.index] += delta.logprobs

    def response(self) -> Json:
        choices = [self._choice(choice, "".join(self._texts[choice.index])) for choice in self._choices]
        return self._envelope(self.object_name, choices) | {"usage": self.usage()}

    # Streams

    def first_chunks(self) -> Iterator[Json]:
        """What comes before the first delta."""
        raise NotImplementedError

    def chunks(self, delta: ChoiceDelta) -> Iterator[Json]:
        """Chunks of one delta: none while its text is held back."""
        raise NotImplementedError

    def encode(self, chunk: Json, options: StreamOptions) -> bytes:
        """A chunk as an event."""
        if options.continuous_usage_stats:
            chunk["usage"] = self.usage()
        return frame(chunk)

    def end(self, options: StreamOptions) -> bytes:
        """What comes after the last delta."""
        if not options.include_usage:
            return DONE
        return frame(self._envelope(self.chunk_object_name, []) | {"usage": self.usage()}) + DONE

    def failure(self, error: BlockserveError) -> bytes:
        """What ends a stream that failed."""
        return frame(error_body(error))

    def usage(self) -> Json:
        """Tokens so far. ``num_forwards`` (an extension) counts the forwards in which a choice had a token to
        decide: completion_tokens / num_forwards is the committed tokens per forward of block diffusion."""
        completion = sum(choice.num_tokens for choice in self._choices)
        prompt = self._translated.num_prompt_tokens
        per_prompt = max(1, len(self._choices) // max(1, self._translated.num_prompts))
        cached = sum(choice.num_cached_tokens for choice in self._choices[::per_prompt])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "num_forwards": sum(choice.num_forwards for choice in self._choices),
        }

    def _envelope(self, object_name: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _chunk(self, choice: Json) -> Json:
        return self._envelope(self.chunk_object_name, [choice])

    def _choice(self, choice: Choice, text: str) -> Json:
        raise NotImplementedError

    def _take_logprobs(self, index: int) -> Json | None:
        if not self._logprobs_wanted:
            return None
        taken, self._logprobs[index] = self._logprobs[index], []
        return self._format_logprobs(taken)

    def _format_logprobs(self, logprobs: list[TokenLogprob]) -> Json:
        raise NotImplementedError

    def _token_text(self, token_id: int) -> str:
        return self._table.piece(token_id).decode("utf-8", "replace")


class ChatResponseBuilder(ResponseBuilder):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, entry: ModelEntry, translated: TranslatedRequest, choices: list[Choice]) -> None:
        super().__init__(entry, translated, choices)
        self._parsers = [ToolCallParser(translated.tools) for _ in choices] if translated.tools else None
        self._calls: list[list[Json]] = [[] for _ in choices]

    def add(self, delta: ChoiceDelta) -> None:
        self._logprobs[delta.index] += delta.logprobs
        calls = self._calls[delta.index]
        for event in self._events(delta):
            if isinstance(event, Content):
                self._texts[delta.index].append(event.text)
            elif isinstance(event, CallStart):
                calls.append(_call(event))
            else:
                calls[event.index]["function"]["arguments"] += event.text

    def first_chunks(self) -> Iterator[Json]:
        for choice in self._choices:
            delta = {"role": "assistant", "content": ""}
            yield self._chunk(self._delta(choice.index, delta, None, None))

    def chunks(self, delta: ChoiceDelta) -> Iterator[Json]:
        self._logprobs[delta.index] += delta.logprobs
        for event in self._events(delta):
            # Tokens are reported once, with the first text that they make certain.
            logprobs = self._take_logprobs(delta.index)
            yield self._chunk(self._delta(delta.index, _delta_of(event), logprobs, None))
        if delta.finish_reason is not None:
            rest = self._take_logprobs(delta.index) if self._logprobs[delta.index] else None
            yield self._chunk(self._delta(delta.index, {}, rest, self._finish_reason(delta.index)))

    def _events(self, delta: ChoiceDelta) -> list[Event]:
        if self._parsers is None:
            return [Content(delta.text)] if delta.text else []
        parser = self._parsers[delta.index]
        events = parser.feed(delta.text)
        return events if delta.finish_reason is None else events + parser.finish()

    def _finish_reason(self, index: int) -> str | None:
        reason = self._choices[index].finish_reason
        if self._parsers is None or reason != "stop":
            return reason
        parser = self._parsers[index]
        # A stop string inside of a call leaves arguments that are no JSON: that is not a call to run.
        return "tool_calls" if parser.num_calls and not parser.is_inside_call else reason

    @staticmethod
    def _delta(index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _choice(self, choice: Choice, text: str) -> Json:
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls := self._calls[choice.index]:
            message |= {"content": text or None, "tool_calls": calls}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._take_logprobs(choice.index),
            "finish_reason": self._finish_reason(choice.index),
        }

    def _format_logprobs(self, logprobs: list[TokenLogprob]) -> Json:
        content = [
            self._entry(item.token_id, item.logprob)
            | {"top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in item.top]}
            for item in logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._token_text(token_id),
            "logprob": max(logprob, -9999.0),
            "bytes": list(self._table.piece(token_id)),
        }


def _call(event: CallStart) -> Json:
    function = {"name": event.name, "arguments": ""}
    return {"id": event.call_id, "type": "function", "function": function}


def _delta_of(event: Event) -> Json:
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return {"tool_calls": [{"index": event.index} | _call(event)]}


class CompletionResponseBuilder(ResponseBuilder):
    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, entry: ModelEntry, translated: TranslatedRequest, choices: list[Choice]) -> None:
        super().__init__(entry, translated, choices)
        self._offsets = [len(text) for text in translated.echo_texts]

    def first_chunks(self) -> Iterator[Json]:
        for choice, text in zip(self._choices, self._translated.echo_texts, strict=True):
            if text:
                yield self._chunk(self._text(choice.index, text, None, None))

    def chunks(self, delta: ChoiceDelta) -> Iterator[Json]:
        self._logprobs[delta.index] += delta.logprobs
        if delta.text or delta.finish_reason is not None:
            logprobs = self._take_logprobs(delta.index)
            yield self._chunk(self._text(delta.index, delta.text, logprobs, delta.finish_reason))

    @staticmethod
    def _text(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _choice(self, choice: Choice, text: str) -> Json:
        text = self._translated.echo_texts[choice.index] + text
        return self._text(choice.index, text, self._take_logprobs(choice.index), choice.finish_reason)

    def _take_logprobs(self, index: int) -> Json | None:
        formatted = super()._take_logprobs(index)
        if formatted is not None:
            for token in formatted["tokens"]:
                formatted["text_offset"].append(self._offsets[index])
                self._offsets[index] += len(token)
        return formatted

    def _format_logprobs(self, logprobs: list[TokenLogprob]) -> Json:
        top = [{self._token_text(i): max(p, -9999.0) for i, p in item.top} for item in logprobs]
        return {
            "text_offset": [],
            "tokens": [self._token_text(item.token_id) for item in logprobs],
            "token_logprobs": [max(item.logprob, -9999.0) for item in logprobs],
            "top_logprobs": top,
        }


def model_object(entry: ModelEntry) -> Json:
    """An item of ``/v1/models``; ``max_model_len`` and ``block_length`` are extensions."""
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created,
        "owned_by": "blockserve",
        "max_model_len": entry.capabilities.max_model_len,
        "block_length": entry.capabilities.block_length,
    }
