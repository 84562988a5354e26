"""Bias, penalties, ``min_p``, grammars and logprobs: vLLM's answers are those of the torch engine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from vllm_client import GOLDEN, LLADA2, QWEN, request

from configs.schema import ModelConfig
from replicas.engine.core import EngineCore
from replicas.errors import InvalidRequestError, UnsupportedParameterError
from replicas.protocol import DiffusionParams, FinishReason

PROMPT = tuple(range(40, 59))
GRAMMAR = "start: %json " + json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)


@pytest.fixture(params=[QWEN, LLADA2])
def family(request):
    return request.param


@pytest.fixture
def client(request, family):
    return request.getfixturevalue("qwen" if family == QWEN else "llada2")


@pytest.fixture(scope="module")
def torch_engine():
    """Engines by golden directory, made once."""
    made: dict[str, EngineCore] = {}

    def engine(name: str) -> EngineCore:
        if name not in made:
            tree = {
                "name": "m",
                "path": str(GOLDEN / name),
                "engine": {"device": "cpu", "dtype": "float32", "max_model_len": 512},
            }
            made[name] = EngineCore.from_config(ModelConfig.model_validate(tree), GOLDEN / name)
        return made[name]

    return engine


def both(client, engine, diffusion=None, **sampling):
    asked = request("r", PROMPT, diffusion, **sampling)
    client.engine.submit(asked)
    return client.finish("r"), engine.generate([asked])["r"]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"logit_bias": ((5, 100.0),)},
        {"logit_bias": ((5, 2.0), (7, -3.5), (300, 1.0))},
        {"min_tokens": 20, "logit_bias": ((508, 100.0),)},
    ],
)
def test_greedy_tokens_and_logprobs_of_both_engines_are_equal(client, family, torch_engine, sampling):
    ours, reference = both(client, torch_engine(family), max_tokens=60, logprobs=3, **sampling)
    assert ours.new_token_ids == reference.new_token_ids
    assert_logprobs_equal(ours, reference)


def test_logprobs_of_edited_tokens_are_equal(llada2, torch_engine):
    ours, reference = both(
        llada2, torch_engine(LLADA2), DiffusionParams(editing_threshold=0.3), max_tokens=60, logprobs=2
    )
    assert ours.new_token_ids == reference.new_token_ids
    assert_logprobs_equal(ours, reference)


def assert_logprobs_equal(ours, reference) -> None:
    for entry, expected in zip(ours.logprobs, reference.logprobs, strict=True):
        assert entry.token_id == expected.token_id
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-3)
        assert [token for token, _ in entry.top] == [token for token, _ in expected.top]


@pytest.mark.parametrize(
    "sampling",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"repetition_penalty": 1.8},
        {
            "frequency_penalty": 0.5,
            "presence_penalty": 0.7,
            "repetition_penalty": 1.2,
            "logit_bias": ((9, 14.0),),
        },
    ],
)
def test_penalties_are_those_of_the_torch_engine(qwen, torch_engine, sampling):
    ours, reference = both(qwen, torch_engine(QWEN), max_tokens=60, ignore_eos=True, logprobs=0, **sampling)
    assert ours.new_token_ids == reference.new_token_ids
    assert_logprobs_equal(ours, reference)
    plain, _ = both(qwen, torch_engine(QWEN), max_tokens=60, ignore_eos=True)
    assert plain.new_token_ids != ours.new_token_ids


def test_draws_of_block_diffusion_with_min_p_are_equal(llada2, torch_engine):
    drawn = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "ignore_eos": True}
    ours, reference = both(llada2, torch_engine(LLADA2), min_p=0.2, **drawn)
    assert ours.new_token_ids == reference.new_token_ids
    free, _ = both(llada2, torch_engine(LLADA2), **drawn)
    assert free.new_token_ids != ours.new_token_ids


def test_min_p_of_1_is_greedy(qwen):
    qwen.engine.submit(
        request("p", PROMPT, max_tokens=30, temperature=1.5, seed=4, min_p=1.0, ignore_eos=True)
    )
    qwen.engine.submit(request("g", PROMPT, max_tokens=30, ignore_eos=True))
    assert qwen.finish("p").new_token_ids == qwen.finish("g").new_token_ids


@pytest.mark.parametrize("grammar", [GRAMMAR, "start: /[ab]{3}/", 'start: "a"+ /[0-9]{2}/ "::="'])
def test_a_grammar_gives_the_tokens_of_the_torch_engine(qwen, torch_engine, grammar):
    ours, reference = both(qwen, torch_engine(QWEN), max_tokens=60, grammar=grammar)
    # vLLM notices the end by EOS; the torch engine sees that nothing can follow.
    (eos,) = qwen.engine.info.eos_token_ids
    assert ours.finish_reason is reference.finish_reason is FinishReason.STOP
    assert [t for t in ours.new_token_ids if t != eos] == [t for t in reference.new_token_ids if t != eos]


def test_grammars_among_other_requests(qwen):
    (alone,) = qwen.tokens(request("alone", PROMPT, max_tokens=24))
    mixed = [
        request(f"m{i}", PROMPT, max_tokens=24, **({"grammar": GRAMMAR} if i % 2 else {})) for i in range(6)
    ]
    tokens = qwen.tokens(*mixed)
    assert tokens[0] == tokens[2] == tokens[4] == alone
    assert tokens[1] == tokens[3] == tokens[5] != alone


def test_a_grammar_that_reaches_its_bounds_fails_its_request_alone(qwen, torch_engine):
    """After 40 characters it has too many places to be in."""
    grammar = "start: /(.|\\n){40}/ " + '"a"? ' * 3000
    asked = request("r", PROMPT, max_tokens=120, ignore_eos=True, grammar=grammar)
    qwen.engine.submit(asked)
    qwen.engine.submit(request("other", PROMPT, max_tokens=100, ignore_eos=True))
    ours, reference = qwen.finish("r"), torch_engine(QWEN).generate([asked])["r"]
    for output in (ours, reference):
        assert output.finish_reason is FinishReason.ERROR
        assert (output.error.code, output.error.param) == ("invalid_request", "grammar")
        assert "cannot be followed" in output.error.message
    assert len(qwen.finish("other").new_token_ids) == 100


def test_what_vllms_samplers_cannot_do_is_refused(qwen):
    many = tuple(range(3, 131))
    with pytest.raises(InvalidRequestError, match="129") as caught:
        qwen.engine.submit(request("bad", PROMPT, max_tokens=4, min_tokens=1, stop_token_ids=many))
    assert caught.value.param == "stop_token_ids"
    resumed = replace(request("bad", PROMPT, max_tokens=4, frequency_penalty=1.0), resume_token_ids=(5,))
    with pytest.raises(UnsupportedParameterError) as caught:
        qwen.engine.submit(resumed)
    assert caught.value.param == "resume_token_ids"
    qwen.tokens(
        request("a", PROMPT, max_tokens=4, stop_token_ids=many),
        request("b", PROMPT, max_tokens=4, min_tokens=1, stop_token_ids=many[:-1]),
    )


@pytest.mark.parametrize("penalty", [1e-38, 2.0])
def test_extreme_penalties_harm_nobody(qwen, torch_engine, penalty):
    mine = [
        request(
            "r", PROMPT, max_tokens=8, ignore_eos=True, temperature=1.0, seed=3, repetition_penalty=penalty
        ),
        request("other", PROMPT, max_tokens=8, ignore_eos=True),
    ]
    alone = torch_engine(QWEN).generate([mine[1]])["other"].new_token_ids
    together = torch_engine(QWEN).generate(mine)
    for outputs in (qwen.tokens(*mine), [together["r"].new_token_ids, together["other"].new_token_ids]):
        assert len(outputs[0]) == 8
        assert outputs[1] == alone


def test_bad_grammars_are_refused_by_name(qwen, llada2):
    with pytest.raises(InvalidRequestError) as caught:
        qwen.engine.submit(request("bad", PROMPT, grammar="start: nothing_like_it"))
    assert caught.value.param == "grammar"
    with pytest.raises(UnsupportedParameterError):
        llada2.engine.submit(request("bad", PROMPT, grammar=GRAMMAR))
    with pytest.raises(UnsupportedParameterError):
        llada2.engine.submit(request("bad", PROMPT, presence_penalty=1.0))
    assert len(qwen.tokens(request("next", PROMPT, max_tokens=4))[0]) == 4
