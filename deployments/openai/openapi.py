"""What ``/openapi.json`` says of bodies, responses and errors: routes read bodies themselves, to keep errors in the
envelope, so FastAPI cannot know."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from deployments.openai.protocol import ChatCompletionRequest, CompletionRequest
from deployments.openai.responses_request import ResponsesRequest
from deployments.openai.tokenization import DetokenizeRequest, TokenizeRequest

Json = dict[str, Any]

_BODIES = (ChatCompletionRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest)
_REF = "#/components/schemas/{model}"
_TEXT, _INTEGER = {"type": "string"}, {"type": "integer"}
_NULLABLE_TEXT = {"type": ["string", "null"]}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _choice(**properties: Json) -> Json:
    return _object(
        index=_INTEGER, finish_reason=_NULLABLE_TEXT, logprobs={"type": ["object", "null"]}, **properties
    )


def _completion(kind: str, choice: Json) -> Json:
    return _object(
        id=_TEXT,
        object={"const": kind},
        created=_INTEGER,
        model=_TEXT,
        choices=_list(choice),
        usage=_object(prompt_tokens=_INTEGER, completion_tokens=_INTEGER, total_tokens=_INTEGER),
    )


_SCHEMAS: Json = {
    "ErrorResponse": _object(
        error=_object(message=_TEXT, type=_TEXT, param=_NULLABLE_TEXT, code=_NULLABLE_TEXT)
    ),
    "ChatCompletion": _completion(
        "chat.completion", _choice(message=_object(role={"const": "assistant"}, content=_NULLABLE_TEXT))
    ),
    "Completion": _completion("text_completion", _choice(text=_TEXT)),
    "Response": _object(
        id=_TEXT,
        object={"const": "response"},
        created_at=_INTEGER,
        status={"enum": ["completed", "incomplete"]},
        model=_TEXT,
        output=_list(_object(type={"enum": ["message", "function_call"]}, id=_TEXT, status=_TEXT)),
        usage=_object(input_tokens=_INTEGER, output_tokens=_INTEGER, total_tokens=_INTEGER),
    ),
    "Tokens": _object(
        count=_INTEGER,
        max_model_len=_INTEGER,
        tokens=_list(_INTEGER),
        token_strs={"type": ["array", "null"], "items": _TEXT},
    ),
    "Text": _object(prompt=_TEXT),
}


def _errors() -> Json:
    content = {"application/json": {"schema": {"$ref": _REF.format(model="ErrorResponse")}}}
    return {
        "4XX": {"description": "The request is at fault", "content": content},
        "5XX": {"description": "The server is at fault, or not ready", "content": content},
    }


#: Of every route.
ERRORS: Any = _errors()


def describe(body: type[Any], response: str, *, streams: bool = False) -> Json:
    """The ``openapi_extra`` of a route with this body and the response of this name; ``streams``: or its events."""
    schema = {"$ref": _REF.format(model=body.__name__)}
    content: Json = {"application/json": {"schema": {"$ref": _REF.format(model=response)}}}
    if streams:
        content["text/event-stream"] = {
            "schema": {"type": ["string", "object"]}
        }  # an event without a name, or with one
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "The answer", "content": content}},
    }


def install_schemas(app: FastAPI) -> None:
    """Adds the schemas that ``describe`` and ``ERRORS`` refer to."""
    generate = app.openapi

    def openapi() -> Json:
        document = generate()
        _, definitions = models_json_schema([(model, "validation") for model in _BODIES], ref_template=_REF)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for schema in definitions["$defs"].values():
            _allow_null(schema)
        schemas.update(definitions["$defs"] | _SCHEMAS)
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # FastAPI's own, which never comes
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _allow_null(schema: Json) -> None:
    """Null means absent in every optional field."""
    for name, field in schema.get("properties", {}).items():
        if name in schema.get("required", ()) or field.keys() <= {"title", "default"}:  # anything at all
            continue
        known = {key: field.pop(key) for key in list(field) if key not in ("title", "default")}
        options = known.get("anyOf", [known])
        field["anyOf"] = options + [form for form in [{"type": "null"}] if form not in options]
