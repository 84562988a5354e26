"""LLaDA2 on vLLM: what is particular to blocks."""

from __future__ import annotations

import time

import pytest
from vllm_client import GOLDEN, LLADA2, cases, config_of, request, start

from replicas.engine.core import EngineCore
from replicas.protocol import DiffusionParams, FinishReason
from replicas.verify_generation import diffusion_request

CASES = cases(LLADA2, "generate_llada20.json")
LONG_PROMPT = (CASES[0]["prompt_ids"] * 40)[:170]


def test_prompts_of_all_lengths_together_equal_alone(llada2):
    requests = [
        request(f"p{n}", LONG_PROMPT[:n], max_tokens=50, ignore_eos=True)
        for n in (1, 31, 32, 33, 170, 64, 65, 95)
    ]
    alone = [llada2.tokens(one)[0] for one in requests]
    assert llada2.tokens(*requests) == alone
    assert [len(tokens) for tokens in alone] == [50] * len(alone)


@pytest.mark.parametrize("max_tokens", [1, 31, 32, 33, 37, 63, 65])
@pytest.mark.parametrize("prompt_length", [1, 31, 32, 33])
def test_max_tokens_is_exact(llada2, prompt_length, max_tokens):
    (output,) = llada2.run(request("m", LONG_PROMPT[:prompt_length], max_tokens=max_tokens, ignore_eos=True))
    assert len(output.new_token_ids) == max_tokens
    assert output.finish_reason is FinishReason.LENGTH


def test_a_warm_prefix_cache_changes_nothing(llada2):
    engine = llada2.engine
    for length in (31, 32, 33, 64, 70, 96, 130):
        # A prompt that no other test has.
        prompt = [200 + (7 * i + length) % 90 for i in range(length)]
        before = engine.stats().num_cached_tokens
        (cold,) = llada2.run(request("cold", prompt, max_tokens=70, ignore_eos=True))
        assert engine.stats().num_cached_tokens == before
        (warm,) = llada2.run(request("warm", prompt, max_tokens=70, ignore_eos=True))
        assert warm.new_token_ids == cold.new_token_ids
        # Whole blocks, and never the whole prompt.
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, (length - 1) // 32 * 32)
        # What was generated is found again too, once its keys and values are final: not the last block's.
        longer = [*prompt, *cold.new_token_ids]
        (turn,) = llada2.run(request("turn", longer, max_tokens=40, ignore_eos=True))
        assert turn.num_cached_tokens == (length + 70 - 1) // 32 * 32
        (fresh,) = llada2.run(request("fresh", [1, *longer], max_tokens=1, ignore_eos=True))
        assert fresh.num_cached_tokens == 0


def test_blocks_of_many_requests_share_forwards(llada2):
    engine = llada2.engine
    requests = [request(f"s{i}", LONG_PROMPT[: 20 + i], max_tokens=64, ignore_eos=True) for i in range(8)]
    before = engine.stats()
    outputs = llada2.run(*requests)
    after = engine.stats()
    rows = after.num_denoise_row_forwards - before.num_denoise_row_forwards
    assert rows == sum(output.num_forwards for output in outputs)
    assert after.num_forwards - before.num_forwards < rows / 4
    assert after.max_running_seen == 8


def settled_forwards(engine) -> int:
    """The number of forwards once no step is on its way any more: vLLM may report one after a request's last output."""
    while True:
        count = engine.stats().num_forwards
        time.sleep(0.5)
        if engine.stats().num_forwards == count:
            return count


def test_a_finished_block_costs_no_forward_of_its_own(llada2):
    """One forward for the prompt, then denoising forwards only: a block's keys and values are computed in the next
    one's first, and the last block's never."""
    engine = llada2.engine
    before = settled_forwards(engine)
    (output,) = llada2.run(
        request(
            "f", LONG_PROMPT[:40], DiffusionParams(steps=4, threshold=1.0), max_tokens=88, ignore_eos=True
        )
    )
    # A quarter of the block each: three for the 24 positions that the prompt leaves of its last block.
    assert output.num_forwards == 3 + 4 + 4
    assert settled_forwards(engine) - before == 1 + output.num_forwards


def test_early_stop_ends_inside_a_block(llada2):
    found = [
        case
        for case in CASES
        if case["params"].get("eos_early_stop") and not case["params"].get("temperature")
    ]
    assert found
    for case in found:
        params = case["params"]
        diffusion = DiffusionParams(
            steps=params.get("steps", 32), threshold=params.get("threshold", 0.95), eos_early_stop=True
        )
        (early,) = llada2.run(request("e", case["prompt_ids"], diffusion, max_tokens=params["gen_length"]))
        assert early.new_token_ids == case["output_ids"][: params["gen_length"]]
        assert early.num_forwards <= case["num_forwards"]


def test_logprobs_are_those_of_the_deciding_step(llada2):
    """With one step for a block all tokens are decided in one forward, whose softmax is known."""
    diffusion = DiffusionParams(steps=1, threshold=1.0)
    one = request("l", LONG_PROMPT[:40], diffusion, max_tokens=24, ignore_eos=True, logprobs=3)
    (output,) = llada2.run(one)
    assert len(output.logprobs) == 24
    for token, entry in zip(output.new_token_ids, output.logprobs, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(entry.top[0][1], abs=1e-6), "greedy: the best one"
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
        assert entry.top[0][0] == token
    torch_engine = EngineCore.from_config(config_of(GOLDEN / LLADA2, backend="torch"), GOLDEN / LLADA2)
    plain = request("l", LONG_PROMPT[:40], diffusion, max_tokens=24, ignore_eos=True)
    assert torch_engine.generate([plain])["l"].new_token_ids == output.new_token_ids
    torch_engine.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_tokens_are_the_reference_s():
    client = start(LLADA2, enforce_eager=False)
    try:
        found = [case for case in CASES if not case["params"].get("temperature")]
        requests = [diffusion_request(case) for case in found]
        expected = [case["output_ids"][: case["params"]["gen_length"]] for case in found]
        assert client.tokens(*requests) == expected
    finally:
        client.close()
