"""langchain-openai against the server, by langchain-tests' standard suite for chat models."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from clients import NEEDS_CLIENTS, run
from running_server import engine, serve
from tool_model import fit

pytestmark = [pytest.mark.conformance, NEEDS_CLIENTS, pytest.mark.timeout(1800)]

SUITE = Path(__file__).parent / "langchain_suite.py"
#: What the demo model does not do: to find the keys of a JSON object without a schema, and tools (of which Pydantic's
#: old models make use): its template has none. The other model does both.
NOT_SMOLLM2 = {"test_json_mode", "test_structured_output_pydantic_2_v1"}
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


def test_standard_suite(backend: str, tool_model: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.jsonl"
    outcomes, printed = run_suite(tmp_path, "TestQwen3", SERVER_URL="http://none", ANSWER_SHEET=str(sheet))
    assert not outcomes["failure"] | outcomes["error"], f"the sheet itself is wrong:\n{printed}"
    fit(tool_model, sheet, tmp_path / "fitted")
    small = {"num_cpus": 0.3}
    models = [
        {"name": "fitted", "path": str(tmp_path / "fitted"), "engine": engine(backend), "resources": small},
        {
            "name": "smollm2",
            "path": "demo://smollm2-135m-instruct",
            "engine": engine(backend),
            "resources": small,
        },
    ]
    with serve({"ingress": {"num_cpus": 0}, "models": models}, tmp_path) as server:
        outcomes, printed = run_suite(tmp_path, "Test", SERVER_URL=server.url)
    failed = outcomes["failure"] | outcomes["error"]
    assert not {test for test in failed if "SmolLM2" not in test}, printed
    assert bare(failed) <= NOT_SMOLLM2, printed
    # The suite leaves out the tools for a model that has none.
    assert bare({test for test in outcomes["skipped"] if "SmolLM2" not in test}) <= SKIPPED
    passed = {test for test in outcomes["passed"] if "Qwen3" in test}
    assert {"test_invoke", "test_agent_loop", "test_json_mode", "test_stop_sequence"} <= bare(passed)
