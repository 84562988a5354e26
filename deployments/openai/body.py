"""Reading a request body: bounded, decoded, validated. Everything wrong with it is a 4xx in the envelope."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from deployments.openai.errors import HTTPStatusError, from_validation, name_of
from replicas.errors import InvalidRequestError

Model = TypeVar("Model", bound=BaseModel)

#: Bodies above this many bytes are parsed in a thread, so that they do not hold up other requests.
_INLINE_BYTES = 64 * 1024
#: Levels of arrays and objects. Far below what Python's stack holds, for a body is walked, dumped and repeated in
#: places where the stack is deeper than here.
MAX_NESTING = 256
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(
    request: Request, model: type[Model], max_bytes: int, timeout_s: float | None = None
) -> Model:
    """The validated body of a request, which must be here after ``timeout_s`` seconds. Raises ``HTTPStatusError``
    (400, 408, 413, 415) and ``InvalidRequestError`` (its field named)."""
    _check_content_type(request.headers.get("content-type"))
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read_bytes(request, max_bytes)
    except TimeoutError:
        raise HTTPStatusError(
            408, f"The body did not arrive within {timeout_s:g} seconds", code="body_timeout"
        ) from None
    if len(raw) <= _INLINE_BYTES:
        return _parse(raw, model)
    return await asyncio.to_thread(_parse, raw, model)


def _check_content_type(value: str | None) -> None:
    if value is None:
        return
    kind = value.split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HTTPStatusError(
            415,
            f"The content type must be application/json, got {kind[:80]!a}",
            code="unsupported_media_type",
        )


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = HTTPStatusError(413, f"The body may have at most {max_bytes} bytes", code="body_too_large")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise too_large
    except ClientDisconnect:
        raise HTTPStatusError(400, "The client left while sending the body", code="disconnected") from None
    return bytes(body)


def _parse(raw: bytes, model: type[Model]) -> Model:
    try:
        data = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _bad_json(f"The body is not valid UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise _bad_json("The body is not valid JSON: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _bad_json(f"The body is not valid JSON: {error}") from None
    except ValueError:  # int() refuses thousands of digits
        raise _bad_json("The body is not valid JSON: a number is too long") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTING and _is_deeper(data, MAX_NESTING):
        raise _bad_json(f"The body is not valid JSON: nested too deeply (at most {MAX_NESTING} levels)")
    if not isinstance(data, dict):
        raise _bad_json(f"The body must be a JSON object, got {_kind(data)}")
    try:
        if _SURROGATE_ESCAPE.search(raw):
            _refuse_lone_surrogates(data, "")
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _refuse_lone_surrogates(value: Any, where: str) -> None:
    """Half a surrogate pair has no UTF-8 form: no tokenizer can encode it, no response can hold it."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"`{where}`: contains a lone surrogate (\\u{ord(value[error.start]):04x})",
                param=where or None,
            ) from None
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_lone_surrogates(key, where)
            _refuse_lone_surrogates(item, f"{where}.{name_of(key)}" if where else name_of(key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _refuse_lone_surrogates(item, f"{where}[{i}]")


def _bad_json(message: str) -> HTTPStatusError:
    return HTTPStatusError(400, message, code="invalid_json")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return names[type(value)]
