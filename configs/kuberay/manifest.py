"""Offline validation of a ``RayService`` manifest against the custom resource definition, made strict.

The API server drops keys that it does not know, and ``kubectl apply`` only warns of them; here they are problems.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from configs.kuberay.operator_rules import operator_problems
from configs.loader import join_path, show, unknown_key

KIND = "RayService"
API_VERSION = "ray.io/v1"
SCHEMA_FILE = "rayservice_schema.json"

_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
#: What a person writes of Kubernetes' ObjectMeta, and what `kubectl get -o yaml` adds to it.
_METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "generateName": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": _STRINGS,
        "annotations": _STRINGS,
        "finalizers": {"type": "array", "items": {"type": "string"}},
        "ownerReferences": {"type": "array"},
        "creationTimestamp": {},
        "deletionGracePeriodSeconds": {},
        "deletionTimestamp": {},
        "generation": {},
        "managedFields": {},
        "resourceVersion": {},
        "selfLink": {},
        "uid": {},
    },
    "additionalProperties": False,
}


def manifest_problems(raw: Mapping[str, Any]) -> list[str]:
    """The problems of a manifest, a line each: its schema, and what KubeRay's operator would refuse. What stands
    in ``serveConfigV2`` is not looked at."""
    errors = _validator().iter_errors(_without_nulls(raw))
    problems = [line for error in errors for line in _lines(error)]
    # The rules read what the schema has found to be in order.
    return problems or operator_problems(raw)


@cache
def _validator() -> Draft202012Validator:
    text = resources.files("configs.kuberay").joinpath(SCHEMA_FILE).read_text(encoding="utf-8")
    schema = {
        "type": "object",
        "properties": {
            "apiVersion": {"enum": [API_VERSION]},
            "kind": {"enum": [KIND]},
            "metadata": _METADATA,
            "spec": strict(json.loads(text)),
            "status": {},
        },
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
    }
    return Draft202012Validator(schema)


def strict(schema: Any) -> Any:
    """Kubernetes' dialect of OpenAPI as JSON schema that forbids unknown keys.

    Kept open: maps (``additionalProperties``) and ``x-kubernetes-preserve-unknown-fields``. A required key that has
    a default is not required, because the API server fills in defaults before it validates.
    """
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties")
    result = {
        key: {name: strict(child) for name, child in value.items()} if key == "properties" else strict(value)
        for key, value in schema.items()
    }
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("anyOf", None)
        result["type"] = ["integer", "string"]
    elif schema.get("format") == "int32":
        result = {"minimum": -(2**31), "maximum": 2**31 - 1} | result
    if schema.get("nullable"):
        result["type"] = [result["type"], "null"]
    if properties is not None:
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
        required = [key for key in schema.get("required", ()) if "default" not in properties.get(key, {})]
        result["required"] = required
    return result


def _without_nulls(value: Any) -> Any:
    """As the API server, which takes ``key: null`` for an absent key (none of the nullable ones differs here)."""
    if isinstance(value, Mapping):
        return {str(key): _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _lines(error: ValidationError) -> Iterator[str]:
    path = join_path("", *error.absolute_path)
    schema: Any = error.schema
    given: Any = error.instance
    expected: Any = error.validator_value
    where = path or "the file"
    match error.validator:
        case "additionalProperties":
            allowed = schema["properties"]
            yield from (unknown_key(path, key, allowed) for key in given if key not in allowed)
        case "required":
            # jsonschema reports each missing key on its own, and names it in its message only.
            missing = [key for key in expected if error.message.startswith(repr(key))]
            yield from (f"{join_path(path, key)}: this key is required" for key in missing)
        case "type":
            names = [expected] if isinstance(expected, str) else expected
            yield f"{where}: must be {' or '.join(map(_kind, names))}, got {show(given)}"
        case "enum":
            allowed = ", ".join(map(repr, expected))
            yield f"{where}: must be {'one of ' if len(expected) > 1 else ''}{allowed}, got {show(given)}"
        case "minimum" | "maximum":
            yield f"{where}: must be at {'least' if error.validator == 'minimum' else 'most'} {expected}, got {given}"
        case "pattern":
            yield f"{where}: must match {expected}, got {show(given)}"
        case _:
            yield f"{where}: {error.message}"


def _kind(name: str) -> str:
    return {"object": "a mapping", "array": "a list", "integer": "an integer"}.get(name, f"a {name}")
