"""The plain decoding rule on scripted logits and on the original's recorded generations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replicas.demo import words_decode
from replicas.demo.llada2_module import load_module
from replicas.demo.words_decode import Decoded, Score, decode, report
from replicas.demo.words_tokenizer import EOS_ID, MASK_ID, ROLE_END_ID, VOCAB_SIZE

GOLDEN = Path(__file__).parents[2] / "golden" / "llada2_b32"


class Scripted:
    """Stands in for the model: at position p it says `answer[p]` with a probability of `confidence[p]`."""

    def __init__(self, answer: dict[int, int], confidence: dict[int, float]) -> None:
        self.answer, self.confidence = answer, confidence
        self.seen: list[list[int]] = []

    def __call__(self, ids: Tensor, block_length: int, last: int) -> Tensor:
        self.seen.append(ids[0].tolist())
        logits = torch.zeros(1, last, VOCAB_SIZE)
        for row, position in enumerate(range(ids.shape[1] - last, ids.shape[1])):
            p = self.confidence.get(position, 0.99)
            odds = torch.tensor(p / (1 - p) * (VOCAB_SIZE - 2)).log()  # the mask id is out of the draw
            logits[0, row, self.answer.get(position, EOS_ID)] = odds
        return logits


def run(script: Scripted, prompt: list[int], **options: Any) -> Decoded:
    return decode(script, prompt, **options)  # type: ignore[arg-type]


def test_confident_tokens_go_at_once_and_the_prompt_stays() -> None:
    script = Scripted({3: 65, 4: ROLE_END_ID}, {})
    got = run(script, [1, 2, 3])
    assert got == Decoded([65, ROLE_END_ID, EOS_ID], 1)
    assert script.seen[0] == [1, 2, 3] + [MASK_ID] * 29
    assert (got.text, got.visible) == ("A", 2)


def test_below_the_threshold_one_token_a_forward() -> None:
    script = Scripted({0: 1, 1: 65, 2: 66, 3: ROLE_END_ID}, {1: 0.5, 2: 0.9, 3: 0.96})
    got = run(script, [1])
    assert got.ids == [65, 66, ROLE_END_ID, EOS_ID]
    assert got.forwards == 3  # all from 3 on; then 2, the surer one; then 1
    assert script.seen[1][1:4] == [MASK_ID, MASK_ID, ROLE_END_ID]
    assert script.seen[2][1:4] == [MASK_ID, 66, ROLE_END_ID]


def test_threshold_is_strict() -> None:
    script = Scripted({}, dict.fromkeys(range(32), 0.5))
    logits = script(torch.zeros(1, 32), 32, 32)[0]
    logits[:, MASK_ID] = float("-inf")
    exact = logits.softmax(-1).max(-1).values[5].item()
    assert run(script, [1], threshold=exact).forwards == 31
    assert run(script, [1], threshold=exact - 1e-4).forwards == 1


def test_few_steps_force_more_tokens() -> None:
    unsure = dict.fromkeys(range(32), 0.5)
    assert run(Scripted({}, unsure), [1], steps=4).forwards == 4
    assert run(Scripted({}, unsure), [1], steps=1).forwards == 1


def test_blocks_follow_until_the_end_token() -> None:
    letters = dict.fromkeys(range(70), 65)
    script = Scripted(letters, {})
    got = run(script, [1] * 30)
    assert got.ids == [65] * 40 + [EOS_ID]
    assert [len(seen) for seen in script.seen] == [32, 64, 96]
    assert script.seen[2][30:64] == [65] * 34


def test_length_limit_and_banned_mask() -> None:
    got = run(Scripted(dict.fromkeys(range(64), MASK_ID), {}), [1], gen_length=8)
    assert len(got.ids) == 8
    assert MASK_ID not in got.ids


def test_generations_of_the_original_code(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = json.loads((GOLDEN / "meta.json").read_text())
    monkeypatch.setattr(words_decode, "MASK_ID", meta["mask_id"])
    monkeypatch.setattr(words_decode, "EOS_ID", meta["eos_id"])
    module = load_module(GOLDEN)
    cases = json.loads((GOLDEN / "generate_llada20.json").read_text())
    cases = cases["cases"] if isinstance(cases, dict) else cases
    compared = 0
    for case in cases:
        params = case["params"]
        if params.get("temperature") or params.get("eos_early_stop") or params.get("minimal_topk", 1) != 1:
            continue
        if case["num_forwards"] > 20:  # keeps the test short
            continue
        length = params["gen_length"]
        got = decode(
            module,
            case["prompt_ids"],
            length,
            min(params.get("steps", 32), length),
            params.get("threshold", 0.95),
        )
        assert got.ids == case["output_ids"]
        assert got.forwards == case["num_forwards"]
        compared += 1
    assert compared >= 8


def test_report_names_every_score() -> None:
    table = report({"sort": Score(asked=4, right=3, tokens=30, forwards=10), "all": Score()})
    assert "| sort | 4 | 75.0 % | 3.00 |" in table
    assert "| all | 0 | 0.0 % | 0.00 |" in table
