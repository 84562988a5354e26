"""Limits on what one ingress replica lets in, in logical requests and tokens.

Serve's own limits count RPCs, of which there is one per batch, so they cannot do this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from configs.schema import AdmissionConfig
from replicas.errors import InvalidRequestError, QueueFullError


@dataclass(slots=True)
class _Live:
    requests: int = 0
    tokens: int = 0


class AdmissionController:
    """Counts the live requests of each model. For one event loop; not for several threads."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._live: dict[str, _Live] = {}

    def live_requests(self, model: str) -> int:
        return self._live[model].requests if model in self._live else 0

    def live_tokens(self, model: str) -> int:
        return self._live[model].tokens if model in self._live else 0

    def refuse_too_many(self, num_requests: int) -> None:
        """Raises ``InvalidRequestError`` when one HTTP request asks for more choices than there may ever be."""
        if num_requests > self._config.max_live_requests:
            raise InvalidRequestError(
                f"`n`: one request may have at most {self._config.max_live_requests} choices over all its prompts, "
                f"got {num_requests}",
                param="n",
            )

    @contextmanager
    def admit(
        self, model: str, num_requests: int, num_tokens: int, token_field: str = "max_tokens"
    ) -> Iterator[None]:
        """Holds room for ``num_requests`` engine requests (the choices of one HTTP request), all or none, and
        for their prompt and allowed new tokens; gives it back when the ``with`` block ends, however it ends.
        ``token_field``: the request's name for the limit of new tokens.

        Raises ``QueueFullError`` when there is no room now, ``InvalidRequestError`` when there never will be.
        """
        self.refuse_too_many(num_requests)
        self._refuse_too_long(num_tokens, token_field)
        live = self._live.setdefault(model, _Live())
        limits = self._config
        if live.requests + num_requests > limits.max_live_requests:
            raise QueueFullError(
                f"The model {model!r} has {live.requests} live requests, of at most "
                f"{limits.max_live_requests}; try again later",
                retry_after_s=limits.retry_after_s,
            )
        if limits.max_live_tokens is not None and live.tokens + num_tokens > limits.max_live_tokens:
            raise QueueFullError(
                f"The model {model!r} has {live.tokens} live tokens, of at most {limits.max_live_tokens}, "
                f"and this request asks for {num_tokens}; try again later",
                retry_after_s=limits.retry_after_s,
            )
        live.requests += num_requests
        live.tokens += num_tokens
        try:
            yield
        finally:
            live.requests -= num_requests
            live.tokens -= num_tokens

    def _refuse_too_long(self, num_tokens: int, token_field: str) -> None:
        limits = self._config
        if limits.max_live_tokens is not None and num_tokens > limits.max_live_tokens:
            raise InvalidRequestError(
                f"`{token_field}`: prompt and new tokens of one request may be at most {limits.max_live_tokens} "
                f"over all its choices, got {num_tokens}",
                param=token_field,
            )
