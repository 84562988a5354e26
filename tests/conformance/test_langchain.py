"""langchain-openai against the server, by langchain-tests' standard suite for chat models."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from clients import NEEDS_CLIENTS, run
from running_server import Server

pytestmark = [pytest.mark.conformance, NEEDS_CLIENTS, pytest.mark.timeout(1800)]

SUITE = Path(__file__).parent / "langchain_suite.py"
#: Needs a model that chooses a tool by itself, or fills in what the question said (a text; a Chinese name; the
#: keys of a JSON object without a schema): not these two.
NEEDS_SENSE = {
    "test_agent_loop", "test_bind_runnables_as_tools", "test_json_mode", "test_unicode_tool_call_integration",
}  # fmt: skip
#: Pydantic's old models go through tools, which this model's template does not have.
NEEDS_TOOLS = {"TestSmolLM2::test_structured_output_pydantic_2_v1"}
#: Inputs that no model here takes, and a benchmark that replays recorded answers.
SKIPPED = {
    "test_anthropic_inputs", "test_audio_inputs", "test_image_inputs", "test_image_tool_message", "test_pdf_inputs",
    "test_pdf_tool_message", "test_stream_time",
}  # fmt: skip


def test_standard_suite(chat_server: Server, tmp_path: Path) -> None:
    done = run(
        [
            "python", "-m", "pytest", "-q", "--noconftest", "-c", "/dev/null", "--rootdir", str(tmp_path),
            "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--tb=short", "--junitxml", "results.xml",
            # The client keeps its connections across tests, so these share an event loop.
            "-o", "asyncio_default_fixture_loop_scope=session", "-o", "asyncio_default_test_loop_scope=session",
            str(SUITE),
        ],
        cwd=tmp_path,
        timeout=1700,
        SERVER_URL=chat_server.url,
    )  # fmt: skip
    outcomes: dict[str, set[str]] = {"passed": set(), "failure": set(), "error": set(), "skipped": set()}
    for case in ElementTree.parse(tmp_path / "results.xml").iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in outcomes), "passed")
        outcomes[outcome].add(f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}")
    outcomes["failure"] -= NEEDS_TOOLS
    base = {name: {test.split("::")[1].split("[")[0] for test in tests} for name, tests in outcomes.items()}
    print({name: len(tests) for name, tests in outcomes.items()})
    print("pass, though not expected to:", sorted(base["passed"] & NEEDS_SENSE))
    assert not outcomes["error"]
    assert base["failure"] <= NEEDS_SENSE, done.stdout[-8000:]
    # The other model has no tools, so the suite leaves out more.
    assert {test.split("::")[1].split("[")[0] for test in outcomes["skipped"] if "Qwen3" in test} <= SKIPPED
    assert {"test_invoke", "test_astream", "test_usage_metadata_streaming", "test_stop_sequence"} <= base[
        "passed"
    ]
