"""Faults that the specification names, put into the running plugin: the reference's cases must notice each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    script = Path(__file__).parent / "in_process.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path_factory.mktemp("faults"))],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=script.parents[2],
        env=None,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, (done.stdout + done.stderr)[-4000:]  # noqa: PT018
    return json.loads(lines[-1].removeprefix("RESULT "))


def test_without_a_fault_all_cases_are_right(result):
    assert result["right"] == result["right_again"] == result["cases"] >= 19


@pytest.mark.parametrize("fault", ["causal", "unsplit", "no_commit"])
def test_a_fault_is_noticed(result, fault):
    assert result[fault] < result["cases"] / 2


def test_preemptions_change_nothing(result):
    assert result["preempted"]["preemptions"] >= 20
    assert result["preempted"]["equal"]


def test_the_mask_token_is_never_chosen(result):
    """On a checkpoint that often predicts it, and the torch engine agrees on all tokens. Without the ban one fails."""
    found = result["mask_ban"]
    assert found["masks"] == 0
    assert found["equal"]
    assert found["masks_allowed"] > 0 or not found["equal_allowed"]
