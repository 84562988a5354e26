"""The HTTP surface: FastAPI routes, nothing else."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from configs.schema import BlockserveConfig
from deployments.admission import AdmissionController
from deployments.openai import page
from deployments.openai.api_keys import ApiKeys, load_api_keys
from deployments.openai.body import read_body
from deployments.openai.contracts import Dispatcher, ModelEntry, ModelState
from deployments.openai.errors import ClientGoneError, envelope, install_error_handlers
from deployments.openai.generation import ChoiceDelta, Generation
from deployments.openai.metrics import IngressMetrics, RequestRecord
from deployments.openai.middleware import (
    ApiKeyMiddleware,
    EnvelopeCORSMiddleware,
    HeaderLimitMiddleware,
    RequestContextMiddleware,
)
from deployments.openai.model import RequestModel
from deployments.openai.openapi import ERRORS, describe, install_schemas
from deployments.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
    StreamOptions,
)
from deployments.openai.responses import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ResponseBuilder,
    model_object,
)
from deployments.openai.responses_builder import ResponsesBuilder
from deployments.openai.responses_request import ResponsesRequest, translate_responses
from deployments.openai.sse import EventStreamResponse, event_stream, unless_disconnected
from deployments.openai.tokenization import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from deployments.openai.translate import TranslatedRequest, translate_chat, translate_completion
from replicas.errors import ModelNotFoundError, ModelNotReadyError

Body = TypeVar("Body", bound=GenerationBody | ResponsesRequest)
Model = TypeVar("Model", bound=RequestModel)


def create_app(
    config: BlockserveConfig,
    models: Mapping[str, ModelEntry],
    dispatcher: Dispatcher,
    *,
    api_keys: ApiKeys | None = None,
    add_request_id_header: bool = True,
) -> FastAPI:
    """The application's HTTP interface.

    ``models`` maps model names to entries, and may be filled later: it is read at each request. ``api_keys`` None
    means those of ``config.security``; raises ``ApiKeysError`` when they cannot be read. Behind Serve's HTTP proxy,
    which appends ``x-request-id`` to every response itself, ``add_request_id_header`` must be False, or clients get it
    twice. Use the late-bound form there, so that nothing here is ever pickled::

        @serve.deployment
        @serve.ingress()
        class Ingress:
            def __init__(self, config): ...            # builds models and dispatcher
            def __serve_build_asgi_app__(self):        # called after the constructor
                return create_app(..., add_request_id_header=False)
    """
    app = FastAPI(
        title="Blockserve",
        version=_version(),
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
    )
    # From the inside out.
    api_keys = api_keys or load_api_keys(config.security)
    if api_keys is not None:
        app.add_middleware(ApiKeyMiddleware, keys=api_keys, metrics_open=config.security.metrics_open)
    app.add_middleware(HeaderLimitMiddleware, max_bytes=config.admission.max_header_bytes)
    app.add_middleware(RequestContextMiddleware, add_header=add_request_id_header)
    if config.security.cors_allow_origins:
        app.add_middleware(EnvelopeCORSMiddleware, allow_origins=config.security.cors_allow_origins)
    install_error_handlers(app)
    install_schemas(app)
    app.state.admission = admission = AdmissionController(config.admission)
    app.state.metrics = metrics = IngressMetrics()

    def find(name: str) -> ModelEntry:
        if entry := models.get(name):
            return entry
        if any(model.name == name for model in config.models):
            raise ModelNotReadyError(f"The model {name!r} is loading; try again later", param="model")
        raise ModelNotFoundError(f"The model {name[:128]!a} does not exist", param="model")

    async def read(request: Request, body_model: type[Model]) -> Model:
        limits = config.admission
        return await read_body(request, body_model, limits.max_body_bytes, limits.body_timeout_s)

    async def respond(
        request: Request,
        body_model: type[Body],
        translate: Callable[..., Awaitable[TranslatedRequest]],
        builder_class: type[ResponseBuilder],
    ) -> Response:
        arrival, deadline = time.monotonic(), time.time() + config.admission.request_timeout_s
        body = await read(request, body_model)
        entry = find(body.model)
        admission.refuse_too_many(body.num_choices)  # before work is done for each of them
        translated = await translate(body, entry, deadline=deadline)
        async with AsyncExitStack() as stack:
            stack.enter_context(
                admission.admit(
                    entry.name,
                    len(translated.requests),
                    translated.num_live_tokens,
                    translated.new_token_field,
                )
            )
            record = stack.enter_context(
                RequestRecord(
                    metrics,
                    request.state.request_id,
                    entry.name,
                    translated.num_prompt_tokens,
                    arrival=arrival,
                    stream=body.stream,
                )
            )
            generation = Generation(translated, entry, dispatcher)
            record.choices = generation.choices
            builder = builder_class(entry, translated, generation.choices)
            deltas = await stack.enter_async_context(aclosing(_recorded(generation, record)))
            try:
                if not body.stream:
                    return JSONResponse(await unless_disconnected(request, _collect(builder, deltas)))
                # The status line waits for the first output: a failure before it is an HTTP status.
                first = await unless_disconnected(request, anext(deltas))
            except ClientGoneError as error:
                record.on_error(error)
                return Response(status_code=499)
            options = body.stream_options or StreamOptions()
            events = event_stream(builder, first, deltas, options, record.on_error)
            return EventStreamResponse(
                events, stack.pop_all().aclose, config.admission.write_timeout_s, record.on_error
            )

    @app.post(
        "/v1/chat/completions", openapi_extra=describe(ChatCompletionRequest, "ChatCompletion", streams=True)
    )
    async def create_chat_completion(request: Request) -> Response:
        return await respond(request, ChatCompletionRequest, translate_chat, ChatResponseBuilder)

    @app.post("/v1/completions", openapi_extra=describe(CompletionRequest, "Completion", streams=True))
    async def create_completion(request: Request) -> Response:
        return await respond(request, CompletionRequest, translate_completion, CompletionResponseBuilder)

    @app.post("/v1/responses", openapi_extra=describe(ResponsesRequest, "Response", streams=True))
    async def create_response(request: Request) -> Response:
        return await respond(request, ResponsesRequest, translate_responses, ResponsesBuilder)

    @app.post("/tokenize", openapi_extra=describe(TokenizeRequest, "Tokens"))
    async def create_tokens(request: Request) -> dict[str, Any]:
        body = await read(request, TokenizeRequest)
        return await tokenize(body, find(body.model))

    @app.post("/detokenize", openapi_extra=describe(DetokenizeRequest, "Text"))
    async def create_text(request: Request) -> dict[str, Any]:
        body = await read(request, DetokenizeRequest)
        return await detokenize(body, find(body.model))

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [model_object(entry) for entry in models.values()]}

    @app.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> dict[str, Any]:
        return model_object(find(model_id))

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        states = await dispatcher.model_states()
        listed, missing = [], []
        for model in config.models:
            state = states.get(model.name, ModelState(False, "unknown to the dispatcher"))
            if state.ready and model.name not in models:
                state = ModelState(False, "the tokenizer is loading", state.replicas)
            listed.append(
                {
                    "id": model.name,
                    "ready": state.ready,
                    "reason": state.reason,
                    "replicas": len(state.replicas),
                }
            )
            if not state.ready:
                missing.append(model.name)
        if not missing:
            return JSONResponse({"status": "ready", "models": listed})
        content = envelope(503, f"Not ready: {', '.join(missing)}", code="model_not_ready")
        return JSONResponse(
            {"status": "not ready", "models": listed, **content}, 503, headers={"retry-after": "1"}
        )

    @app.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics() -> Response:
        return Response(
            metrics.render(await dispatcher.model_states()), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": _version()}

    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        return HTMLResponse(page.HTML, headers=page.HEADERS)

    return app


async def _collect(builder: ResponseBuilder, deltas: AsyncGenerator[ChoiceDelta, None]) -> dict[str, Any]:
    async for delta in deltas:
        builder.add(delta)
    return builder.response()


async def _recorded(generation: Generation, record: RequestRecord) -> AsyncGenerator[ChoiceDelta, None]:
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            record.on_tokens(delta.index, delta.num_tokens)
            yield delta


def _version() -> str:
    try:
        return importlib.metadata.version("blockserve")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
