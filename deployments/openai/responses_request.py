"""The body of ``POST /v1/responses``, and the chat request that it stands for.

Stateless: nothing is stored, so whatever refers to an earlier response is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, WithJsonSchema, field_validator

from deployments.openai.contracts import ModelEntry
from deployments.openai.errors import from_validation
from deployments.openai.formats import Name, ResponseFormat
from deployments.openai.model import RequestModel
from deployments.openai.protocol import ChatCompletionRequest, Int64, StreamOptions
from deployments.openai.tools import MAX_TOOLS
from deployments.openai.translate import UNSUPPORTED_EXTRAS, TranslatedRequest, translate_chat
from replicas.errors import InvalidRequestError, UnsupportedParameterError

#: What responses and chat completions call by the same name, extensions among them.
_SAME = (
    "model", "temperature", "top_p", "stream", "stream_options", "parallel_tool_calls", "top_k", "min_p", "seed",
    "min_tokens", "ignore_eos", "stop", "stop_token_ids", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", "structured_outputs", "chat_template_kwargs", "block_length", "steps", "threshold",
    "editing_threshold", "max_post_steps", "eos_early_stop", *UNSUPPORTED_EXTRAS,
)  # fmt: skip
#: Of a chat request's field names to this one's, longest first.
_FIELDS = (
    (re.compile(r"^tools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^max_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"^messages\b.*"), "input"),
    (re.compile(r"^(top_)?logprobs\b"), "include"),
)
_LOGPROBS = "message.output_text.logprobs"
_UNSUPPORTED = ("previous_response_id", "conversation", "prompt", "context_management")


_TEXT_OR_ITEMS = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]
}


class FunctionTool(RequestModel):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    definition: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(RequestModel):
    format: TextFormat = TextFormat()


class ResponsesRequest(RequestModel):
    model: Annotated[str, Field(min_length=1)]
    input: Annotated[
        list[dict[str, Any]], Field(min_length=1, max_length=65536), WithJsonSchema(_TEXT_OR_ITEMS)
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[Int64, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
        Field(max_length=16),
    ] = {}
    store: bool = True
    background: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"
    include: list[str] = []
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    user: str | None = None

    @property
    def num_choices(self) -> int:
        return 1

    @field_validator("input", mode="before")
    @classmethod
    def _text_is_a_message(cls, value: Any) -> Any:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value


@dataclass(frozen=True)
class TranslatedResponsesRequest(TranslatedRequest):
    """``body``: what a response repeats of its request."""

    body: ResponsesRequest | None = None


async def translate_responses(
    body: ResponsesRequest, entry: ModelEntry, *, deadline: float | None = None
) -> TranslatedResponsesRequest:
    """Raises ``InvalidRequestError`` and its subclasses; every message names the field of ``body`` at fault."""
    _refuse_unsupported(body)
    fields = _chat_fields(body)
    try:
        chat = ChatCompletionRequest.model_validate(fields)
        translated = await translate_chat(chat, entry, deadline=deadline)
    except ValidationError as error:
        raise _renamed(from_validation(error)) from None
    except InvalidRequestError as error:
        raise _renamed(error) from None
    own = {"new_token_field": "max_output_tokens", "grammar_param": _own_name(translated.grammar_param or "")}
    return TranslatedResponsesRequest(**vars(translated) | own, body=body)


def _refuse_unsupported(body: ResponsesRequest) -> None:
    extras = body.model_extra or {}
    for name in _UNSUPPORTED:
        if extras.get(name) is not None:
            raise UnsupportedParameterError(f"`{name}` is not supported: no response is stored", param=name)
    if body.background:
        raise UnsupportedParameterError("`background` is not supported", param="background")
    if body.truncation != "disabled":
        raise UnsupportedParameterError("`truncation` supports 'disabled' only", param="truncation")
    for i, name in enumerate(body.include):
        # Reasoning is not told apart from the text, so there is none that could be missing.
        if name not in (_LOGPROBS, "reasoning.encrypted_content"):
            param = f"include[{i}]"
            raise UnsupportedParameterError(f"`{param}`: {name[:80]!a} is not supported", param=param)


def _chat_fields(body: ResponsesRequest) -> dict[str, Any]:
    extras = body.model_extra or {}
    fields: dict[str, Any] = {"messages": list(_messages(body))}
    for name in _SAME:
        value = getattr(body, name) if name in type(body).model_fields else extras.get(name)
        if value is not None:
            fields[name] = value
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if _LOGPROBS in body.include:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        fields["tools"] = [_chat_tool(tool) for tool in body.tools]
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    fields["tool_choice"] = choice
    given = body.text.format
    if given.type == "json_schema":
        schema = {"name": given.name, "schema": given.definition, "description": given.description}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif given.type != "text":
        fields["response_format"] = ResponseFormat(type=given.type)
    return fields


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_unset=True)
    return {"type": "function", "function": function}


def _messages(body: ResponsesRequest) -> Iterator[dict[str, Any]]:
    """Chat messages of the input items; calls belong to the assistant's message before them."""
    if body.instructions is not None:
        yield {"role": "system", "content": body.instructions}
    assistant: dict[str, Any] | None = None
    for i, item in enumerate(body.input):
        where = f"input[{i}]"
        kind = "message" if item.get("type") is None else item["type"]
        if kind == "message":
            if assistant is not None:
                yield assistant
                assistant = None
            message = _message(item, where)
            if message["role"] == "assistant":
                assistant = message
            else:
                yield message
        elif kind == "function_call":
            assistant = assistant or {"role": "assistant", "content": None}
            function = {key: _text(item, key, where) for key in ("name", "arguments")}
            call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
            assistant.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            if assistant is not None:
                yield assistant
                assistant = None
            content = _content(item.get("output"), f"{where}.output")
            yield {"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content}
        else:
            raise UnsupportedParameterError(
                f"`{where}.type` must be 'message', 'function_call' or 'function_call_output', got "
                f"{str(kind)[:64]!a}",
                param=f"{where}.type",
            )
    if assistant is not None:
        yield assistant


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequestError(
            f"`{where}.role` must be 'user', 'assistant', 'system' or 'developer', got {str(role)[:64]!a}",
            param=f"{where}.role",
        )
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"`{where}` must be a string or a list of text parts", param=where)
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal"):
            param = f"{where}[{i}].type"
            raise UnsupportedParameterError(
                f"`{param}` must be 'input_text' or 'output_text', got {str(kind)[:64]!a}", param=param
            )
        texts.append(_text(part, "refusal" if kind == "refusal" else "text", f"{where}[{i}]"))
    return "\n".join(texts)


def _text(item: dict[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidRequestError(f"`{where}.{key}` must be a string", param=f"{where}.{key}")
    return value


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    """The error under the name that the field has in this API."""
    name = error.param or ""
    new = _own_name(name)
    if new == name:
        return error
    return type(error)(error.message.replace(f"`{name}`", f"`{new}`"), param=new, code=error.code)


def _own_name(name: str) -> str:
    """This API's name for a field of a chat request."""
    for pattern, replacement in _FIELDS:
        new, found = pattern.subn(replacement, name)
        if found:
            return new
    return name
