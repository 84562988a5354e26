"""A dispatcher that plays scripts, and what the tests of the HTTP layer share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from configs.schema import BlockserveConfig, ModelConfig
from deployments.ingress import create_app
from deployments.openai.contracts import ModelEntry, ModelState, load_model_entry
from replicas.errors import BlockserveError
from replicas.protocol import EngineStats, FinishReason, GenerationRequest, RequestOutput

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"
DOCUMENT = json.loads((TESTS / "data/openai/openai_subset.json").read_text())

Script = Callable[[GenerationRequest], Iterable[RequestOutput | float]]


def validate(name: str, value: Any) -> None:
    """Checks a JSON value against a schema of the OpenAI document."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


def validate_completion_chunk(value: dict[str, Any]) -> None:
    """The document has no null finish reason for chunks of text completions, though the API sends it."""
    choices = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in value["choices"]]
    validate("CreateCompletionResponse", value | {"choices": choices})


def load_entry(directory: str, name: str, **config: Any) -> ModelEntry:
    return load_model_entry(
        ModelConfig(name=name, path=str(GOLDEN / directory), **config), GOLDEN / directory
    )


def config_for(*entries: ModelEntry, **sections: Any) -> BlockserveConfig:
    return BlockserveConfig(models=tuple(entry.config for entry in entries), **sections)


def http_client(dispatcher: FakeDispatcher, *entries: ModelEntry) -> httpx.AsyncClient:
    """A client of an application that serves ``entries``."""
    app = create_app(config_for(*entries), {entry.name: entry for entry in entries}, dispatcher)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def byte_ids(entry: ModelEntry, text: str | bytes) -> list[int]:
    """One token per byte: the golden tokenizers have no merges."""
    table = entry.token_table
    ids = {table.piece(i): i for i in range(entry.info.vocab_size) if i not in table.special_ids}
    data = text.encode() if isinstance(text, str) else text
    return [ids[bytes([byte])] for byte in data]


def says(
    entry: ModelEntry, text: str | bytes, *, per_step: int = 1, finish: FinishReason = FinishReason.STOP
) -> Script:
    """A script that emits a text ``per_step`` tokens at a time, then EOS (or the end of the limit)."""
    ids = byte_ids(entry, text)
    if finish is FinishReason.STOP:
        ids.append(entry.info.eos_token_ids[0])

    def script(request: GenerationRequest) -> Iterable[RequestOutput | float]:
        for start in range(0, len(ids), per_step):
            last = start + per_step >= len(ids)
            yield RequestOutput(
                request.request_id,
                ids[start : start + per_step],
                finish if last else None,
                num_cached_tokens=3,
                num_forwards=start // per_step + 1,
            )

    return script


def fails(error: BlockserveError, *before: RequestOutput) -> Script:
    def script(request: GenerationRequest) -> Iterable[RequestOutput | float]:
        yield from before
        yield RequestOutput(
            request.request_id, finish_reason=FinishReason.ERROR, error=error.to_request_error()
        )

    return script


class FakeDispatcher:
    """Plays ``script`` for every request. A number in a script is a pause in seconds."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[GenerationRequest] = []
        self.live = 0
        self.aborted: list[str] = []
        self.states: dict[str, ModelState] = {}

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        self.live += 1
        finished = False
        try:
            for item in self.script(request):
                if isinstance(item, float):
                    await asyncio.sleep(item)
                    continue
                await asyncio.sleep(0)
                finished = item.finished
                yield item
        finally:
            self.live -= 1
            if not finished:
                self.aborted.append(request.request_id)

    async def model_states(self) -> dict[str, ModelState]:
        return self.states


def up(**stats: Any) -> ModelState:
    return ModelState(True, replicas={"replica-1": EngineStats(**stats)})


def events_of(text: str) -> list[Any]:
    """The events of an SSE body; ``[DONE]`` stays text."""
    assert text.endswith("\n\n")
    events = []
    for part in text[:-2].split("\n\n"):
        assert part.startswith("data: "), part
        data = part.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events
