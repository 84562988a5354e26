"""Tools: the objects of a request body, and what a model is asked to do with them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.openai.formats import NAME_PATTERN, Name
from deployments.openai.json_schema import check_schema
from deployments.openai.model import RequestModel
from replicas.errors import InvalidRequestError

MAX_TOOLS = 128
_NAME = re.compile(NAME_PATTERN)
_USES_TOOLS = re.compile(r"\btools\b")
#: Some templates have the tags of the Hermes format, and a format of XML inside them.
_XML_CALL = "<function="


class FunctionDefinition(RequestModel):
    """``parameters`` absent means that the function has none. ``strict`` is accepted either way: arguments are held
    to their schema when a call is required, and are not otherwise."""

    name: Name
    description: Annotated[str, Field(max_length=65536)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def schema_of_arguments(self) -> dict[str, Any]:
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(RequestModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedToolChoice(RequestModel):
    """``{"type": "function", "function": {"name": ...}}``."""

    type: Literal["function"] = "function"
    function: FunctionDefinition

    @property
    def name(self) -> str:
        return self.function.name


#: For /openapi.json.
TOOL_CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "pattern": NAME_PATTERN}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
    ]
}


def parse_tool_choice(value: Any) -> str | NamedToolChoice:
    """Raises ``ValueError`` for anything but the three words and a named function."""
    if value in ("none", "auto", "required"):
        return str(value)
    if (
        isinstance(value, dict)
        and value.get("type") == "function"
        and isinstance(value.get("function"), dict)
    ):
        name = value["function"].get("name")
        if isinstance(name, str) and _NAME.fullmatch(name):
            return NamedToolChoice(function=FunctionDefinition(name=name))
    raise ValueError("must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}")


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


@dataclass(frozen=True)
class ToolPlan:
    """What a request wants of its tools. ``forced``: the answer must be calls; ``named``: of this one function.
    ``parallel``: more than one call is allowed."""

    tools: tuple[Tool, ...]
    forced: bool = False
    named: str | None = None
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools)

    def tool(self, name: str) -> Tool:
        return next(tool for tool in self.tools if tool.function.name == name)

    def parameters_param(self, tool: Tool) -> str:
        return f"tools[{self.tools.index(tool)}].function.parameters"

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them: OpenAI's objects, keys that were not given absent."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]


def plan_tools(tools: list[Tool], choice: str | NamedToolChoice | None, parallel: bool) -> ToolPlan | None:
    """None when the model is to know of no tools. Raises ``InvalidRequestError`` (the field named). Slow for
    large schemas: call it in a thread."""
    _check_tools(tools)
    named = choice.name if isinstance(choice, NamedToolChoice) else None
    if not tools:
        if named is not None or choice == "required":
            raise InvalidRequestError("`tool_choice` is only allowed with `tools`", param="tool_choice")
        return None
    if named is not None and all(tool.function.name != named for tool in tools):
        raise InvalidRequestError(
            f"`tool_choice.function.name`: {named!r} is not among `tools`", param="tool_choice.function.name"
        )
    if choice == "none":
        return None
    return ToolPlan(tuple(tools), named is not None or choice == "required", named, parallel)


def _check_tools(tools: list[Tool]) -> None:
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool.function.name
        if name in seen:
            param = f"tools[{i}].function.name"
            raise InvalidRequestError(f"`{param}`: {name!r} is the name of two tools", param=param)
        seen.add(name)
        if tool.function.parameters is None:
            continue
        param = f"tools[{i}].function.parameters"
        check_schema(tool.function.parameters, param)
        kind = tool.function.parameters.get("type", "object")
        if kind != "object":
            raise InvalidRequestError(
                f"`{param}`: must be a schema of type 'object', got {str(kind)[:64]!r}", param=param
            )


def knows_hermes_tools(template: str | Mapping[str, str] | None) -> bool:
    """Whether a chat template shows tools, and calls as JSON between ``<tool_call>`` and ``</tool_call>``."""
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    if not template or not _USES_TOOLS.search(template):
        return False
    return "<tool_call>" in template and "</tool_call>" in template and _XML_CALL not in template
