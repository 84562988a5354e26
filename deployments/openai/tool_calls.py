"""Tool calls in the text of a model, as it comes: ``<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>``.

All decisions depend on the text alone and not on the pieces in which it arrives, so a stream holds what the whole
response holds.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

from deployments.openai.tools import ToolPlan

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _END_THINK = "<think>", "</think>"
_OPENING = re.compile(f"{_OPEN}|{_THINK}")
#: The next thing outside of a JSON string, inside of one, and inside of arguments, that matters.
_OUTSIDE = re.compile(f'"|{_CLOSE}')
_INSIDE = re.compile(r'["\\\x00-\x1f]')
_NESTING = re.compile(r'["{}\[\]]')
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Content:
    """Text that the client sees as such."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The call number ``index`` of an answer; ``call_id`` is ours."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments (JSON text)."""

    index: int
    text: str


Event = Content | CallStart | CallArguments


class ToolCallParser:
    """Splits one choice's text into content and calls of the plan's tools.

    What is no call of a known tool (malformed JSON, arguments that are no object, an unknown name, a call cut off
    by a limit) stays content, as it was written; so calls are held back until they are complete. Where a grammar
    forces them they cannot be malformed, and their arguments go out as they come: there a limit may cut the last
    call's short. Blank text beside a call is dropped. Calls inside of ``<think>`` are thoughts.
    """

    def __init__(self, plan: ToolPlan) -> None:
        self._names = plan.names
        self._forced = plan.forced
        self._parallel = plan.parallel
        self._state = self._content
        self._buffer = ""  # text not dealt with yet; in a call: all of it
        self._gap = ""  # blank text before a call
        self._position = 0  # in the buffer: how far a call was looked at
        self._in_string = False
        self._depth = 0
        self._after_call = False
        self._events: list[Event] = []
        self.num_calls = 0

    @property
    def is_inside_call(self) -> bool:
        """Whether the last call has begun and its arguments have not ended."""
        return self._state == self._arguments

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        while self._state():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """What was held back; nothing may be fed after."""
        if self._state == self._call:
            if (call := self._parse(self._buffer)) is not None:
                self._emit_call(*call)
            else:
                self._emit(self._gap + _OPEN + self._buffer)
        elif self._state in (self._content, self._thought):
            self._emit(self._buffer)
        self._buffer = ""
        return self._take()

    # States: each deals with a piece of the buffer, and says whether another one may go on.

    def _content(self) -> bool:
        match = _OPENING.search(self._buffer)
        if match is None:
            cut = len(self._buffer) - _partial(self._buffer, _OPEN, _THINK)
            cut = len(self._buffer[:cut].rstrip())
            self._emit(self._buffer[:cut])
            self._buffer = self._buffer[cut:]
            return False
        if match.group() == _THINK:
            self._emit(self._buffer[: match.end()])
            self._state = self._thought
        else:
            before = self._buffer[: match.start()]
            shown = before.rstrip()
            self._emit(shown)
            self._gap = before[len(shown) :]
            self._position, self._in_string = 0, False
            self._state = self._call
        self._buffer = self._buffer[match.end() :]
        return True

    def _thought(self) -> bool:
        before, found, after = self._buffer.partition(_END_THINK)
        if not found:
            cut = len(before) - _partial(before, _END_THINK)
            self._emit(before[:cut])
            self._buffer = before[cut:]
            return False
        self._emit(before + found)
        self._buffer, self._state = after, self._content
        return True

    def _call(self) -> bool:
        if self._position == 0 and not self._buffer.lstrip().startswith("{"):
            return bool(self._buffer.strip()) and self._give_up(0)
        if self._forced and (match := _HEADER.match(self._buffer)) and match.group(1) in self._names:
            self._start_call(match.group(1))
            self._buffer, self._position = self._buffer[match.end() :], 0
            self._in_string, self._depth = False, 0
            self._state = self._arguments
            return True
        match = (_INSIDE if self._in_string else _OUTSIDE).search(self._buffer, self._position)
        if match is None:
            keep = 0 if self._in_string else len(_CLOSE) - 1
            self._position = max(self._position, len(self._buffer) - keep)
            return False
        if match.group() == _CLOSE:
            if (call := self._parse(self._buffer[: match.start()])) is None:
                return self._give_up(match.end())
            self._emit_call(*call)
            self._buffer, self._state = self._buffer[match.end() :], self._next_state()
            return True
        return self._step_over(match)

    def _arguments(self) -> bool:
        """Of a call that a grammar forces: its arguments go out as far as they are there."""
        match = (_INSIDE if self._in_string else _NESTING).search(self._buffer, self._position)
        if match is None:
            self._position = len(self._buffer)
        elif match.group() in "{[":
            self._depth, self._position = self._depth + 1, match.end()
            return True
        elif match.group() in "}]":
            self._depth, self._position = self._depth - 1, match.end()
            if self._depth > 0:
                return True
            self._state = self._rest_of_call
        elif self._step_over(match):
            return True
        shown = self._buffer[: self._position]
        self._buffer, self._position = self._buffer[self._position :], 0
        if shown:
            self._events.append(CallArguments(self.num_calls - 1, shown))
        return self._state != self._arguments

    def _rest_of_call(self) -> bool:
        _, found, after = self._buffer.partition(_CLOSE)
        if found:
            self._buffer, self._state = after, self._next_state()
        return bool(found)

    def _ignored(self) -> bool:
        """After the one call of an answer that may have no more."""
        self._buffer = ""
        return False

    # Parts of them

    def _next_state(self) -> Any:
        return self._content if self._parallel else self._ignored

    def _step_over(self, match: re.Match[str]) -> bool:
        """Goes on behind a quote, an escape, or a control character, which a JSON string cannot hold. False
        when an escape is not complete."""
        if match.group() == '"':
            self._in_string = not self._in_string
            self._position = match.end()
        elif match.group() == "\\":
            self._position = match.start()
            if match.end() == len(self._buffer):
                return False
            self._position = match.end() + 1
        elif self._state == self._call:
            return self._give_up(match.end())
        else:
            self._position = match.end()
        return True

    def _give_up(self, end: int) -> bool:
        """It was no call: the text up to ``end`` is content."""
        self._emit(self._gap + _OPEN + self._buffer[:end])
        self._buffer, self._state = self._buffer[end:], self._content
        return True

    def _parse(self, text: str) -> tuple[str, str] | None:
        """Name and arguments (JSON text) of a complete call."""
        try:
            call = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return None
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = call.get("arguments")
        if arguments is None:
            return name, "{}"
        if not isinstance(arguments, dict):
            return None
        if match := _HEADER.match(text):  # as the model wrote them, where that is all that there is
            _, end = _DECODER.raw_decode(text, match.end())
            if text[end:].strip() == "}":
                return name, text[match.end() : end]
        try:
            return name, json.dumps(arguments, allow_nan=False)
        except ValueError:
            return None

    def _emit_call(self, name: str, arguments: str) -> None:
        self._start_call(name)
        self._events.append(CallArguments(self.num_calls - 1, arguments))

    def _start_call(self, name: str) -> None:
        self._events.append(CallStart(self.num_calls, f"call_{uuid.uuid4().hex}", name))
        self.num_calls += 1
        self._after_call = True

    def _emit(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            self._events.append(Content(text))

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _partial(text: str, *markers: str) -> int:
    """The length of the longest end of ``text`` with which one of ``markers`` may begin."""
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
