"""The HTTP surface: FastAPI routes, nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI

from configs.schema import BlockserveConfig
from deployments.openai.contracts import Dispatcher, ModelEntry


def create_app(
    config: BlockserveConfig,
    models: Mapping[str, ModelEntry],
    dispatcher: Dispatcher,
) -> FastAPI:
    """The application's HTTP interface.

    ``models`` maps model names to entries, and may be filled later: it is read at each request. On Ray Serve,
    use the late-bound form, so that nothing here is ever pickled::

        @serve.deployment
        @serve.ingress()
        class Ingress:
            def __init__(self, config): ...            # builds models and dispatcher
            def __serve_build_asgi_app__(self):        # called after the constructor
                return create_app(self.config, self.models, self.dispatcher)
    """
    raise NotImplementedError
