import json

import numpy as np
import pytest

from replicas.decoding.unmasking import edit, num_steps, transfer_count, unmask, unmask_and_edit
from replicas.protocol import DiffusionParams

GOLDEN = ("llada2_b32", "llada2_b8", "llada2_tp")
MASK = 99


def traced_steps(golden_dir, name, file):
    """(params, block length, canvas before the step, step) of every recorded step with predictions."""
    meta = json.loads((golden_dir / name / "meta.json").read_text())
    length = meta["block_length"]
    for case in json.loads((golden_dir / name / file).read_text()):
        if "pred" not in case["steps"][0]:
            continue
        given = len(case["prompt_ids"])
        canvas = case["prompt_ids"] + [meta["mask_id"]] * (len(case["canvas_after"]) - given)
        step_in_block, block = 0, None
        for step in case["steps"]:
            step_in_block = step_in_block + 1 if step["block"] == block else 0
            block = step["block"]
            yield case, meta["mask_id"], length, list(canvas), step_in_block, step
            for position, token in step["set"]:
                canvas[position] = token


@pytest.mark.parametrize("name", GOLDEN)
def test_llada20_decides_what_the_reference_decides(golden_dir, name):
    count = 0
    for case, mask, length, canvas, index, step in traced_steps(golden_dir, name, "generate_llada20.json"):
        params = DiffusionParams(steps=case["params"]["steps"], threshold=case["params"]["threshold"])
        start = step["block"] * length
        masked = [p for p in range(start, start + length) if canvas[p] == mask]
        steps = num_steps(params, case["params"]["gen_length"], length)
        chosen = unmask(
            [step["conf"][p - start] for p in masked], params.threshold, transfer_count(index, steps, length)
        )
        assert [[masked[i], step["pred"][masked[i] - start]] for i in chosen] == step["set"]
        count += 1
    assert count > 20


@pytest.mark.parametrize("name", GOLDEN)
def test_llada21_changes_what_the_reference_changes(golden_dir, name):
    edits = fills = 0
    for case, mask, length, canvas, _, step in traced_steps(golden_dir, name, "generate_llada21.json"):
        start = step["block"] * length
        first = max(start, len(case["prompt_ids"]))
        changes = unmask_and_edit(
            canvas[first : start + length],
            step["pred"][first - start :],
            step["conf"][first - start :],
            mask_token_id=mask,
            threshold=case["params"]["threshold"],
            editing_threshold=case["params"]["editing_threshold"],
            num_to_transfer=case["params"].get("num_to_transfer", 1),
        )
        assert [[first + i, token] for i, token in changes] == step["set"]
        fills += sum(canvas[first + i] == mask for i, _ in changes)
        edits += sum(canvas[first + i] != mask for i, _ in changes)
    assert fills > 20
    assert edits > 0


def test_schedule_splits_the_block_and_gives_the_rest_to_the_first_steps():
    assert [transfer_count(i, 3, 8) for i in range(4)] == [3, 3, 2, 0]
    assert [transfer_count(i, 64, 32) for i in (0, 31, 32, 63)] == [1, 1, 0, 0]
    for length in (8, 32):
        for steps in range(1, 70):
            assert sum(transfer_count(i, steps, length) for i in range(steps)) == length


def test_steps_are_the_block_length_unless_given():
    assert num_steps(DiffusionParams(), 1, 32) == 32
    assert num_steps(DiffusionParams(steps=32), 6, 32) == 6
    assert num_steps(DiffusionParams(steps=32, minimal_topk=8), 64, 32) == 8


def test_threshold_is_strict_and_compared_in_float32():
    at = float(np.float32(0.6))  # larger than the float64 0.6
    assert unmask([0.1, at, 0.2], 0.6, 1) == [1]  # by rank
    assert unmask([at, at, 0.9], 0.6, 1) == [2]
    assert unmask([0.7, 0.65, 0.9], 0.6, 1) == [0, 1, 2]


def test_rank_decides_when_too_few_are_confident():
    assert unmask([0.9, 0.2, 0.3, 0.1], 0.8, 2) == [0, 2]
    assert unmask([0.9, 0.2], 0.8, 5) == [0, 1]
    assert unmask([0.5, 0.5, 0.5], 0.8, 2) == [0, 1]  # ties: the leftmost


def test_every_step_decides_at_least_one():
    for length in (1, 2, 7, 32):
        assert unmask([0.01] * length, 1.0, transfer_count(0, 32, 32))


def test_edits_need_another_token_and_a_confidence_above_the_threshold():
    assert edit([1, 2, 3], [1, 5, 6], [0.99, 0.9, 0.4], 0.5) == [1]
    assert edit([1], [2], [0.5], 0.5) == []
    changes = unmask_and_edit(
        [MASK, 4, MASK, 6],
        [1, 2, 3, 6],
        [0.2, 0.8, 0.9, 1.0],
        mask_token_id=MASK,
        threshold=0.5,
        editing_threshold=0.7,
        num_to_transfer=1,
    )
    assert changes == [(1, 2), (2, 3)]
