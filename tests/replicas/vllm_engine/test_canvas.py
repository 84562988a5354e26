"""Canvases of many requests at once against the torch engine's state of one: the same rules, the same tokens."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.engine.diffusion_state import DiffusionState
from replicas.model_info import ModelInfo
from replicas.protocol import DiffusionParams, GenerationRequest, SamplingParams
from replicas.vllm_engine.plugin.canvas import Canvases, CanvasParams

MASK, EOS, VOCABULARY = 99, 7, 100


def info(block_length: int) -> ModelInfo:
    return ModelInfo(
        path=None,
        architecture="LLaDA2MoeModelLM",
        vocab_size=VOCABULARY,
        max_model_len=1024,
        eos_token_ids=(EOS,),
        block_length=block_length,
        mask_token_id=MASK,
    )


diffusion_params = st.builds(
    DiffusionParams,
    steps=st.none() | st.integers(1, 40),
    threshold=st.sampled_from([0.0, 0.3, 0.6, 0.95]),
    minimal_topk=st.just(1),
    eos_early_stop=st.booleans(),
    editing_threshold=st.none() | st.sampled_from([0.0, 0.5, 0.9]),
    max_post_steps=st.integers(0, 3),
    num_to_transfer=st.integers(1, 4),
)
requests = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 6), diffusion_params),
    min_size=1,
    max_size=5,
)


def to_request(index: int, prompt: int, max_tokens: int, min_tokens: int, params: DiffusionParams):
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))
    return GenerationRequest(f"r{index}", "m", tuple(range(10, 10 + prompt)), sampling, params)


@settings(max_examples=150, deadline=None)
@given(requests, st.sampled_from([4, 8, 32]), st.integers(0, 2**32 - 1))
def test_equal_to_the_torch_engine_s_state(found, block_length, seed):
    rng = np.random.default_rng(seed)
    model = info(block_length)
    states = [DiffusionState(to_request(i, *one), model, seed=i) for i, one in enumerate(found)]
    canvases = Canvases(8, block_length, MASK)
    slots = rng.permutation(8)[: len(found)]
    for slot, state in zip(slots, states, strict=True):
        sampling, tokens = state.request.sampling, state.request.prompt_token_ids
        params = CanvasParams(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            seed=state.seed,
            stop_token_ids=(EOS,),
            diffusion=state.params,
        )
        canvases.add(slot, tokens, len(tokens), params)
    emitted: list[list[int]] = [[] for _ in found]
    expected: list[list[int]] = [[] for _ in found]
    forwards = [0] * len(found)
    live = list(range(len(found)))
    while live:
        live_slots = slots[live]
        predicted = rng.integers(0, 12, (len(live), block_length))
        # Few values, so that some are equal.
        confidence = rng.choice(np.linspace(0, 1, 9), (len(live), block_length)).astype(np.float32)
        wanted = canvases.undecided(live_slots)
        rows = canvases.sampling_rows(live_slots, wanted)
        at = 0
        for row, i in enumerate(live):
            state, slot = states[i], slots[i]
            plan = state.prepare(state.num_pending_tokens)
            columns = np.flatnonzero(wanted[row])
            assert (canvases.start[slot] + columns).tolist() == plan.positions
            assert rows.position[at : at + len(columns)].tolist() == plan.positions
            assert set(rows.step[at : at + len(columns)].tolist()) <= {plan.step}
            banned = [[t for r, t in rows.banned if r == at + k] for k in range(len(columns))]
            assert banned == [list(tokens) for tokens in plan.banned]
            at += len(columns)
            output = state.apply(plan, predicted[row, columns].tolist(), confidence[row, columns].tolist())
            expected[i] += output.new_token_ids if output is not None else []
        emission = canvases.apply(live_slots, predicted, confidence)
        for row, i in list(enumerate(live)):
            forwards[i] += 1
            state = states[i]
            count = int(emission.num_tokens[row])
            new = emission.tokens[row, :count].tolist()
            left = state.request.sampling.max_tokens - len(emitted[i])
            if EOS in new:
                new = new[: new.index(EOS) + 1]
            emitted[i] += new[:left]
            ended = bool(count) and (emitted[i][-1:] == [EOS] or count >= left)
            if state.finish_reason is None and not ended:
                # vLLM's scheduler hears of whole blocks; both have the same canvas.
                assert canvases.start[slots[i]] == state.canvas_start
                block = state.tokens[state.canvas_start : state.canvas_end]
                assert canvases.tokens[slots[i]].tolist() == block
                continue
            live.remove(i)
            if state.finish_reason is not None:
                assert ended
                assert emitted[i] == expected[i]
                assert forwards[i] == state.num_forwards
                assert (state.finish_reason == "stop") == (emitted[i][-1] == EOS)
            else:
                # Token editing without early stop goes on past EOS, for nothing: all tokens up to there are out.
                assert state.params.editing_threshold is not None
                assert not state.params.eos_early_stop
                assert emitted[i][: len(expected[i])] == expected[i]


def test_a_slot_is_new_for_the_next_request():
    canvases = Canvases(2, 4, MASK)
    first = CanvasParams(max_tokens=9, stop_token_ids=(1, 2, 3), diffusion=DiffusionParams(steps=2))
    canvases.add(1, range(20, 26), 6, first)
    assert (canvases.start[1], canvases.first[1], canvases.tokens[1].tolist()) == (4, 2, [24, 25, MASK, MASK])
    slots = np.array([1])
    emission = canvases.apply(slots, np.full((1, 4), 30), np.full((1, 4), 0.99, np.float32))
    assert emission.tokens[0, : emission.num_tokens[0]].tolist() == [30, 30]
    assert (canvases.start[1], canvases.first[1]) == (8, 0)
    assert canvases.previous[1].tolist() == [24, 25, 30, 30]
    canvases.add(1, [5], 1, CanvasParams(max_tokens=3, stop_token_ids=(9,)))
    assert canvases.tokens[1].tolist() == [5, MASK, MASK, MASK]
    # Token 2 ended the first request; it does not end this one.
    emission = canvases.apply(slots, np.full((1, 4), 2), np.array([[0, 0.99, 0.99, 0.1]], np.float32))
    assert emission.num_tokens.tolist() == [0]


def test_logprobs_are_those_of_the_step_that_decided():
    canvases = Canvases(2, 4, MASK)
    slots = np.array([0])
    canvases.add(0, [1], 1, CanvasParams(max_tokens=3, logprobs=1, diffusion=DiffusionParams(threshold=0.5)))

    def step(confidence):
        value = np.array([confidence], np.float32)
        ids = np.repeat(np.arange(4)[None, :, None], 2, axis=2) + 50
        logprobs = np.repeat(np.log(value)[:, :, None], 2, axis=2)
        return canvases.apply(
            slots, np.array([[0, 11, 12, 13]]), value, (ids, logprobs, np.ones((1, 4), np.int64))
        )

    assert step([0.01, 0.9, 0.2, 0.3]).num_tokens.tolist() == [0]
    emission = step([0.01, 0.1, 0.8, 0.7])
    assert emission.num_tokens.tolist() == [3]
    values = np.exp(emission.logprobs[1][0, :3, 0])
    assert values == pytest.approx([0.9, 0.8, 0.7])
    assert emission.logprobs[0][0, :3, 0].tolist() == [51, 52, 53]


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": "hot", "threshold": 7, "steps": 0, "seed": "x", "top_p": 0, "min_tokens": -1},
        {"temperature": float("nan"), "threshold": None, "steps": 1.5, "top_k": [3], "eos_early_stop": {}},
        {"editing_threshold": True, "max_post_steps": "", "num_to_transfer": -3, "minimal_topk": None},
    ],
)
def test_what_a_client_of_vllm_s_own_server_sends_is_taken_or_left(extra):
    sampling = SimpleNamespace(
        max_tokens=5,
        extra_args=extra,
        stop_token_ids=[4],
        eos_token_id=7,
        ignore_eos=False,
        top_k=0,
        top_p=1.0,
        logprobs=None,
    )
    params = CanvasParams.from_vllm(sampling)
    default = CanvasParams(max_tokens=5, seed=params.seed, stop_token_ids=(4, 7))
    assert params == default


def test_extra_args_round_trip():
    diffusion = DiffusionParams(
        steps=4, threshold=0.5, eos_early_stop=False, editing_threshold=0.0, max_post_steps=2
    )
    given_params = CanvasParams(
        max_tokens=5,
        min_tokens=2,
        num_resumed=3,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        seed=-3,
        diffusion=diffusion,
    )
    sampling = SimpleNamespace(
        max_tokens=5,
        extra_args=given_params.to_extra_args(),
        stop_token_ids=(),
        eos_token_id=None,
        ignore_eos=True,
        top_k=0,
        top_p=1.0,
        logprobs=None,
    )
    assert CanvasParams.from_vllm(sampling) == given_params
