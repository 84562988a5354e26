"""What FastAPI cannot know for ``/openapi.json``: routes read bodies themselves, to keep errors in the envelope."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from deployments.openai.protocol import ChatCompletionRequest, CompletionRequest

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STRING = {"type": "string"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PART = {"type": "object", "required": ["type"], "properties": {"type": _STRING}}
#: Forms that validators accept beside the one that a field keeps.
_ALSO: dict[str, list[dict[str, Any]]] = {
    "stop": [_STRING],
    "prompt": [_STRING, _TOKEN_IDS],
    "content": [{"type": "array", "items": {"anyOf": [_STRING, _PART]}, "minItems": 1}],
}


def body_of(model: type[Any]) -> dict[str, Any]:
    """The ``openapi_extra`` of a route whose body is a ``model``."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_schemas(app: FastAPI) -> None:
    """Adds the schemas that ``body_of`` refers to, and what every operation may answer."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _, definitions = models_json_schema(
            [(ChatCompletionRequest, "validation"), (CompletionRequest, "validation")], ref_template=_REF
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for schema in definitions["$defs"].values():
            _widen(schema)
        schemas.update(definitions["$defs"])
        schemas["ErrorResponse"] = _ERROR
        for operations in document["paths"].values():
            for operation in operations.values():
                _declare_responses(operation, schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _widen(schema: dict[str, Any]) -> None:
    """Null means absent in every optional field, and some fields have more than one form."""
    for name, field in schema.get("properties", {}).items():
        forms = list(_ALSO.get(name, []))
        if name not in schema.get("required", ()):
            forms.append({"type": "null"})
        if not forms or field.keys() <= {"title", "default"}:  # anything at all
            continue
        known = {key: field.pop(key) for key in list(field) if key not in ("title", "default")}
        options = known.get("anyOf", [known])
        field["anyOf"] = options + [form for form in forms if form not in options]


def _declare_responses(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """The envelope for all errors; an event stream where the body may ask for one."""
    responses = operation["responses"]
    responses.pop("422", None)
    for status, kind in (("4XX", "The request is at fault"), ("5XX", "The server failed, or is not ready")):
        content = {"application/json": {"schema": {"$ref": _REF.format(model="ErrorResponse")}}}
        responses.setdefault(status, {"description": kind, "content": content})
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if "stream" in schemas.get(body.get("$ref", "").rsplit("/", 1)[-1], {}).get("properties", {}):
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
