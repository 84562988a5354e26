import pytest

from deployments.openai.json_schema import MAX_NESTING, check_schema
from replicas.errors import InvalidRequestError


def nested(levels):
    schema = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "integer"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"type": "string"}, {"$ref": "#/anyOf/0"}]},
        {"$ref": "#/$defs/a~1b~0", "$defs": {"a/b~": {}}},
        {"const": {"$ref": "http://a.b"}, "not": {"type": "string"}, "uniqueItems": True},
        {"properties": {"$ref": {"type": "string"}}},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "unknown": 1, "format": "unknown"},
        nested(MAX_NESTING - 1),
        {"properties": {f"p{i}": {"type": "string"} for i in range(1900)}},
    ],
)
def test_good_schemas(schema):
    check_schema(schema, "s")


@pytest.mark.parametrize(
    ("schema", "param", "text"),
    [
        ({"type": "strin"}, "s.type", "no valid JSON schema"),
        ({"properties": {"a": 5}}, "s.properties.a", "no valid JSON schema"),
        ({"properties": {"a": {"anyOf": [{"minLength": -1}]}}}, "s.properties.a.anyOf[0].minLength", "-1"),
        ({"required": "a"}, "s.required", "'a'"),
        ({"$ref": "#/$defs/a"}, "s.$ref", "points to nothing"),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"b": {}}}, "s.items.$ref", "points to nothing"),
        ({"$ref": "http://a.b/c.json"}, "s.$ref", "the schema itself"),
        ({"$ref": "file:///etc/passwd"}, "s.$ref", "the schema itself"),
        ({"$ref": "other.json#/a"}, "s.$ref", "the schema itself"),
        ({"$ref": 5}, "s.$ref", "no valid JSON schema"),
        ({"const": float("nan")}, "s", "not finite"),
        (nested(MAX_NESTING + 1), "s", "64 levels"),
        (nested(50_000), "s", "64 levels"),
        ({"enum": list(range(20_000))}, "s", "10000 values"),
        ({"description": "x" * 70_000}, "s", "65536 characters"),
        ({"maxItems": 10**9}, "s", "20000 items"),
        ({"properties": {f"p{i}": {"maxItems": 1000} for i in range(30)}}, "s", "20000 items"),
    ],
)
def test_bad_schemas_are_refused_by_name(schema, param, text):
    with pytest.raises(InvalidRequestError, match=text) as caught:
        check_schema(schema, "s")
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message


def test_a_reference_of_many_digits_is_no_index():
    with pytest.raises(InvalidRequestError, match="nothing"):
        check_schema({"$ref": "#/anyOf/" + "9" * 10_000, "anyOf": [{}]}, "s")


@pytest.mark.parametrize("value", [999983, 1001, 1e9, 10.01, 0.12345])
def test_divisors_that_need_a_large_automaton_are_refused(value):
    schema = {"type": "object", "properties": {"a": {"type": "number", "multipleOf": value}}}
    with pytest.raises(InvalidRequestError, match="at most 1000") as caught:
        check_schema(schema, "s")
    assert caught.value.param == "s.properties.a.multipleOf"


@pytest.mark.parametrize("value", [1000, 7, 0.01, 2.5, 999.0])
def test_other_divisors_are_fine(value):
    check_schema({"type": "number", "multipleOf": value}, "s")
