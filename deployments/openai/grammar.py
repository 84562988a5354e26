"""From the output format that a client asks for to a grammar that the engine enforces.

Grammars are texts in llguidance's dialect of Lark. They are compiled once here, so that an engine never gets one
that it cannot run, and what the library cannot do is refused under the name of the field that asked for it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from deployments.openai.formats import ResponseFormat, StructuredOutputs
from deployments.openai.json_schema import check_schema
from deployments.openai.tools import Tool, ToolPlan
from replicas.errors import InvalidRequestError
from replicas.grammars import try_grammar

#: Separators are fixed and nothing else may be blank: a small model that may emit a blank can emit them for ever.
#: They are those of ``json.dumps``, which is how chat templates show JSON to a model.
_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: What stands round a call.
TAGS = ("<tool_call>", "</tool_call>")
_ANY_OBJECT = {"type": "object"}
MAX_GRAMMAR_CHARACTERS = 512 * 1024


def make_grammar(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    plan: ToolPlan | None,
    tag_ids: Mapping[str, int] | None = None,
    control_tokens: Collection[str] = (),
) -> str | None:
    """The grammar of a whole answer, or None when everything is allowed.

    Tool calls that the client insists on are the whole answer. Where the model may call tools, it either does or
    answers in the format asked for. ``tag_ids``: those of ``TAGS`` that are one token of the model;
    ``control_tokens``: texts of its control tokens, which a grammar cannot ask for as text. Raises
    ``InvalidRequestError`` (the field named). Slow: call it in a thread.
    """
    grammar, param = _make(response_format, structured, plan, tag_ids)
    if grammar is not None:
        for token in control_tokens:
            if token in grammar or json.dumps(token)[1:-1] in grammar:
                raise InvalidRequestError(
                    f"`{param}` cannot be enforced: it holds the text of a control token, {token[:64]!a}",
                    param=param,
                )
    return grammar


def _make(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    plan: ToolPlan | None,
    tag_ids: Mapping[str, int] | None,
) -> tuple[str | None, str]:
    """The grammar, and the field that asked for it."""
    if plan is not None and plan.forced:
        if structured is not None:
            param = f"structured_outputs.{structured.constraint()[0]}"
            raise InvalidRequestError(
                f"`{param}` cannot be combined with a `tool_choice` that forces a call", param=param
            )
        tools = [plan.tool(plan.named)] if plan.named else list(plan.tools)
        several = plan.parallel and plan.named is None
        _check_calls("start: calls\n", tools, several, plan)
        return "start: calls\n" + _calls(tools, several, tag_ids or {}), "tools"
    answer, param = _answer(response_format, structured)
    if answer is None:
        return None, ""
    grammar = answer if param == "structured_outputs.grammar" else f"start: {answer}\n"
    _check(grammar, param)
    if plan is None:
        return grammar, param
    if grammar is answer:
        raise InvalidRequestError(f"`{param}` cannot be combined with `tools`", param=param)
    head = f"start: answer | calls\nanswer: {answer}\n"
    _check_calls(head, list(plan.tools), plan.parallel, plan)
    return head + _calls(list(plan.tools), plan.parallel, tag_ids or {}), param


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
        _check_schemas_in(value, param)
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


def _check_schemas_in(grammar: str, param: str) -> None:
    """Schemas in a client's own grammar have the bounds of others: the library makes an automaton of them that nothing
    else bounds."""
    for directive in re.finditer(r"%json\s*", grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, directive.end())
        except (ValueError, RecursionError):
            schema = None
        if not isinstance(schema, dict):
            raise InvalidRequestError(
                f"`{param}`: `%json` must be followed by a schema (an object)", param=param
            )
        check_schema(schema, param)


def _literal(text: str) -> str:
    return json.dumps(text)


def _calls(tools: list[Tool], parallel: bool, tag_ids: Mapping[str, int]) -> str:
    """Rules for one or more calls in the Hermes format, each with the schema of its tool's arguments.

    A tag that is one token is named by its id too: such tokens have no text for the library, and without their
    ids the model would have to spell the tag out.
    """
    begin, end = (
        f"(<[{tag_ids[tag]}]> | {_literal(tag)})" if tag in tag_ids else _literal(tag) for tag in TAGS
    )
    lines = [
        'calls: call ("\\n" call)*' if parallel else "calls: call",
        f'call: {begin} "\\n" ({" | ".join(f"call_{i}" for i in range(len(tools)))}) "\\n" {end}',
    ]
    for i, tool in enumerate(tools):
        head = _literal(f'{{"name": {json.dumps(tool.function.name)}, "arguments": ')
        schema = {**tool.function.schema_of_arguments(), "x-guidance": _WHITESPACE}
        lines.append(f'call_{i}: {head} %json {json.dumps(schema)} "}}"')
    return "\n".join(lines) + "\n"


def _check_calls(head: str, tools: list[Tool], parallel: bool, plan: ToolPlan) -> None:
    # Without the ids of a tokenizer, which is not at hand; they change nothing about the schemas.
    try:
        _check(head + _calls(tools, parallel, {}), "tools")
    except InvalidRequestError:
        for tool in tools:  # which one is it?
            _check(f"start: calls\n{_calls([tool], False, {})}", plan.parameters_param(tool))
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

    try:
        if problem := LLMatcher.validate_grammar(grammar):
            return _readable(problem)
        return _readable(try_grammar(grammar))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        return f"the library failed on it ({type(error).__name__})"


def _readable(problem: str) -> str:
    """The library's message without its excerpt of our grammar."""
    lines = re.split(r"\n +[0-9]+ \| |<backtrace>|<non-verbose/>", problem)[0].splitlines()
    text = " ".join(line.strip() for line in lines)
    for prefix in ("failed to compile JSON schema: ", "): "):
        _, found, rest = text.partition(prefix)
        text = rest if found and (prefix != "): " or text.startswith("at ")) else text
    text = text.replace("NoExtensionBias", "no text follows it")
    return text[:300]
