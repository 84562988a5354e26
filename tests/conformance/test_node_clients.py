"""The official Node client and Vercel's AI SDK, in Node, as their users install them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from running_server import Server

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]
SCRIPTS = Path(__file__).parent / "node"
MODELS = ["tools", "words"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts beside the packages that package.json pins."""
    folder = tmp_path_factory.mktemp("node")
    for file in SCRIPTS.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    done = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund"], cwd=folder, capture_output=True, text=True, timeout=300
    )
    if done.returncode != 0:
        pytest.skip(f"npm install: {done.stderr[-300:]}")
    return folder


def run(folder: Path, script: str, server: Server, model: str, features: str = "") -> dict[str, Any]:
    done = subprocess.run(
        ["node", script, server.url, model, features], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("model", MODELS)
def test_openai(chat_server: Server, installed: Path, model: str) -> None:
    result = run(installed, "openai.mjs", chat_server, model)
    text = result["plain"]
    assert text
    assert result["streamed"] == result["helper"] == text
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert result["streamedUsage"][count] == result["usage"][count] > 0
    assert result["finish"] in ("stop", "length")
    assert len(result["two"]) == 2
    assert result["stopped"] == (text[: text.index(result["stop"])] if result["stop"] else text)
    assert result["completions"] == [0, 1]
    assert set(result["models"]) >= set(MODELS)
    refusals = {"empty": ("messages", "invalid_request"), "hot": ("temperature", "invalid_request")}
    for name, (param, code) in refusals.items():
        assert result[name] == {"kind": "BadRequestError", "status": 400, "param": param, "code": code}
    missing = {"kind": "NotFoundError", "status": 404, "param": "model", "code": "model_not_found"}
    assert result["missing"] == missing


@pytest.mark.parametrize("model", MODELS)
def test_ai_sdk(chat_server: Server, installed: Path, model: str) -> None:
    result = run(installed, "ai_sdk.mjs", chat_server, model)
    text = result["plain"]
    assert text
    assert result["streamed"] == text
    assert "streamError" not in result
    for count in ("inputTokens", "outputTokens", "totalTokens"):
        assert result["streamedUsage"][count] == result["usage"][count] > 0
    assert result["finish"] in ("stop", "length")
    assert result["stopped"] == (text[: text.index(result["stop"])] if result["stop"] else text)
    assert result["seeds"][0] == result["seeds"][1]
    if (
        model == "tools"
    ):  # the other one is sure of nearly every token, and ends a text without a task at once
        assert result["seeds"][2] != result["seeds"][0]
        assert result["completion"]
    assert result["missing"] == {"status": 404, "message": "The model 'nope' does not exist"}


@pytest.mark.parametrize("script", ["openai.mjs", "ai_sdk.mjs"])
def test_tools_and_json_schema(chat_server: Server, installed: Path, script: str) -> None:
    """A random model is forced: its arguments and its JSON are what the schema allows. It may call more than once."""
    result = run(installed, script, chat_server, "tools", "tools")
    assert set(result["json"]) == {"yes"}
    assert isinstance(result["json"]["yes"], bool)
    call = result["tool"][0]
    name, given = (
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        if "function" in call
        else (call["name"], call["input"])
    )
    assert name == "answer"
    assert isinstance(given["yes"], bool)
