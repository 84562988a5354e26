"""What surrounds every route: request ids, and the last net under unexpected exceptions."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.openai.errors import internal_error_response

logger = logging.getLogger(__name__)

#: What a client's request id may look like; anything else is replaced. It is only echoed and logged.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@\-]{1,128}")


class RequestContextMiddleware:
    """Puts ``request_id`` into ``request.state`` and, with ``add_header``, ``x-request-id`` into every response.

    Pure ASGI, because Starlette's BaseHTTPMiddleware stands between a stream and its client's disconnect.
    """

    def __init__(self, app: ASGIApp, add_header: bool = True) -> None:
        self._app = app
        self._add_header = add_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
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
