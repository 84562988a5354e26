"""What surrounds every route: request ids, the last net under unexpected exceptions, header limits, API keys, CORS.

All of it pure ASGI, because Starlette's BaseHTTPMiddleware stands between a stream and its client's disconnect.
"""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.openai.api_keys import ApiKeys
from deployments.openai.errors import HTTPStatusError, envelope, error_response, internal_error_response

logger = logging.getLogger(__name__)

#: What a client's request id may look like; anything else is replaced. It is only echoed and logged.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@\-]{1,128}")
#: What a header field counts beyond its name and value, as in HTTP/2's SETTINGS_MAX_HEADER_LIST_SIZE.
_FIELD_OVERHEAD = 32
#: What probes and browsers read without a key. The page is static; what it asks for needs one.
_OPEN_PATHS = frozenset({"/", "/health", "/ready"})


def is_request_id(text: str) -> bool:
    """Whether a client's request id is used as it is."""
    return _REQUEST_ID.fullmatch(text) is not None


class RequestContextMiddleware:
    """Puts ``request_id`` into ``request.state`` and, with ``add_header``, ``x-request-id`` into every response."""

    def __init__(self, app: ASGIApp, add_header: bool = True) -> None:
        self._app = app
        self._add_header = add_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if is_request_id(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._add_header:
                    MutableHeaders(raw=message["headers"])["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed unexpectedly", request_id)
            if not started:
                await internal_error_response()(scope, receive, send_with_id)


class HeaderLimitMiddleware:
    """414 and 431 for URLs and headers above ``max_bytes``: the servers in front have no limit of their own."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._problem(scope)) is not None:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> HTTPStatusError | None:
        limit = self._max_bytes
        if len(scope.get("raw_path") or scope["path"]) + len(scope.get("query_string", b"")) > limit:
            return HTTPStatusError(414, f"The URL may have at most {limit} bytes", code="uri_too_long")
        size = sum(len(name) + len(value) + _FIELD_OVERHEAD for name, value in scope["headers"])
        if size > limit:
            return HTTPStatusError(
                431,
                f"The header fields may have at most {limit} bytes, {_FIELD_OVERHEAD} added for each",
                code="header_fields_too_large",
            )
        return None


class ApiKeyMiddleware:
    """401 for every request without one of the keys, whatever its path, except those of probes and the page."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, metrics_open: bool = False) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = _OPEN_PATHS | ({"/metrics"} if metrics_open else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # there is no such route
            return
        if scope["type"] == "http" and not self._is_open(scope):
            values = Headers(scope=scope).getlist("authorization")
            if (problem := self._problem(values)) is not None:
                content = envelope(401, problem, code="invalid_api_key")
                response = JSONResponse(content, 401, headers={"www-authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        # A prefix that is not found is left on, and then nothing is open.
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        return scope["method"] in ("GET", "HEAD") and (path or "/") in self._open_paths

    def _problem(self, values: list[str]) -> str | None:
        if not values:
            return "An API key is needed: send it in the header `Authorization: Bearer KEY`"
        scheme, _, key = values[0].partition(" ")
        if len(values) > 1 or scheme.lower() != "bearer":
            return "The header must be `Authorization: Bearer KEY`, once"
        # Headers decodes latin-1.
        if not self._keys.accepts(key.strip().encode("latin-1")):
            return "The API key is not valid"
        return None


class EnvelopeCORSMiddleware(CORSMiddleware):
    """CORS for the configured origins; a refused preflight is an envelope like every other error.

    Outside of ``ApiKeyMiddleware``: a browser's preflight never carries a key, and a page must be able to read a 401.
    """

    def __init__(self, app: ASGIApp, allow_origins: tuple[str, ...]) -> None:
        super().__init__(
            app,
            allow_origins=allow_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),  # clients have headers of their own, such as x-stainless-lang
            expose_headers=("x-request-id", "retry-after"),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        message = bytes(response.body).decode()
        return JSONResponse(
            envelope(response.status_code, message, code="cors_refused"), response.status_code, headers=kept
        )
