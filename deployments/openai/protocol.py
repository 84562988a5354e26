"""Request bodies of the OpenAI API and of its usual extensions, strictly typed and bounded.

Null means absent. Unknown keys are accepted and logged at debug level, as every peer does. Types are strict:
``"2"`` is no number and ``1.5`` no integer. What is valid here but cannot be honoured by a model is refused
by name in ``translate``.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, cast

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from deployments.openai.formats import ResponseFormat, StructuredOutputs
from deployments.openai.model import RequestModel, check_unicode
from deployments.openai.tools import TOOL_CHOICE_SCHEMA, Tools, parse_tool_choice

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIASES = 1024
_TEXT = ResponseFormat(type="text")
# For /openapi.json: what validators below accept beside the form that is kept.
_PART = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
_TEXT_OR_PARTS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _PART]}, "minItems": 1},
    ]
}
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STOP = {"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOP_STRINGS}]}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        _TOKEN_IDS,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _TOKEN_IDS]}, "minItems": 1},
    ]
}
ROLES = ("developer", "system", "user", "assistant", "tool", "function")

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class ChatMessage(RequestModel):
    """One message of the history. ``content`` is text (text parts are joined by newlines) or None, which only
    an assistant's message with tool calls may have."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Annotated[str | None, WithJsonSchema(_TEXT_OR_PARTS)] = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_of_parts(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of text parts")
        if not value:
            raise ValueError("must hold at least one part")
        texts = []
        for i, part in enumerate(value):
            if isinstance(part, str):
                texts.append(part)
                continue
            if not isinstance(part, dict):
                raise ValueError(f"part {i} must be an object with `type` and `text`")
            kind = part.get("type")
            if kind not in ("text", "refusal"):
                raise ValueError(f"part {i} has the type {_short(kind)}; only text parts are supported")
            if not isinstance(part.get(kind), str):
                raise ValueError(f"part {i}: `{kind}` must be a string")
            texts.append(part[kind])
        return "\n".join(texts)

    @model_validator(mode="after")
    def _complete(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"`content` is required in a message of role {self.role!r}")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("`tool_call_id` is required in a message of role 'tool'")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: text content, tool arguments as objects."""
        role = "system" if self.role == "developer" else "tool" if self.role == "function" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        if self.tool_calls:
            message["tool_calls"] = [_with_parsed_arguments(call) for call in self.tool_calls]
        for key in ("name", "tool_call_id"):
            if (value := getattr(self, key)) is not None:
                message[key] = value
        if isinstance(reasoning := (self.model_extra or {}).get("reasoning_content"), str):
            message["reasoning_content"] = reasoning
        return message


class GenerationBody(RequestModel):
    """What chat and text completions share. None is "not given": the model's default counts."""

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[Int64, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    stop: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS), WithJsonSchema(_STOP)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIASES)
    ] = {}
    response_format: ResponseFormat | None = None
    user: str | None = None

    # Extensions that vLLM and its peers share.
    top_k: Annotated[Int64, Field(ge=-1)] | None = None
    min_tokens: Annotated[Int64, Field(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Int64], Field(max_length=256)] = []
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    structured_outputs: StructuredOutputs | None = None

    # Block diffusion only.
    block_length: Annotated[Int64, Field(ge=1)] | None = None
    steps: Annotated[Int64, Field(ge=1)] | None = None
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    editing_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    max_post_steps: Annotated[int, Field(ge=0, le=1024)] | None = None
    eos_early_stop: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _usable(cls, value: list[str]) -> list[str]:
        for text in value:
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise ValueError(f"each stop string must have 1 to {MAX_STOP_LENGTH} characters")
        return value

    @model_validator(mode="after")
    def _one_output_format(self) -> GenerationBody:
        if self.structured_outputs is not None and (self.response_format or _TEXT).type != "text":
            raise ValueError("`structured_outputs` cannot be combined with `response_format`")
        return self

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` is only allowed with `stream: true`")
        return self

    @property
    def new_token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def new_token_field(self) -> str:
        """The field that ``new_token_limit`` comes from, or would."""
        return "max_tokens"

    @property
    def num_choices(self) -> int:
        """Over all prompts."""
        return self.n

    @property
    def num_top_logprobs(self) -> int | None:
        """None is no logprobs at all; 0 those of the chosen tokens only."""
        return None


class ChatCompletionRequest(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=65536)]
    max_completion_tokens: Annotated[Int64, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools = []
    #: None, "none", "auto", "required" or a ``NamedToolChoice``.
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool = True
    functions: list[dict[str, Any]] = []
    function_call: Any = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("tool_choice", mode="plain")
    @classmethod
    def _known_tool_choice(cls, value: Any) -> Any:
        return parse_tool_choice(value)

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`top_logprobs` is only allowed with `logprobs: true`")
        return self

    @property
    def new_token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def new_token_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationBody):
    """``prompt`` is kept as a list of prompts, each a text or a list of token ids."""

    prompt: Annotated[list[str | list[int]], WithJsonSchema(_PROMPT)]
    best_of: Annotated[int, Field(ge=0, le=MAX_CHOICES)] | None = None
    echo: bool = False
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _list_of_prompts(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise ValueError("must be a string, or a list of strings, of token ids or of lists of token ids")
        if _is_token_id(value[0]):
            return [_token_ids(value, "")]
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"may hold at most {MAX_PROMPTS} prompts, got {len(value)}")
        for i, prompt in enumerate(value):
            if isinstance(prompt, list):
                _token_ids(prompt, f" of prompt {i}")
            elif not isinstance(prompt, str):
                raise ValueError(f"item {i} must be a string or a list of token ids")
        return value

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompt)


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(value: list[Any], where: str) -> list[int]:
    if not value:
        raise ValueError(f"the list{where} must hold at least one token id")
    for i, item in enumerate(value):
        if not _is_token_id(item) or not -(2**63) <= item < 2**63:
            raise ValueError(f"item {i}{where} must be an integer token id, got {_short(item)}")
    return cast("list[int]", value)


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Templates iterate over or dump ``arguments``; malformed ones stay the text that they are."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
        check_unicode(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
