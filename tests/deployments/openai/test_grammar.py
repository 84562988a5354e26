"""Grammars made of formats and tools: what they accept, and what is refused by name."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer
from tool_templates import tool

from deployments.openai.formats import ResponseFormat, StructuredOutputs
from deployments.openai.grammar import make_grammar
from deployments.openai.tools import Tool, parse_tool_choice, plan_tools
from replicas.errors import InvalidRequestError

BYTES = LLTokenizer("byte")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}},
    "required": ["a"],
    "$defs": {"n": {"type": "integer"}},
}
TOOLS = [Tool.model_validate(tool("add", x={"$ref": "#/properties/y"}, y={"type": "integer"}))]
TOOLS += [Tool.model_validate({"type": "function", "function": {"name": "now"}})]


def accepts(grammar, text):
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def response_format(schema):
    return ResponseFormat.model_validate(
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    )


def of_schema(schema):
    return make_grammar(response_format(schema), None, None)


def structured(**fields):
    return make_grammar(None, StructuredOutputs.model_validate(fields), None)


def test_text_needs_no_grammar():
    assert make_grammar(None, None, None) is None
    assert make_grammar(ResponseFormat(type="text"), None, plan_tools(TOOLS, "auto", True)) is None


def test_json_object():
    grammar = make_grammar(ResponseFormat(type="json_object"), None, None)
    for text in ("{}", '{"a": 1, "b": [1, 2, {"c": null}]}', '{"ä": "\\n"}'):
        assert accepts(grammar, text)
    # No blanks but the ones in `json.dumps`.
    for text in ("[]", "1", "", " {}", "{ }", "{\n}", "{} ", '{"a":1}', '{"a":  1}'):
        assert not accepts(grammar, text)


def test_json_schema():
    grammar = of_schema(SCHEMA)
    assert accepts(grammar, '{"a": 3}')
    assert accepts(grammar, '{"a": 3, "b": "more"}')
    for text in ("{}", '{"a": "3"}', '{"a": 3, }', '{"b": 1}'):
        assert not accepts(grammar, text)
    assert accepts(of_schema({"enum": ["ä", 'q"', 3]}), json.dumps('q"'))
    assert accepts(of_schema({}), "null")


def test_a_schema_cannot_change_how_it_is_compiled():
    grammar = of_schema({"type": "object", "x-guidance": {"whitespace_flexible": True, "lenient": True}})
    assert not accepts(grammar, "{  }")
    # The end of a schema is the end of its JSON, whatever its texts hold.
    grammar = of_schema({"const": '"}\nstart: "x"\n%json {'})
    assert accepts(grammar, json.dumps('"}\nstart: "x"\n%json {'))
    assert not accepts(grammar, "x")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "string", "format": "unheard-of"}, "unheard-of"),
        ({"type": "string", "pattern": "("}, "unclosed"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"enum": []}, "Unsatisfiable"),
        ({"$schema": "http://a.b/c"}, "http://a.b/c"),
        ({"$defs": {"a": 5}, "$ref": "#/$defs/a"}, "must be an object"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema, text):
    with pytest.raises(InvalidRequestError, match=text) as caught:
        of_schema(schema)
    assert caught.value.param.startswith("response_format.json_schema.schema")
    assert "%json" not in caught.value.message
    assert len(caught.value.message) < 500


def test_structured_outputs():
    assert accepts(structured(json=SCHEMA), '{"a": 3}')
    assert accepts(structured(json=json.dumps(SCHEMA)), '{"a": 3}')
    assert accepts(structured(json={}), "[1]")
    assert accepts(structured(json_object=True), '{"a": 3}')
    choice = structured(choice=["yes", 'n"o\n', "ä"])
    for text in ("yes", 'n"o\n', "ä"):
        assert accepts(choice, text)
    assert not accepts(choice, "no")
    regex = structured(regex=r"a/b\d+|\"x\"")
    assert accepts(regex, "a/b12")
    assert accepts(regex, '"x"')
    assert not accepts(regex, "a/b")
    assert accepts(structured(grammar='start: "a" b\nb: /[0-9]+/'), "a12")
    assert accepts(structured(grammar='start: "a" %json {"type": "integer", "multipleOf": 3} "b"'), "a12b")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "("}, "structured_outputs.regex"),
        ({"regex": "(?=a)b"}, "structured_outputs.regex"),
        ({"grammar": "start: nothing"}, "structured_outputs.grammar"),
        ({"grammar": "%json"}, "structured_outputs.grammar"),
        ({"grammar": "start: %json 5"}, "structured_outputs.grammar"),
        ({"grammar": 'start: "x" %json {"multipleOf": 999983}'}, "structured_outputs.grammar.multipleOf"),
        (
            {"grammar": 'start: a\na: %json\n {"items": {"multipleOf": 99991}} "x"'},
            "structured_outputs.grammar.items.multipleOf",
        ),
        ({"json": {"not": {}}}, "structured_outputs.json"),
        ({"json": {"$ref": "http://a.b"}}, "structured_outputs.json.$ref"),
    ],
)
def test_bad_structured_outputs(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        structured(**fields)
    assert caught.value.param == param


ADD = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": 2}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_required_calls():
    grammar = make_grammar(None, None, plan_tools(TOOLS, "required", True))
    for text in (ADD, NOW, f"{ADD}\n{NOW}\n{ADD}"):
        assert accepts(grammar, text)
    for text in ("", "text", f" {NOW}", NOW + NOW, ADD.replace("2", '"2"'), ADD.replace("add", "now")):
        assert not accepts(grammar, text)
    one = make_grammar(None, None, plan_tools(TOOLS, "required", False))
    assert accepts(one, ADD)
    assert not accepts(one, f"{ADD}\n{ADD}")


def test_tags_that_are_one_token():
    """Here bytes stand for them: the tags may be those or text."""
    plan = plan_tools(TOOLS, "required", True)
    grammar = make_grammar(None, None, plan, {"<tool_call>": ord("A"), "</tool_call>": ord("Z")})
    tokens = NOW.replace("<tool_call>", "A").replace("</tool_call>", "Z")
    for text in (NOW, tokens, f"{tokens}\n{NOW}\n{tokens}"):
        assert accepts(grammar, text)
    assert not accepts(grammar, tokens.replace("A", "Z"))


def test_a_named_call():
    choice = {"type": "function", "function": {"name": "now"}}
    grammar = make_grammar(None, None, plan_tools(TOOLS, parse_tool_choice(choice), True))
    assert accepts(grammar, NOW)
    assert not accepts(grammar, ADD)
    assert not accepts(grammar, f"{NOW}\n{NOW}")


def test_calls_or_an_answer_in_a_format():
    grammar = make_grammar(response_format(SCHEMA), None, plan_tools(TOOLS, None, True))
    for text in (ADD, f"{ADD}\n{NOW}", '{"a": 3}'):
        assert accepts(grammar, text)
    assert not accepts(grammar, "text")
    # Calls that are required are the whole answer.
    grammar = make_grammar(response_format(SCHEMA), None, plan_tools(TOOLS, "required", True))
    assert not accepts(grammar, '{"a": 3}')


def test_a_tool_that_cannot_be_enforced_is_named():
    tools = [*TOOLS, Tool.model_validate(tool("odd", x={"not": {}}))]
    assert plan_tools(tools, "auto", True) is not None  # fine where nothing is enforced
    with pytest.raises(InvalidRequestError, match="not") as caught:
        make_grammar(None, None, plan_tools(tools, "required", True))
    assert caught.value.param == "tools[2].function.parameters"
    with pytest.raises(InvalidRequestError) as caught:
        make_grammar(None, StructuredOutputs(grammar='start: "a"'), plan_tools(TOOLS, "auto", True))
    assert caught.value.param == "structured_outputs.grammar"


def properties(count, **kind):
    return {"type": "object", "properties": {f"k{i}": kind for i in range(count)}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"$ref": "#"}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        properties(500, type="integer"),
    ],
)
def test_a_schema_that_no_text_or_no_engine_can_follow_is_refused(schema):
    with pytest.raises(InvalidRequestError, match="cannot be enforced") as caught:
        of_schema(schema)
    assert caught.value.param == "response_format.json_schema.schema"
    assert accepts(of_schema(properties(50, type="integer")), '{"k3": 5}')


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": r"[^\s\S]"},
        {"grammar": "start: start"},
        {"grammar": 'start: "a" start'},
        {"grammar": "start: A\nA: /a*/ & /b+/"},
    ],
)
def test_a_language_without_texts_or_without_bounds_is_refused(fields):
    with pytest.raises(InvalidRequestError, match="cannot be enforced") as caught:
        structured(**fields)
    assert caught.value.param == f"structured_outputs.{next(iter(fields))}"


@pytest.mark.parametrize("fields", [{"choice": ["a<|im_end|>b"]}, {"json": {"enum": ["<|im_end|>"]}}])
def test_the_text_of_a_control_token_is_refused(fields):
    with pytest.raises(InvalidRequestError, match="control token") as caught:
        make_grammar(None, StructuredOutputs.model_validate(fields), None, None, ("<|mask|>", "<|im_end|>"))
    assert caught.value.param == f"structured_outputs.{next(iter(fields))}"
    assert make_grammar(None, StructuredOutputs.model_validate(fields), None, None, ("<|mask|>",))


def test_forced_calls_leave_no_room_for_structured_outputs():
    with pytest.raises(InvalidRequestError) as caught:
        make_grammar(None, StructuredOutputs(regex="a"), plan_tools(TOOLS, "required", True))
    assert caught.value.param == "structured_outputs.regex"
