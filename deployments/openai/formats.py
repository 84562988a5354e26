"""Objects of a request body that describe the form of the answer: ``response_format``, ``structured_outputs``."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from deployments.openai.model import RequestModel, check_unicode

#: Names of schemas and of tools, as OpenAI has them.
NAME_PATTERN = "^[a-zA-Z0-9_-]{1,64}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
MAX_CHOICE_TEXTS = 1024
MAX_PATTERN_CHARACTERS = 16 * 1024
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


class JsonSchemaFormat(RequestModel):
    name: Name
    definition: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """``strict`` is accepted either way: a schema is always enforced."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                "`json_schema` is required with the type 'json_schema', and only allowed with it"
            )
        return self


class StructuredOutputs(RequestModel):
    """vLLM's extension: exactly one constraint on the whole answer."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARACTERS)] | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=1024)]],
            Field(min_length=1, max_length=MAX_CHOICE_TEXTS),
        ]
        | None
    ) = None
    grammar: Annotated[str, Field(min_length=1, max_length=4 * MAX_PATTERN_CHARACTERS)] | None = None
    json_object: bool | None = None

    @field_validator("json_")
    @classmethod
    def _an_object(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = json.loads(value)
                check_unicode(value)
            except (ValueError, RecursionError):
                raise ValueError("is no valid JSON") from None
        if value is not None and not isinstance(value, dict):
            raise ValueError("must be a JSON schema (an object)")
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = self._given()
        if len(given) != 1:
            raise ValueError(f"must have exactly one of {', '.join(_CONSTRAINTS)}, got {len(given)}")
        return self

    def constraint(self) -> tuple[str, Any]:
        """(name, value) of the one constraint."""
        (name,) = self._given()
        return name, self._value(name)

    def _given(self) -> list[str]:
        # An empty schema is a constraint, a `json_object` of false is none.
        return [name for name in _CONSTRAINTS if self._value(name) not in (None, False)]

    def _value(self, name: str) -> Any:
        return self.json_ if name == "json" else getattr(self, name)
