"""In Serve's HTTP proxy, before Serve reads a request's headers.

The proxy obeys headers of its own that any client may send: a timeout, a session, a multiplexed model, whether a
disconnect counts. It answers 500 when one of them is not UTF-8. None is meant for clients of this application, so they
are taken out here. ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.proxy_guard:middlewares`` puts this in
place; ``blockserve serve`` sets it.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.openai.middleware import is_request_id

#: With ``-`` for ``_``, which Serve takes for the same.
_SERVE_HEADERS = frozenset(
    {
        b"serve-multiplexed-model-id",
        b"x-session-id",
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
    }
)


def middlewares() -> list[Middleware]:
    return [Middleware(ProxyGuard)]


class ProxyGuard:
    """Takes out Serve's own headers, and request ids that would not be echoed: Serve then makes one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            scope["headers"] = [(name, value) for name, value in scope["headers"] if _passes(name, value)]
        await self._app(scope, receive, send)


def _passes(name: bytes, value: bytes) -> bool:
    plain = name.lower().replace(b"_", b"-")
    if plain == b"x-request-id":
        return is_request_id(value.decode("latin-1"))
    return plain not in _SERVE_HEADERS
