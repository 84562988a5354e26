"""Seeds as vLLM's generator takes them; needs no vLLM."""

from __future__ import annotations

from replicas.vllm_engine.engine import generator_seed


def test_small_seeds_stay_and_large_ones_differ() -> None:
    assert [generator_seed(seed) for seed in (0, 7, 2**32 - 1)] == [0, 7, 2**32 - 1]
    seeds = [0, 1, -1, -2, 2**32, 2**33, 2**62, 2**62 + 1, 2**63 - 1, -(2**63)]
    folded = [generator_seed(seed) for seed in seeds]
    assert len(set(folded)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in folded)
