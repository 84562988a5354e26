"""Decoding in fixed shapes: the same tokens, whatever the other slots hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prefix_requests import AR, ask, question

from replicas.protocol import DiffusionParams

MODELS = ["llada2_b8", "llada2_b32", AR, "qwen3_moe"]


def requests_of(golden, name):
    """Golden prompts of all lengths, LLaDA2.0 and 2.1 rules, greedy and sampled."""
    editing = DiffusionParams(threshold=0.7, editing_threshold=0.5)
    prompts = golden.prompts(name)
    return [
        golden.make(
            f"r{i}",
            prompts[i * (len(prompts) - 1) // 5],
            max_tokens=9 + 8 * i,
            temperature=0.7 * (i % 2),
            seed=i,
            diffusion=(editing if i % 3 == 2 else DiffusionParams()) if name.startswith("llada") else None,
        )
        for i in range(6)
    ]


def tokens_of(outputs):
    return {name: output.new_token_ids for name, output in outputs.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [1, 3, 5, 8])
def test_tokens_are_those_of_the_exact_shapes(golden, name, width):
    expected = tokens_of(golden.core(name, max_num_seqs=width).generate(requests_of(golden, name)))
    core = golden.core(name, max_num_seqs=width, static_decode=True)
    assert tokens_of(core.generate(requests_of(golden, name))) == expected
    runner = core.engine.runner
    assert runner.num_static_forwards > runner.num_forwards / 4, "mostly decoding, or nothing is tested"
    if width > 1:
        assert runner.num_static_forwards < runner.num_forwards


@pytest.mark.parametrize("name", ["llada2_b8", AR])
def test_idle_slots_keep_what_is_reused(golden, cold, name):
    """A request as long as a slot ends, others decode beside its slot, and its next turn takes all it can from it."""
    prompt = question(1, 21)
    core = golden.core(name, max_num_seqs=4, max_model_len=64, static_decode=True)
    (request,) = ask(golden, name, [prompt], 64 - 21)
    first = core.generate([request])["r0"]
    assert first.new_token_ids == cold(name, prompt, 64 - 21)
    reused = 56 if name == "llada2_b8" else 62
    caches = core.engine.runner._kv_cache
    (slot,) = (i for i in range(4) if caches.k[0][i, 0].any())
    kept = [cache[slot, :reused].clone() for cache in (*caches.k, *caches.v)]
    others = ask(golden, name, [question(i, 12) for i in (2, 3)], 30, first=1)
    before = core.engine.runner.num_static_forwards
    core.generate(others)
    assert core.engine.runner.num_static_forwards > before
    assert all(
        torch.equal(cache[slot, :reused], old)
        for cache, old in zip((*caches.k, *caches.v), kept, strict=True)
    )
    turn = prompt + first.new_token_ids[: 64 - 21 - 1]
    (request,) = ask(golden, name, [turn], 1, first=9)
    output = core.generate([request])["r9"]
    assert output.num_cached_tokens == reused
    assert output.new_token_ids == cold(name, turn, 1)


def test_shapes_are_few(golden):
    core = golden.core(AR, max_num_seqs=6, max_model_len=512, static_decode=True)
    core.generate(ask(golden, AR, [question(i, 1 + 30 * i) for i in range(6)], 200))
    shapes = set(core.engine.runner._static._shapes)
    assert len(shapes) <= 8
    assert {rows for rows, _ in shapes} <= {1, 2, 4, 6}
    assert {keys for _, keys in shapes} <= {256, 512}


def test_what_does_not_fit_is_not_forced(golden):
    static = golden.core("llada2_b8", max_num_seqs=4, static_decode=True).engine.runner._static
    slots = np.array([2, 0], dtype=np.int32)
    assert static.fits(np.array([8, 8]), slots)
    assert not static.fits(np.array([8, 16]), slots), "a finished block and the next one"
    assert not static.fits(np.array([8, 3]), slots)
    assert not static.fits(np.array([8, 8]), np.array([1, 1]))
