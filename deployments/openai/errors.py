"""One envelope for every failure: ``{"error": {"message", "type", "param", "code"}}``, all four present."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from replicas.errors import BlockserveError, InvalidRequestError
from replicas.protocol import RequestError

logger = logging.getLogger(__name__)

#: ``code`` of ``replicas.errors`` -> HTTP status; anything else is a 500.
_STATUS = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "unsupported_parameter": 400,
    "model_not_found": 404,
    "deadline_exceeded": 408,
    "slow_consumer": 408,
    "queue_full": 429,
    "engine_step_failed": 500,
    "model_not_ready": 503,
    "replica_lost": 503,
    "engine_dead": 503,
    "model_load_failed": 503,
    "slots_exhausted": 503,
    "request_aborted": 503,
}
#: Of requests that have not been read to their end: what still comes on the connection is not waited for.
_CLOSING = (408, 413, 414, 431)
#: Codes whose message is ours and may be shown; of other failures a client sees no inside.
_INTERNAL_MESSAGE = "The server had an error while processing the request."


class HTTPStatusError(BlockserveError):
    """A failure that only the HTTP layer knows: body too large, wrong content type, not valid JSON."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status


class ClientGoneError(Exception):
    """The client closed its connection before the answer was there."""


class GenerationFailedError(BlockserveError):
    """A request that failed on its replica, as the dispatcher reported it."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message, param=error.param, code=error.code)
        self.retryable = error.retryable


def status_of(error: BlockserveError) -> int:
    if isinstance(error, HTTPStatusError):
        return error.status
    return _STATUS.get(error.code, 500)


def envelope(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 500:
        kind = "server_error"
    else:
        kind = "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: BlockserveError) -> dict[str, Any]:
    """The envelope of an error, for a response as well as for an event in a stream."""
    status = status_of(error)
    message = error.message if status != 500 or error.code in _STATUS else _INTERNAL_MESSAGE
    return envelope(status, message, param=error.param, code=error.code)


def error_response(error: BlockserveError) -> JSONResponse:
    status = status_of(error)
    headers = {}
    if status in (429, 503):
        headers["retry-after"] = str(math.ceil(getattr(error, "retry_after_s", 1.0)))
    if status in _CLOSING:
        headers["connection"] = "close"
    return JSONResponse(error_body(error), status_code=status, headers=headers)


def internal_error_response() -> JSONResponse:
    return JSONResponse(envelope(500, _INTERNAL_MESSAGE, code="internal_error"), status_code=500)


def from_validation(error: ValidationError) -> InvalidRequestError:
    """The first problem of a body as an error that names the field, what is allowed and what was given."""
    problem = error.errors(include_url=False, include_context=False)[0]
    location = [part for part in problem["loc"] if not (isinstance(part, str) and "[" in part)]
    param = ""
    for part in location:
        param += f"[{part}]" if isinstance(part, int) else f".{name_of(part)}" if param else name_of(part)
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        text = f"`{param}` is required"
    elif not param:
        text = message
        param = message.split("`")[1] if message.startswith("`") else ""
    elif problem["type"] == "value_error" and not _is_small(problem["input"]):
        text = f"`{param}`: {message}"
    else:
        text = f"`{param}`: {message[:1].lower()}{message[1:]}, got {_short(problem['input'])}"
    return InvalidRequestError(text, param=param or None)


def name_of(key: str) -> str:
    """A key as part of a ``param``. A client may have chosen it: bounded, and without line ends and markup."""
    return key if re.fullmatch(r"[\w.-]{1,64}", key, re.ASCII) else ascii(key[:64])


def install_error_handlers(app: FastAPI) -> None:
    """Puts routing errors (404, 405), FastAPI's own and ours into the envelope."""

    @app.exception_handler(BlockserveError)
    async def _ours(_: Request, error: BlockserveError) -> JSONResponse:
        if status_of(error) >= 500:
            logger.warning("request failed: %s: %s", error.code, error.message)
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        message, code = str(error.detail), None
        if error.status_code == 404:
            message, code = f"Unknown path: {_what(request)}", "not_found"
        elif error.status_code == 405:
            message = f"Method not allowed: {_what(request)}"
            code = "method_not_allowed"
        return JSONResponse(
            envelope(error.status_code, message, code=code), error.status_code, headers=error.headers
        )

    @app.exception_handler(RequestValidationError)
    async def _validation(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(envelope(400, str(error.errors()[0]["msg"]), code="invalid_request"), 400)


def _what(request: Request) -> str:
    # Not `request.url`, which is put together with the client's Host header and then parsed.
    return f"{request.method[:32]} {request.scope['path'][:256]!a}"


def _is_small(value: Any) -> bool:
    return value is None or (isinstance(value, str | int | float) and len(str(value)) <= 80)


def _short(value: Any) -> str:
    """A client's own value, quoted and bounded; lists and objects are only counted."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
