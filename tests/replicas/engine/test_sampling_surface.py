"""Bias, penalties, ``min_p``, grammars and logprobs on the torch engine, both families."""

from __future__ import annotations

import json
import re

import pytest
import torch

from replicas.errors import InvalidRequestError, UnsupportedParameterError
from replicas.protocol import DiffusionParams, FinishReason, GenerationRequest, SamplingParams

QWEN, LLADA2 = "qwen3_dense_untied", "llada2_b32"
PROMPT = tuple(range(40, 59))
#: No blanks, for a model of random weights would write nothing else.
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON_GRAMMAR = "start: %json " + json.dumps(SCHEMA)


@pytest.fixture
def core(golden):
    return golden.core


@pytest.fixture(params=[QWEN, LLADA2])
def engine(request, core):
    return core(request.param)


def run(engine, diffusion=None, **sampling):
    sampling.setdefault("max_tokens", 40)
    made = GenerationRequest("r", "m", PROMPT, SamplingParams(**sampling), diffusion)
    return engine.generate([made])["r"]


def decoded(engine, tokens) -> str:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(engine.info.path).decode(tokens, skip_special_tokens=True)


def test_a_bias_of_100_decides_and_of_minus_100_forbids(engine):
    plain = run(engine, ignore_eos=True).new_token_ids
    assert set(run(engine, logit_bias=((77, 100.0),), ignore_eos=True).new_token_ids) == {77}
    forbidden = plain[0]
    without = run(engine, logit_bias=((forbidden, -100.0),), ignore_eos=True).new_token_ids
    assert forbidden not in without
    assert len(without) == len(plain)


def test_min_p_of_1_is_greedy(engine):
    # With one step a block: a draw from one token makes LLaDA2 sure of all of them, which changes the order.
    at_once = DiffusionParams(steps=1) if engine.info.is_diffusion else None
    drawn = run(engine, at_once, temperature=1.5, seed=4, min_p=1.0, ignore_eos=True)
    assert drawn.new_token_ids == run(engine, at_once, ignore_eos=True).new_token_ids
    free = run(engine, at_once, temperature=1.5, seed=4, ignore_eos=True)
    assert free.new_token_ids != drawn.new_token_ids


@pytest.mark.parametrize("editing", [None, 0.3])
@pytest.mark.parametrize("count", [0, 3])
def test_every_emitted_token_has_its_logprobs(engine, count, editing):
    diffusion = DiffusionParams(editing_threshold=editing) if engine.info.is_diffusion else None
    output = run(engine, diffusion, logprobs=count, max_tokens=70)
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.new_token_ids
    for entry in output.logprobs:
        assert len(entry.top) == count
        assert entry.logprob <= 0
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)


def test_logprobs_of_block_diffusion_are_those_of_the_deciding_forward(core):
    """At a threshold of 1 and as many steps as tokens the most probable masked token is decided in each forward, so a
    forward over the canvas as it was then has the same distribution."""
    engine = core(LLADA2)
    passes: list[list[tuple[int, int]]] = []
    traced = core(LLADA2, trace=lambda _id, _block, changes: passes.append(changes))
    diffusion = DiffusionParams(threshold=1.0)
    output = run(traced, diffusion, logprobs=2, max_tokens=24, ignore_eos=True)
    assert output.new_token_ids == run(engine, diffusion, max_tokens=24, ignore_eos=True).new_token_ids
    length, mask = engine.info.block_length, engine.info.mask_token_id
    tokens = [*PROMPT, *[mask] * (2 * length)][: 2 * length]
    checked = 0
    for changes in passes:
        ((position, token),) = changes
        block_end = (position // length + 1) * length
        expected = reference_logits(traced, tokens[:block_end])[position].log_softmax(-1)
        tokens[position] = token
        if position >= len(PROMPT) + 24:
            continue
        entry = output.logprobs[position - len(PROMPT)]
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(expected[token].item(), abs=2e-4)
        assert [i for i, _ in entry.top] == expected.topk(2).indices.tolist()
        checked += 1
    assert checked >= 20


def reference_logits(engine, tokens) -> torch.Tensor:
    """float32 [T, V] of one forward over ``tokens``, in a slot of its own."""
    from replicas.engine.request_state import RowInput

    row = RowInput(0, list(tokens), decide=list(range(len(tokens))), positions=list(range(len(tokens))))
    with torch.inference_mode():
        parts = [part.clone() for part in engine.engine.runner.forward([(0, row)], ())]
    return torch.cat(parts).float()


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}]
)
def test_penalties_make_repeated_tokens_rarer(core, penalty):
    engine = core(QWEN)
    # A bias that makes the model repeat itself.
    biased = {"logit_bias": ((77, 14.0),), "ignore_eos": True}
    plain, penalized = run(engine, **biased), run(engine, **biased, **penalty)
    assert plain.new_token_ids.count(77) > 5
    assert penalized.new_token_ids.count(77) < plain.new_token_ids.count(77)


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 0.1}, {"presence_penalty": -1.0}, {"repetition_penalty": 1.1}]
)
def test_block_diffusion_refuses_penalties_by_name(core, penalty):
    with pytest.raises(UnsupportedParameterError) as caught:
        run(core(LLADA2), **penalty)
    assert caught.value.param == next(iter(penalty))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 2.0, "seed": 6}])
def test_output_follows_a_json_schema(core, sampling):
    engine = core(QWEN)
    output = run(engine, grammar=JSON_GRAMMAR, **sampling)
    assert output.finish_reason is FinishReason.STOP
    value = json.loads(decoded(engine, output.new_token_ids))
    assert value.keys() == {"a", "b"}
    assert 0 <= value["a"] <= 99
    assert value["b"] in ("x", "yy")
    free = run(engine, **sampling)
    assert free.new_token_ids != output.new_token_ids


def test_a_grammar_of_one_request_leaves_the_others_alone(core):
    engine = core(QWEN)
    alone = run(engine).new_token_ids
    grammar = SamplingParams(max_tokens=40, grammar="start: /[ab]{3,9}/")
    plain = SamplingParams(max_tokens=40)
    requests = [GenerationRequest(f"r{i}", "m", PROMPT, grammar if i % 2 else plain) for i in range(6)]
    outputs = engine.generate(requests)
    texts = [decoded(engine, outputs[f"r{i}"].new_token_ids) for i in range(6)]
    assert all(outputs[f"r{i}"].new_token_ids == alone for i in (0, 2, 4))
    assert all(re.fullmatch("[ab]{3,9}", texts[i]) for i in (1, 3, 5))


def test_resumed_tokens_count_for_the_grammar(core):
    engine = core(QWEN)
    whole = run(engine, grammar=JSON_GRAMMAR).new_token_ids
    resumed = GenerationRequest(
        "r",
        "m",
        PROMPT,
        SamplingParams(max_tokens=40, grammar=JSON_GRAMMAR),
        resume_token_ids=tuple(whole[:5]),
    )
    assert engine.generate([resumed])["r"].new_token_ids == whole[5:]


def test_a_bad_grammar_is_refused_by_name_and_the_engine_goes_on(core):
    engine = core(QWEN)
    with pytest.raises(InvalidRequestError, match="grammar") as caught:
        run(engine, grammar="start: nothing_like_it")
    assert caught.value.param == "grammar"
    with pytest.raises(UnsupportedParameterError):
        run(core(LLADA2), grammar=JSON_GRAMMAR)
    assert run(engine).finish_reason is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("logit_bias", ((512, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 101.0),)),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
    ],
)
def test_values_out_of_range_are_refused_by_name(engine, name, value):
    with pytest.raises(InvalidRequestError) as caught:
        run(engine, **{name: value})
    assert caught.value.param == name


def test_a_grammar_at_the_limits_fails_its_request_alone(core):
    """An endless text of one letter: the parser runs ahead of it until it is stopped."""
    engine = core(QWEN)
    alone = run(engine).new_token_ids
    grammar = 'start: "a" start'
    requests = [
        GenerationRequest(
            "bad", "m", PROMPT, SamplingParams(max_tokens=60, grammar=grammar, temperature=1.0)
        ),
        GenerationRequest("good", "m", PROMPT, SamplingParams(max_tokens=40)),
    ]
    outputs = engine.generate(requests)
    assert outputs["bad"].finish_reason is FinishReason.ERROR
    assert outputs["bad"].error.code == "invalid_request"
    assert outputs["bad"].error.param == "grammar"
    assert outputs["good"].new_token_ids == alone
    assert engine.stats().free_slots == engine.stats().total_slots
