"""The bodies' schemas for ``/openapi.json``: routes read bodies themselves, to keep errors in the envelope."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from deployments.openai.protocol import ChatCompletionRequest, CompletionRequest
from deployments.openai.responses_request import ResponsesRequest

_BODIES = (ChatCompletionRequest, CompletionRequest, ResponsesRequest)
_REF = "#/components/schemas/{model}"


def body_of(model: type[Any]) -> dict[str, Any]:
    """The ``openapi_extra`` of a route whose body is a ``model``."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_schemas(app: FastAPI) -> None:
    """Adds the schemas that ``body_of`` refers to."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _, definitions = models_json_schema([(model, "validation") for model in _BODIES], ref_template=_REF)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(definitions["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]
