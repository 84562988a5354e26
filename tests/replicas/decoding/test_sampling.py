import numpy as np
import pytest
import torch

from replicas.decoding.sampling import (
    SamplingRows,
    counter_uniforms,
    draw,
    filtered_probs,
    greedy,
    select_tokens,
    token_logprobs,
)

GOLDEN = ("llada2_b32", "llada2_b8", "llada2_tp")


def rows_of(n, *, temperature=0.0, top_k=0, top_p=1.0, seed=0, step=0, positions=None, banned=()):
    rows = SamplingRows()
    for i in range(n):
        rows.append(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            position=positions[i] if positions else i,
            step=step,
            banned=banned,
        )
    return rows


@pytest.fixture(params=GOLDEN)
def golden(request, golden_dir):
    return np.load(golden_dir / request.param / "sampling_filters.npz")


def test_distributions_equal_the_reference(golden):
    logits = torch.from_numpy(golden["logits"]).float()
    for j, (temperature, top_k, top_p) in enumerate(golden["grid_temperature_topk_topp"]):
        n = logits.shape[0]
        probs = filtered_probs(
            logits, torch.full((n,), temperature), torch.full((n,), int(top_k)), torch.full((n,), top_p)
        )
        expected = torch.from_numpy(golden[f"probs{j}"])
        assert torch.equal(probs > 0, expected > 0)
        assert torch.allclose(probs, expected, atol=1e-6)


def test_rows_with_different_parameters_do_not_touch_each_other(golden):
    logits = torch.from_numpy(golden["logits"]).float()
    grid = torch.from_numpy(golden["grid_temperature_topk_topp"]).float()
    # Row j of the logits with row j of the grid, all in one call.
    probs = filtered_probs(logits, grid[:, 0], grid[:, 1].long(), grid[:, 2])
    for j in range(len(grid)):
        assert torch.allclose(probs[j], torch.from_numpy(golden[f"probs{j}"])[j], atol=1e-6)


def test_greedy_equals_the_reference(golden):
    tokens, confidence = greedy(torch.from_numpy(golden["logits"]).float())
    assert tokens.tolist() == golden["greedy_tokens"].tolist()
    assert np.abs(confidence.numpy() - golden["greedy_conf"]).max() < 1e-6


def test_wide_vocabulary_takes_the_same_set_with_and_without_a_sort():
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1))
    ones = torch.ones(4)
    # One row above the limit of the fast path sends all rows through the full sort.
    fast = filtered_probs(logits, ones, torch.tensor([50, 50, 50, 50]), ones * 0.9)
    slow = filtered_probs(logits, ones, torch.tensor([50, 50, 50, 3000]), ones * 0.9)
    assert torch.allclose(fast[:3], slow[:3], atol=1e-7)
    assert int((slow[3] > 0).sum()) > 50


def test_top_k_one_is_greedy_and_tiny_temperature_is_finite():
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    best = logits.argmax(-1).tolist()
    for kwargs in (
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 1e-38},
        {"temperature": 1.0, "top_p": 1e-6},
    ):
        tokens, confidence = select_tokens(logits.clone(), rows_of(5, seed=3, **kwargs))
        assert tokens.tolist() == best
        assert torch.allclose(confidence, torch.ones(5))


def test_draws_do_not_depend_on_the_rest_of_the_batch():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(8, 300, generator=generator)
    together = SamplingRows()
    for i in range(8):
        together.append(
            temperature=[0.0, 0.8, 1.0, 1.7][i % 4],
            top_k=i * 7,
            top_p=1 - i / 10,
            seed=i // 2,
            position=9,
            step=i,
        )
    tokens, confidence = select_tokens(logits.clone(), together)
    for i in range(8):
        one, conf = select_tokens(logits[i : i + 1].clone(), together.slice(i, i + 1))
        assert one.item() == tokens[i].item()
        assert conf.item() == pytest.approx(confidence[i].item(), abs=1e-6)


def test_draw_frequencies_follow_the_distribution():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    n = 20000
    uniforms = torch.from_numpy(counter_uniforms([7] * n, list(range(n)), [0] * n))
    counts = torch.bincount(draw(probs.expand(n, -1), uniforms), minlength=5) / n
    assert counts[1] == 0
    assert torch.allclose(counts, probs, atol=0.012)


def test_draw_at_the_borders_takes_possible_tokens_only():
    probs = torch.tensor([[0.0, 0.4, 0.0, 0.6, 0.0]]).expand(3, -1)
    tokens = draw(probs, torch.tensor([0.0, 0.39999, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 1, 3]


def test_a_row_that_is_no_number_is_drawn_from_without_harm_to_others():
    probs = torch.tensor([[torch.nan] * 3, [0.0, 1.0, 0.0]])
    tokens = draw(probs, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert 0 <= tokens[0] < 3
    assert tokens[1] == 1


def test_uniforms_are_stateless_and_each_part_of_the_key_counts():
    base = counter_uniforms([1], [2], [3])[0]
    assert counter_uniforms([5, 1, 9], [0, 2, 2], [0, 3, 3])[1] == base
    others = {counter_uniforms([s], [p], [t])[0] for s, p, t in [(2, 2, 3), (1, 3, 3), (1, 2, 4), (3, 2, 1)]}
    assert len(others | {base}) == 5
    # Seeds of any size and sign are accepted.
    assert 0 <= counter_uniforms([-1], [0], [0])[0] < 1
    assert counter_uniforms([2**63], [0], [0])[0] != counter_uniforms([0], [0], [0])[0]


def test_uniforms_are_uniform_along_positions_and_steps():
    grid = [(s, p, t) for s in (0, 1) for p in range(200) for t in range(32)]
    values = counter_uniforms(*zip(*grid, strict=True))
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    expected = len(values) / 20
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 45  # 19 degrees of freedom: 45 is beyond the 99.9 % quantile
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_banned_tokens_are_never_chosen():
    logits = torch.zeros(2, 6)
    logits[:, 4] = 20.0
    for temperature in (0.0, 1.0):
        tokens, _ = select_tokens(logits.clone(), rows_of(2, temperature=temperature, banned=(4,)))
        assert 4 not in tokens.tolist()


def test_the_mask_is_never_chosen_and_leaves_greedy_confidences_alone():
    logits = torch.tensor([[1.0, 3.0, 5.0], [1.0, 7.0, 5.0]])
    tokens, confidence = select_tokens(logits.clone(), rows_of(2), mask_token_id=2)
    assert tokens.tolist() == [1, 1]
    assert torch.allclose(confidence, torch.softmax(logits, -1)[:, 1])
    tokens, _ = select_tokens(logits.clone(), rows_of(2, temperature=1.5, seed=1), mask_token_id=2)
    assert 2 not in tokens.tolist()
    unbanned, _ = select_tokens(logits.clone(), rows_of(2))
    assert unbanned.tolist() == [2, 1]


def test_logprobs_are_those_of_the_plain_softmax():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    chosen, ids, values = token_logprobs(logits, torch.tensor([3, 0, 39]), 4)
    expected = torch.log_softmax(logits, -1)
    assert torch.allclose(chosen, expected[range(3), [3, 0, 39]])
    assert ids.shape == values.shape == (3, 4)
    assert torch.equal(ids[:, 0], logits.argmax(-1))
