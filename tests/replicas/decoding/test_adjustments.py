"""Grammar masks, bias and penalties against transformers' processors and the published formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor
from transformers.generation.logits_process import SequenceBiasLogitsProcessor, TemperatureLogitsWarper

from replicas.decoding.adjustments import LogitAdjustment, Penalties, make_bias
from replicas.decoding.sampling import SamplingRows, apply_grammars, filtered_probs, select_tokens

VOCAB = 97
TOKENS = [5, 6, 7, 5, 90, 3, 3, 3, 41]
NUM_PROMPT = 4


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(11)) * 4


def adjusted(logits: torch.Tensor, **what) -> torch.Tensor:
    """The logits that the token of one row is chosen from."""
    rows = SamplingRows()
    rows.append(
        temperature=0.0, top_k=0, top_p=1.0, seed=0, position=0, step=0, adjustment=LogitAdjustment(**what)
    )
    changed = logits[None].clone()
    tokens, _ = select_tokens(changed, rows)
    assert tokens.item() == changed.argmax().item()
    return changed[0]


@pytest.mark.parametrize("penalty", [0.6, 1.3, 2.0])
def test_repetition_penalty_is_that_of_transformers(logits, penalty):
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([TOKENS]), logits[None].clone())[0]
    row = adjusted(logits, penalties=Penalties.of(TOKENS, NUM_PROMPT, repetition=penalty))
    torch.testing.assert_close(row, expected)
    assert not torch.equal(row, logits)


@pytest.mark.parametrize("penalty", [1e-38, 1e-45, 1e38])
def test_extreme_repetition_penalties_leave_numbers(logits, penalty):
    row = adjusted(logits, penalties=Penalties.of(TOKENS, NUM_PROMPT, repetition=penalty))
    ones = torch.ones(1)
    probs = filtered_probs(row[None], ones, torch.zeros(1, dtype=torch.int64), ones)
    assert probs.sum().item() == pytest.approx(1)
    assert not torch.log_softmax(row, dim=-1).isnan().any()


@pytest.mark.parametrize(("frequency", "presence"), [(0.7, 0.0), (0.0, -1.5), (-2.0, 2.0)])
def test_frequency_and_presence_penalties_follow_the_formula_of_openai(logits, frequency, presence):
    # logit[j] - count[j] * frequency - (count[j] > 0) * presence, of generated tokens only.
    expected = logits.clone()
    for token in range(VOCAB):
        count = TOKENS[NUM_PROMPT:].count(token)
        expected[token] -= count * frequency + (count > 0) * presence
    row = adjusted(logits, penalties=Penalties.of(TOKENS, NUM_PROMPT, frequency=frequency, presence=presence))
    torch.testing.assert_close(row, expected)


def test_penalties_before_the_first_token_touch_the_prompt_only(logits):
    penalties = Penalties.of(TOKENS[:NUM_PROMPT], NUM_PROMPT, frequency=2.0, presence=2.0, repetition=1.5)
    row = adjusted(logits, penalties=penalties)
    assert set(torch.nonzero(row != logits)[:, 0].tolist()) == {5, 6, 7}


def test_bias_is_that_of_transformers(logits):
    pairs = ((3, 2.5), (90, -100.0), (0, 0.25))
    bias = SequenceBiasLogitsProcessor({(token,): value for token, value in pairs})
    expected = bias(torch.tensor([TOKENS]), logits[None].clone())[0]
    torch.testing.assert_close(adjusted(logits, bias=make_bias(pairs)), expected)


@pytest.mark.parametrize("min_p", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_min_p_is_that_of_transformers(logits, min_p, temperature):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p)])
    expected = torch.softmax(warpers(torch.tensor([TOKENS]), logits[None].clone()), -1)
    found = filtered_probs(
        logits[None].clone(),
        torch.tensor([temperature]),
        torch.tensor([0]),
        torch.tensor([1.0]),
        torch.tensor([min_p]),
    )
    torch.testing.assert_close(found, expected)


def test_min_p_of_one_row_leaves_the_others_alone():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    parameters = [torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(2)]
    plain = filtered_probs(logits.clone(), *parameters)
    mixed = filtered_probs(logits.clone(), *parameters, torch.tensor([0.0, 0.5]))
    torch.testing.assert_close(mixed[0], plain[0])
    assert (mixed[1] == 0).sum() > 0


def test_a_grammar_leaves_exactly_its_tokens():
    allowed = {2, 31, 32, 64, 96}
    words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    rows = SamplingRows()
    for adjustment in (None, LogitAdjustment(allowed=words)):
        rows.append(temperature=0.0, top_k=0, top_p=1.0, seed=0, position=0, step=0, adjustment=adjustment)
    logits = torch.zeros(2, VOCAB)
    apply_grammars(logits, rows)
    assert torch.isfinite(logits[0]).all()
    assert set(torch.nonzero(torch.isfinite(logits[1]))[:, 0].tolist()) == allowed


def test_adjustments_stay_with_their_rows():
    rows = SamplingRows()
    for i in range(6):
        bias = LogitAdjustment(bias=make_bias(((10 + i, 50.0),))) if i % 2 else None
        rows.append(temperature=0.0, top_k=0, top_p=1.0, seed=0, position=0, step=0, adjustment=bias)
    logits = torch.zeros(6, VOCAB)
    logits[:, 1] = 1.0
    tokens, _ = select_tokens(logits.clone(), rows)
    assert tokens.tolist() == [1, 11, 1, 13, 1, 15]
    for start, end in [(0, 3), (3, 6), (1, 2)]:
        part, _ = select_tokens(logits[start:end].clone(), rows.slice(start, end))
        assert part.tolist() == tokens[start:end].tolist()
