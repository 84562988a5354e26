"""`blockserve verify` says yes to the reference data and no to anything else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from replicas.engine.diffusion_state import DiffusionState
from replicas.verify import run_verify

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A copy of one LLaDA2 directory, with three cases of generation."""
    folder = tmp_path / "llada2_b8"
    shutil.copytree(GOLDEN / "llada2_b8", folder)
    (folder / "generate_llada21.json").unlink()
    cases = json.loads((folder / "generate_llada20.json").read_text())
    (folder / "generate_llada20.json").write_text(json.dumps(cases[:3]))
    return folder


def verify(*folders: Path, **options) -> tuple[int, str]:
    lines: list[str] = []
    status = run_verify(folders, out=lines.append, **options)
    return status, "\n".join(lines)


@pytest.mark.parametrize("concurrent", [1, 8])
def test_reference_data_is_equal(small: Path, concurrent: int) -> None:
    status, text = verify(small, GOLDEN / "qwen2_5", concurrent=concurrent)
    assert status == 0, text
    assert "generate_llada20.json: 3/3 equal" in text
    assert "greedy.json: 14/14 equal" in text
    assert "all equal" in text


def change_case(folder: Path, **changes) -> None:
    file = folder / "generate_llada20.json"
    cases = json.loads(file.read_text())
    cases[1].update(changes)
    file.write_text(json.dumps(cases))


def test_other_tokens_are_a_mismatch(small: Path) -> None:
    change_case(small, output_ids=[1, 2, 3])
    status, text = verify(small)
    assert status == 1
    assert "2/3 equal" in text
    assert "tokens differ from index 0" in text


def test_another_number_of_forwards_is_a_mismatch(small: Path) -> None:
    change_case(small, num_forwards=1)
    status, text = verify(small)
    assert status == 1
    assert "the reference has 1" in text


def test_another_logit_is_a_mismatch(small: Path) -> None:
    data = dict(np.load(small / "forward.npz"))
    data["plain0_logits"][0, 0] += 2e-4
    np.savez(small / "forward.npz", **data)
    status, text = verify(small)
    assert status == 1
    assert "plain0: error" in text


def test_an_engine_that_keeps_the_kv_of_the_last_denoising_forward_is_found(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation: blocks are taken as committed right after their last denoising forward."""
    apply = DiffusionState.apply

    def without_commit(self, row, tokens, confidence, logprobs=None):
        block = self._block
        output = apply(self, row, tokens, confidence, logprobs)
        if self._block != block:
            self.num_computed_tokens = self.canvas_start
        return output

    monkeypatch.setattr(DiffusionState, "apply", without_commit)
    status, text = verify(small)
    assert status == 1, text


def test_a_missing_directory_does_not_hide_the_others(small: Path, tmp_path: Path) -> None:
    status, text = verify(tmp_path / "nowhere", small)
    assert status == 1
    assert "nowhere" in text
    assert "generate_llada20.json: 3/3 equal" in text


def test_a_file_is_skipped_with_a_note(small: Path) -> None:
    status, text = verify(GOLDEN / "README.md", small)
    assert status == 0
    assert "README.md: not a directory, skipped" in text


def test_nothing_to_verify_is_a_failure(tmp_path: Path) -> None:
    assert verify(GOLDEN / "README.md")[0] == 1
    assert verify(tmp_path)[0] == 1


def test_bfloat16_says_what_it_cannot_compare() -> None:
    status, text = verify(GOLDEN / "qwen3_dense_untied", dtype="bfloat16")
    assert status == 0, text
    assert "10 not comparable" in text
