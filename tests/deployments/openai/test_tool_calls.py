"""The parser of tool calls: what it makes of a text does not depend on the pieces in which the text comes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_templates import tool

from deployments.openai.tool_calls import CallArguments, CallStart, Content, ToolCallParser
from deployments.openai.tools import Tool, ToolPlan

TOOLS = tuple(Tool.model_validate(tool(name, x={"type": "integer"})) for name in ("add", "sub"))
PLAN = ToolPlan(TOOLS)
FORCED = ToolPlan(TOOLS, forced=True)


def call(name="add", arguments='{"x": 1}'):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def parse(pieces, plan=PLAN):
    """(content, [(name, arguments)]) of a text in pieces, and the events."""
    parser = ToolCallParser(plan)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    content, calls = "", []
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        else:
            assert event.index == len(calls) - 1
            calls[-1][1] += event.text
    assert parser.num_calls == len(calls)
    return content, [tuple(call) for call in calls], events


@pytest.mark.parametrize("plan", [PLAN, FORCED])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        (" plain \n", " plain \n", []),
        (call(), "", [("add", '{"x": 1}')]),
        ("\n\n" + call() + "\n", "", [("add", '{"x": 1}')]),
        ("Let me see.\n" + call(), "Let me see.", [("add", '{"x": 1}')]),
        (call() + "\n" + call("sub"), "", [("add", '{"x": 1}'), ("sub", '{"x": 1}')]),
        ("a\n" + call() + "\n\nb ", "ab ", [("add", '{"x": 1}')]),
        (call(arguments='{"x": "</tool_call> \\" {"}'), "", [("add", '{"x": "</tool_call> \\" {"}')]),
        (call(arguments='{"x": {"y": [1, {}]}}'), "", [("add", '{"x": {"y": [1, {}]}}')]),
        (call(arguments='{"x": "\\ud800"}'), "", [("add", '{"x": "\\ud800"}')]),
        (call(arguments="{ }"), "", [("add", "{ }")]),
        ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        ('<tool_call>{"arguments": {"x":2}, "name": "add"}</tool_call>', "", [("add", '{"x": 2}')]),
        ("a <tool_call", "a <tool_call", []),
        ("x < y <tool> <tool_calls>", "x < y <tool> <tool_calls>", []),
        ("use <tool_call> and </tool_call>.", "use <tool_call> and </tool_call>.", []),
        ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
        ("<tool_call>\n[1]\n</tool_call>", "<tool_call>\n[1]\n</tool_call>", []),
        (call("unknown"), call("unknown"), []),
        (call(arguments='"text"'), call(arguments='"text"'), []),
        (call(arguments="[1]"), call(arguments="[1]"), []),
        ("a \n" + call("unknown") + call(), "a \n" + call("unknown"), [("add", '{"x": 1}')]),
        (f"<think>\n{call()}\n</think>\n\n{call()}", f"<think>\n{call()}\n</think>", [("add", '{"x": 1}')]),
        (f"<think>{call()}</thi", f"<think>{call()}</thi", []),
        # Without its end the call is there all the same.
        (call()[: -len("</tool_call>")], "", [("add", '{"x": 1}')]),
    ],
)
def test_texts(text, content, calls, plan):
    for pieces in ([text], list(text)):
        assert parse(pieces, plan)[:2] == (content, calls)


MALFORMED = [
    '<tool_call>\n{"name": "add", "arguments": {"x": }}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"x": 1}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"x": "a\nb"}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"x": "}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"x": NaN}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"x": ' + "[" * 5000 + "]" * 5000 + "}}\n</tool_call>",
    '<tool_call>\n{"name": "add", "arguments": {"x": ' + "9" * 5000 + "}}\n</tool_call>",
    '<tool_call>\n{"name": ["add"]}\n</tool_call>',
    '<tool_call>\n{name: "add"}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"x": 1',
    '<tool_call>\n{"name": "add", "argum',
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_call_is_content_as_it_was_written(text):
    for pieces in ([text], list(text)):
        assert parse(pieces)[:2] == (text, [])
    if text.endswith("</tool_call>"):
        assert parse(["a\n", text, "\n", call()])[:2] == ("a\n" + text, [("add", '{"x": 1}')])


def test_no_more_than_one_call_where_parallel_calls_are_off():
    for forced in (False, True):
        plan = ToolPlan(TOOLS, forced=forced, parallel=False)
        assert parse(["a", call(), "\n", call("sub"), "b"], plan)[:2] == ("a", [("add", '{"x": 1}')])


def test_nothing_of_a_tag_is_ever_shown():
    *_, events = parse(list("Hi <b> " + call()))
    assert [event.text for event in events if isinstance(event, Content)] == ["H", "i", " <b", ">"]


def test_a_forced_call_goes_out_as_it_comes_and_may_be_cut_short():
    text = call(arguments='{"x": "abc"}')
    content, calls, events = parse(list(text)[:-18], FORCED)
    assert (content, calls) == ("", [("add", '{"x": "a')])
    assert isinstance(events[0], CallStart)
    assert len([event for event in events if isinstance(event, CallArguments)]) > 5
    assert len({type(event) for event in parse(list(text))[2]}) == 2
    assert len(parse(list(text))[2]) == 2  # not forced: held back until it is complete


@given(data=st.data())
def test_the_pieces_do_not_matter(data):
    parts = st.sampled_from(
        [call(), call("sub", '{"s": "\\\\\\"</tool_call>"}'), call("no"), *MALFORMED[:5], "<tool_call>", "</tool_call>",
         "<think>", "</think>", "\n", "  ", "text", "<", "{", '"', "\\", '{"name": "add", "arguments": {']
    )  # fmt: skip
    text = "".join(data.draw(st.lists(parts, max_size=8)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=30)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    plan = ToolPlan(TOOLS, forced=data.draw(st.booleans()), parallel=data.draw(st.booleans()))
    whole = parse([text], plan)
    assert parse(pieces, plan)[:2] == whole[:2]
    if not plan.forced:
        for _, arguments in whole[1]:
            assert isinstance(json.loads(arguments), dict)
        if not whole[1]:
            assert whole[0] == text


@given(st.text(alphabet='<tol_ca>/"{}\\n :,ameruth', max_size=80))
def test_any_text_in_any_pieces(text):
    assert parse(list(text))[:2] == parse([text])[:2]
