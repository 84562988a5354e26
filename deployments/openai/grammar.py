"""From the output format that a client asks for to a grammar that the engine enforces.

Grammars are texts in llguidance's dialect of Lark. They are compiled once here, so that an engine never gets one
that it cannot run, and what the library cannot do is refused under the name of the field that asked for it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from deployments.openai.formats import ResponseFormat, StructuredOutputs
from deployments.openai.json_schema import check_schema
from deployments.openai.tools import Tool, ToolPlan
from replicas.errors import InvalidRequestError

#: Separators are fixed and nothing else may be blank: a small model that may emit a blank can emit them for ever.
#: They are those of ``json.dumps``, which is how chat templates show JSON to a model.
_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT = {"type": "object"}
MAX_GRAMMAR_CHARACTERS = 512 * 1024


def make_grammar(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, plan: ToolPlan | None
) -> str | None:
    """The grammar of a whole answer, or None when everything is allowed.

    Tool calls that the client insists on are the whole answer. Where the model may call tools, it either does or
    answers in the format asked for. Raises ``InvalidRequestError`` (the field named). Slow: call it in a thread.
    """
    if plan is not None and plan.forced:
        tools = [plan.tool(plan.named)] if plan.named else list(plan.tools)
        grammar = "start: calls\n" + _calls(tools, plan.parallel and plan.named is None)
        _check_calls(grammar, tools, plan)
        return grammar
    answer, param = _answer(response_format, structured)
    if answer is None:
        return None
    grammar = answer if param == "structured_outputs.grammar" else f"start: {answer}\n"
    _check(grammar, param)
    if plan is None:
        return grammar
    if grammar is answer:
        raise InvalidRequestError(f"`{param}` cannot be combined with `tools`", param=param)
    grammar = f"start: answer | calls\nanswer: {answer}\n{_calls(list(plan.tools), plan.parallel)}"
    _check_calls(grammar, list(plan.tools), plan)
    return grammar


def _answer(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> tuple[str | None, str]:
    """The right side of the rule for the content (or a whole grammar of the client's), and the field's name."""
    if structured is not None:
        name, value = structured.constraint()
        param = f"structured_outputs.{name}"
        if name == "json":
            return _json(value, param), param
        if name == "json_object":
            return _json(_ANY_OBJECT, param), param
        if name == "choice":
            return " | ".join(_literal(text) for text in value), param
        if name == "regex":
            import llguidance

            return f"/{llguidance.regex_to_lark(value)}/", param
        return value, param
    if response_format is None or response_format.type == "text":
        return None, ""
    if response_format.json_schema is None:
        return _json(_ANY_OBJECT, "response_format"), "response_format"
    param = "response_format.json_schema.schema"
    return _json(response_format.json_schema.definition, param), param


def _json(schema: Mapping[str, Any], param: str) -> str:
    check_schema(schema, param)
    return "%json " + json.dumps({**schema, "x-guidance": _WHITESPACE})


def _literal(text: str) -> str:
    return json.dumps(text)


def _calls(tools: list[Tool], parallel: bool) -> str:
    """Rules for one or more calls in the Hermes format, each with the schema of its tool's arguments."""
    lines = [
        'calls: call ("\\n" call)*' if parallel else "calls: call",
        f'call: "<tool_call>\\n" ({" | ".join(f"call_{i}" for i in range(len(tools)))}) "\\n</tool_call>"',
    ]
    for i, tool in enumerate(tools):
        head = _literal(f'{{"name": {json.dumps(tool.function.name)}, "arguments": ')
        schema = {**tool.function.schema_of_arguments(), "x-guidance": _WHITESPACE}
        lines.append(f'call_{i}: {head} %json {json.dumps(schema)} "}}"')
    return "\n".join(lines) + "\n"


def _check_calls(grammar: str, tools: list[Tool], plan: ToolPlan) -> None:
    try:
        _check(grammar, "tools")
    except InvalidRequestError:
        for tool in tools:  # which one is it?
            _check(f"start: calls\n{_calls([tool], False)}", plan.parameters_param(tool))
        raise


def _check(grammar: str, param: str) -> None:
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequestError(
            f"`{param}`: the grammar made of it may have at most {MAX_GRAMMAR_CHARACTERS} characters, "
            f"got {len(grammar)}",
            param=param,
        )
    if problem := _problem(grammar):
        raise InvalidRequestError(f"`{param}` cannot be enforced: {problem}", param=param)


@functools.lru_cache(maxsize=128)
def _problem(grammar: str) -> str:
    """Why the library cannot run a grammar; "" when it can."""
    from llguidance import LLMatcher

    if problem := LLMatcher.validate_grammar(grammar):
        return _readable(problem)
    # Some limits show only when a matcher is made; bytes are a vocabulary that every tokenizer's tokens consist of.
    return _readable(LLMatcher(_byte_tokenizer(), grammar, log_level=0).get_error())


@functools.cache
def _byte_tokenizer() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _readable(problem: str) -> str:
    """The library's message without its excerpt of our grammar."""
    lines = problem.split("\n   1 |")[0].split("<backtrace>")[0].splitlines()
    text = " ".join(line.strip() for line in lines)
    for prefix in ("failed to compile JSON schema: ", "): "):
        _, found, rest = text.partition(prefix)
        text = rest if found and (prefix != "): " or text.startswith("at ")) else text
    return text[:300]
