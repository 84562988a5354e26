"""`blockserve verify` says yes to the reference data and no to anything else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from replicas import verify_numbers
from replicas.engine.diffusion_state import DiffusionState
from replicas.engine.model_runner import ModelRunner
from replicas.models.weights import CheckpointWeights
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
    assert "not comparable" not in text
    assert text.count("up to 3 at once") == text.count("up to 8 at once") == (concurrent > 1)


@pytest.mark.slow
@pytest.mark.parametrize("concurrent", [1, 8])
def test_all_reference_data_is_equal(concurrent: int) -> None:
    status, text = verify(*sorted(GOLDEN.iterdir()), concurrent=concurrent)
    assert status == 0, text
    assert text.endswith("262 cases in 24 files: all equal")


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


def test_other_changes_in_a_step_are_a_mismatch(small: Path) -> None:
    file = small / "generate_llada20.json"
    cases = json.loads(file.read_text())
    steps = cases[1]["steps"]
    steps[0]["set"], steps[1]["set"] = steps[1]["set"], steps[0]["set"]
    file.write_text(json.dumps(cases))
    status, text = verify(small)
    assert status == 1
    assert "llada20_1: changes per step differ from index 0" in text


@pytest.mark.parametrize(
    ("file", "array", "message"),
    [
        ("forward.npz", "plain0_logits", "plain0: error"),
        ("forward.npz", "canvas3_lastblock_logits", "canvas3: error"),
        ("forward.npz", "hidden_for_plain3", "hidden states of plain3: error"),
        ("router.npz", "layer1_topk_weights", "layer1 weights: error"),
        ("router.npz", "layer2_moe_out", "layer2 output: error"),
        ("router.npz", "layer1_topk_ids", "layer1: other experts"),
        ("sampling_filters.npz", "probs2", "probs2: error"),
        ("sampling_filters.npz", "greedy_tokens", "greedy tokens differ"),
        ("sampling_filters.npz", "greedy_conf", "greedy confidence: error"),
    ],
)
def test_another_number_is_a_mismatch(small: Path, file: str, array: str, message: str) -> None:
    data = dict(np.load(small / file))
    value = data[array].flat[0]
    for other in [value + 1] if np.issubdtype(value.dtype, np.integer) else [value + 2e-4, np.nan]:
        data[array].flat[0] = other
        np.savez(small / file, **data)
        status, text = verify(small)
        assert status == 1
        assert message in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: case["output_ids"].append(1), "g0: tokens have length 40, the reference has 41"),
        (lambda case: case.update(finish="eos"), "g0: finished by length, expected stop"),
        (lambda case: case["logprobs"][3].update(logprob=-50.0), "g0 logprobs: error"),
        (lambda case: case["logprobs"][3].update(logprob=float("nan")), "g0 logprobs: error nan"),
        (lambda case: case["logprobs"][0]["top5"].append([5, 0.0]), "g0 logprobs: error inf"),
    ],
)
def test_another_greedy_answer_is_a_mismatch(tmp_path: Path, change, message: str) -> None:
    folder = tmp_path / "qwen2_5"
    shutil.copytree(GOLDEN / "qwen2_5", folder)
    cases = json.loads((folder / "greedy.json").read_text())[:1]
    change(cases[0])
    (folder / "greedy.json").write_text(json.dumps(cases))
    status, text = verify(folder)
    assert status == 1
    assert message in text


def test_other_tokens_past_eos_are_a_mismatch(tmp_path: Path) -> None:
    folder = tmp_path / "qwen2_5"
    shutil.copytree(GOLDEN / "qwen2_5", folder)
    cases = json.loads((folder / "greedy.json").read_text())
    case = next(case for case in cases if case["output_ids_ignore_eos"])
    case["output_ids_ignore_eos"][-1] += 1
    (folder / "greedy.json").write_text(json.dumps([case]))
    status, text = verify(folder)
    assert status == 1
    assert "tokens past EOS differ" in text


def test_a_sampled_case_is_run_but_not_compared(small: Path) -> None:
    """Its tokens come from torch's generator; here they are another case's, and that must not matter."""
    cases = json.loads((small / "generate_llada20.json").read_text())
    sampled = cases[1]["params"] | {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
    change_case(small, params=sampled)
    status, text = verify(small)
    assert status == 0, text
    assert "2/2 equal, 1 not comparable (sampled with torch's generator: only run to the end)" in text
    assert "(1 more not comparable): all equal" in text
    change_case(small, prompt_ids=[1] * 10**4)
    status, text = verify(small)
    assert status == 1


def test_more_forwards_than_needed_are_found(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ModelRunner.forward

    def twice(self, *args):
        list(forward(self, *args))
        return forward(self, *args)

    monkeypatch.setattr(ModelRunner, "forward", twice)
    status, text = verify(small)
    assert status == 1
    assert "model forwards, " in text
    assert verify(small, concurrent=8)[0] == 0, "in a batch there is no such number"


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
    assert f"{tmp_path / 'nowhere'}: no such directory" in text
    assert "generate_llada20.json: 3/3 equal" in text


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("forward.npz", b"PK\x03\x04 torn"),
        ("router.npz", b""),
        ("sampling_filters.npz", b"no zip"),
        ("generate_llada20.json", b"[{"),
        ("generate_llada20.json", b"{}"),
        ("generate_llada20.json", b'[{"case": "a"}]'),
        ("generate_llada20.json", b"[1]"),
    ],
)
def test_a_damaged_file_is_one_line_and_hides_nothing(small: Path, file: str, content: bytes) -> None:
    (small / file).write_bytes(content)
    lines: list[str] = []
    assert run_verify([small, GOLDEN / "qwen2_5"], out=lines.append) == 1
    (line,) = (line for line in lines if line.startswith(str(small)))
    assert file in line
    assert "\n" not in line
    assert len([line for line in lines if " equal" in line and line.startswith("llada2_b8/")]) == 3
    assert any(line.startswith("qwen2_5/greedy.json: 14/14 equal") for line in lines)
    assert lines[-1].endswith(": 1 failed")


def test_a_torn_archive_is_found(small: Path) -> None:
    content = (small / "forward.npz").read_bytes()
    (small / "forward.npz").write_bytes(content[: len(content) // 2])
    status, text = verify(small)
    assert status == 1
    assert f"{small / 'forward.npz'}: ValueError: not a readable .npz file (truncated?)" in text


def test_a_damaged_checkpoint_is_one_line(small: Path) -> None:
    file = small / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    status, text = verify(small)
    assert status == 1
    assert "model.safetensors: not a readable safetensors file" in text
    assert len(text.splitlines()) == 2


def test_a_file_is_skipped_with_a_note(small: Path) -> None:
    status, text = verify(GOLDEN / "README.md", small)
    assert status == 0
    assert "README.md: not a directory, skipped" in text


def test_nothing_to_verify_is_a_failure(tmp_path: Path) -> None:
    assert verify(GOLDEN / "README.md")[0] == 1
    assert verify(tmp_path)[0] == 1


@pytest.mark.parametrize("options", [{"engine": "tensorrt"}, {"concurrent": 0}, {"dtype": "int8"}])
def test_unknown_options_are_refused(options: dict) -> None:
    status, text = verify(GOLDEN / "qwen2_5", **options)
    assert status == 1
    assert "are supported" in text


def test_bfloat16_says_what_it_cannot_compare() -> None:
    status, text = verify(GOLDEN / "qwen3_dense_untied", dtype="bfloat16")
    assert status == 0, text
    assert "0/0 equal, 10 not comparable (a decision within 0.25)" in text
    assert text.endswith("5 cases in 2 files (10 more not comparable): all equal")


def test_bfloat16_takes_the_experts_of_float32(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = verify(small, dtype="bfloat16")
    assert status == 0, text
    assert "experts as float32 chooses them (bfloat16 itself would choose others in " in text

    def own_choice(self, token_ids):
        return verify_numbers.forward_sequence(self._model, self._info, token_ids)

    monkeypatch.setattr(verify_numbers.ExpertReplay, "forward_sequence", own_choice)
    assert verify(small, dtype="bfloat16")[0] == 1, "the replay is what makes them comparable"


def test_bfloat16_with_a_wrong_router_is_found(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay must not hide a router that goes wrong only there."""
    take = CheckpointWeights.take

    def reversed_gate(self, name, *shape, **options):
        tensor = take(self, name, *shape, **options)
        wrong = self.dtype == torch.bfloat16 and name.endswith("gate.weight")
        return tensor.flip(0) if wrong else tensor

    monkeypatch.setattr(CheckpointWeights, "take", reversed_gate)
    status, text = verify(small, dtype="bfloat16")
    assert status == 1
    assert "bfloat16 itself would choose others in" in text
