"""schemathesis makes requests from two descriptions: OpenAI's public one and our own. No 5xx; answers conform."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wire
from clients import NEEDS_CLIENTS, run
from running_server import GOLDEN, Server, engine, serve

pytestmark = [pytest.mark.conformance, NEEDS_CLIENTS]

EXAMPLES = 200
SEED = 1
MODELS = ["qwen", "llada"]
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
]


@pytest.fixture(scope="module")
def short_server(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A context of 128: requests without a limit end soon, also 128 choices of them."""
    paths = {"qwen": "qwen3_dense_untied", "llada": "llada2_b32"}
    models = [
        {
            "name": name,
            "path": str(GOLDEN / path),
            "engine": engine(backend, max_num_seqs=32, max_model_len=128),
        }
        for name, path in paths.items()
    ]
    with serve({"models": models}, tmp_path_factory.mktemp("short")) as running:
        yield running


def with_our_models(document: dict[str, Any], *schemas: str) -> dict[str, Any]:
    """Names of other models would all end in the same 404."""
    document = copy.deepcopy(document)
    for name in schemas:
        schema = document["components"]["schemas"][name]
        for part in [schema, *schema.get("allOf", [])]:
            if "model" in part.get("properties", {}):
                part["properties"]["model"] = {"type": "string", "enum": MODELS}
    return document


def openai_document() -> dict[str, Any]:
    """OpenAI's, with what it leaves out: the errors, and that both endpoints may stream."""
    document = with_our_models(wire.DOCUMENT, "CreateChatCompletionRequest", "CreateCompletionRequest")
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"]["4XX"] = {"description": "error", "content": error}
            if path in ("/chat/completions", "/completions"):
                operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return document


def check(server: Server, document: dict[str, Any], base: str, checks: list[str], folder: Path) -> None:
    (folder / "document.json").write_text(json.dumps(document))
    done = run(
        [
            "schemathesis", "run", "document.json", "--url", server.url + base, "--checks", ",".join(checks),
            "--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES), "--seed", str(SEED),
            "--continue-on-failure", "--no-shrink", "--request-timeout", "60", "--warnings", "off",
            "--suppress-health-check", "all", "--generation-database", "none", "--no-color",
        ],
        cwd=folder,
        timeout=3000,
    )  # fmt: skip
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    for model in MODELS:
        server.wait_idle(model)


@pytest.mark.timeout(3600)
def test_the_document_of_openai(short_server: Server, tmp_path: Path) -> None:
    check(short_server, openai_document(), "/v1", CHECKS, tmp_path)


@pytest.mark.timeout(3600)
def test_our_own_document(short_server: Server, tmp_path: Path) -> None:
    """Also: what the schema forbids is refused, and so are methods that it does not list."""
    document = short_server.client.get("/openapi.json").json()
    schemas = [
        name for name, s in document["components"]["schemas"].items() if "model" in s.get("properties", {})
    ]
    assert len(schemas) >= 2
    checks = [*CHECKS, "negative_data_rejection", "unsupported_method"]
    check(short_server, with_our_models(document, *schemas), "", checks, tmp_path)
