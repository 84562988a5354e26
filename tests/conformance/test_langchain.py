"""langchain-openai against the server, by langchain-tests' standard suite for chat models."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from clients import NEEDS_CLIENTS, run
from running_server import Server, engine, serve
from tool_model import fit

pytestmark = [pytest.mark.conformance, NEEDS_CLIENTS, pytest.mark.timeout(1800)]

SUITE = Path(__file__).parent / "langchain_suite.py"
#: Need a model that chooses a tool by itself, or fills in what the question said (a text; a Chinese name; the keys of
#: a JSON object without a schema): they are asked of a model that has learnt the answers, and may fail on the others.
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


def run_suite(folder: Path, chosen: str, **environment: str) -> tuple[dict[str, set[str]], str]:
    """Outcome -> ``Class::test`` of the tests that an expression (``-k``) chooses, and what was printed."""
    done = run(
        [
            "python", "-m", "pytest", "-q", "--noconftest", "-c", "/dev/null", "--rootdir", str(folder),
            "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--tb=short", "--junitxml", "results.xml",
            # The client keeps its connections across tests, so these share an event loop.
            "-o", "asyncio_default_fixture_loop_scope=session", "-o", "asyncio_default_test_loop_scope=session",
            str(SUITE), "-k", chosen,
        ],
        cwd=folder,
        timeout=1700,
        **environment,
    )  # fmt: skip
    outcomes: dict[str, set[str]] = {"passed": set(), "failure": set(), "error": set(), "skipped": set()}
    for case in ElementTree.parse(folder / "results.xml").iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in outcomes), "passed")
        outcomes[outcome].add(f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}")
    print({name: len(tests) for name, tests in outcomes.items()})
    return outcomes, done.stdout[-8000:]


def bare(tests: set[str]) -> set[str]:
    """The names without class and parameters."""
    return {test.split("::")[1].split("[")[0] for test in tests}


def test_standard_suite(chat_server: Server, tmp_path: Path) -> None:
    outcomes, printed = run_suite(tmp_path, "not TestFitted", SERVER_URL=chat_server.url)
    assert not outcomes["error"], printed
    assert bare(outcomes["failure"] - NEEDS_TOOLS) <= NEEDS_SENSE, printed
    # The other model has no tools, so the suite leaves out more.
    assert bare({test for test in outcomes["skipped"] if "Qwen3" in test}) <= SKIPPED
    always = {"test_invoke", "test_astream", "test_usage_metadata_streaming", "test_stop_sequence"}
    assert always <= bare(outcomes["passed"])


def test_what_needs_sense(backend: str, tool_model: Path, tmp_path: Path) -> None:
    chosen = f"TestFitted and ({' or '.join(sorted(NEEDS_SENSE))})"
    sheet = tmp_path / "sheet.jsonl"
    outcomes, printed = run_suite(tmp_path, chosen, SERVER_URL="http://none", ANSWER_SHEET=str(sheet))
    assert bare(outcomes["passed"]) == NEEDS_SENSE, f"the sheet itself is wrong:\n{printed}"
    model = {"name": "fitted", "path": str(tmp_path / "fitted"), "engine": engine(backend)}
    fit(tool_model, sheet, tmp_path / "fitted")
    with serve({"models": [model]}, tmp_path) as server:
        outcomes, printed = run_suite(tmp_path, chosen, SERVER_URL=server.url)
    assert bare(outcomes["passed"]) == NEEDS_SENSE, printed
    assert not outcomes["failure"] | outcomes["error"] | outcomes["skipped"], printed
