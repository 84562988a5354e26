"""Reused prefixes give the tokens of a cold run, whatever else happens to slots meanwhile."""

import random

import pytest
from prefix_requests import (
    AR,
    BLOCK,
    FAMILIES,
    SYSTEM,
    ask,
    break_next_forward,
    diffusion_of,
    question,
    reusable,
)

from configs.schema import EngineConfig
from replicas.engine.llada_engine import LLaDAEngine
from replicas.engine.loading import build_engine
from replicas.engine.qwen_engine import QwenEngine
from replicas.protocol import FinishReason


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("llada2_b32", "generate_llada20.json"),
        ("llada2_b32", "generate_llada21.json"),
        ("llada2_b8", "generate_llada20.json"),
        (AR, "greedy.json"),
        ("qwen3_moe", "greedy.json"),
        ("qwen2_5", "greedy.json"),
    ],
)
def test_goldens_again_in_warm_slots(golden, name, file):
    cases = golden.cases(name, file)
    core = golden.core(name, max_num_seqs=len(cases), reference_stopping=True)
    order = random.Random(3)
    for round_ in range(2):
        cached = core.stats().num_cached_tokens
        requests = {f"{round_}-{case['case']}": case for case in order.sample(cases, len(cases))}
        outputs = core.generate(golden.request(case, request_id) for request_id, case in requests.items())
        for request_id, case in requests.items():
            limit = case["params"]["gen_length"] if "params" in case else None
            assert outputs[request_id].new_token_ids == case["output_ids"][:limit]
    given = [len(case["prompt_ids"]) for case in cases]
    # Prompts without a reusable part take slots that others would have found.
    assert core.stats().num_cached_tokens - cached > sum(reusable(name, n, n) for n in given) / 2 > 100
    assert core.stats().free_slots == len(cases)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("common", [31, 32, 33, 40, 64, 71])
def test_a_prefix_that_ends_anywhere_in_a_block(golden, cold, name, common):
    core = golden.core(name, max_num_seqs=1)
    first, second = SYSTEM[:common] + question(1), SYSTEM[:common] + question(2)
    cached = 0
    for prompt in (first, second, second):
        output = core.generate(ask(golden, name, [prompt]))["r0"]
        assert output.new_token_ids == cold(name, prompt, 20)
        assert output.num_cached_tokens == cached
        cached = reusable(name, common if prompt is first else len(prompt), len(prompt))
    assert core.stats().num_cached_tokens == reusable(name, common, 100) + cached
    assert core.stats().num_prefill_tokens == 3 * len(first) - core.stats().num_cached_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_goes_on_in_its_slot(golden, cold, name):
    core = golden.core(name, max_num_seqs=2)
    prompt, known = SYSTEM[:35], 0
    for turn in range(3):
        output = core.generate(ask(golden, name, [prompt], max_tokens=41))["r0"]
        assert output.new_token_ids == cold(name, prompt, 41)
        # Computed were all but the last chosen token, or the blocks before the last one.
        assert output.num_cached_tokens == (reusable(name, known - 1, known) if turn else 0)
        known = len(prompt) + len(output.new_token_ids)
        prompt = [*prompt, *output.new_token_ids, *question(turn)]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("warm", [False, True])
def test_eight_at_once_compute_a_common_beginning_once(golden, cold, name, warm):
    """Not below the hit rate of the same requests one after the other, either."""
    prompts = [SYSTEM[:40] + question(i, 5 + i) for i in range(8)]
    core, serial = golden.core(name, max_num_seqs=8), golden.core(name, max_num_seqs=8)
    for one in (core, serial) if warm else ():
        one.generate(ask(golden, name, [[*SYSTEM[:40], 9, 9]], first=100))
    outputs = core.generate(ask(golden, name, prompts))
    for i, prompt in enumerate(prompts):
        assert outputs[f"r{i}"].new_token_ids == cold(name, prompt, 20)
        assert outputs[f"r{i}"].num_cached_tokens == (reusable(name, 40, len(prompt)) if i or warm else 0)
    stats = core.stats()
    cached = (8 if warm else 7) * reusable(name, 40, 100)
    assert stats.num_cached_tokens == cached
    assert stats.num_prefill_tokens == sum(map(len, prompts)) + 42 * warm - cached
    assert stats.max_running_seen == 8
    for request in ask(golden, name, prompts):
        serial.generate([request])
    assert stats.num_cached_tokens >= serial.stats().num_cached_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_from_a_request_that_is_being_decoded(golden, cold, name):
    """At every step of the source: the tokens that it has emitted so far, and one more."""
    source = SYSTEM[:35]
    expected = cold(name, source, 60)
    rounds = 0
    core = golden.core(name, max_num_seqs=2)
    core.submit(ask(golden, name, [source], max_tokens=60)[0])
    emitted = []
    while core.has_work():
        for output in core.step().outputs:
            emitted += output.new_token_ids
        leader = core._scheduler.get("r0")
        if leader is None or not leader.started:
            continue
        computed = leader.num_computed_tokens
        assert name == AR or computed <= leader.canvas_start
        prompt = [*source, *emitted, 11, 12]
        request = ask(golden, name, [prompt], max_tokens=9, first=1)[0]
        core.submit(request)
        got = []
        while core._scheduler.get("r1") or not got:
            for output in core.step().outputs:
                if output.request_id == "r1":
                    got += output.new_token_ids
                    if output.finished:
                        assert output.num_cached_tokens >= reusable(name, computed, len(prompt))
                else:
                    emitted += output.new_token_ids
        assert got == cold(name, prompt, 9)
        rounds += 1
    assert emitted == expected
    assert rounds > 2


@pytest.mark.parametrize("name", ["llada2_b8", "llada2_b32"])
@pytest.mark.parametrize("phase", ["decided", "denoising"])
@pytest.mark.parametrize("source", ["busy", "free"])
def test_a_block_is_offered_when_it_is_committed_and_not_before(golden, cold, name, phase, source):
    """Between the last denoising pass of a block and the forward that commits it, all its tokens are known; what the
    slot holds of it was computed from masks."""
    core = golden.core(name, max_num_seqs=2)
    final = SYSTEM[:35] + cold(name, SYSTEM[:35], 100)
    core.submit(ask(golden, name, [SYSTEM[:35]], max_tokens=100)[0])
    seen = 0
    while seen < 2:
        core.step()
        leader = core._scheduler.get("r0")
        decided = leader.num_computed_tokens < leader.canvas_start
        seen += decided if phase == "decided" else leader.emit_position % BLOCK[name] > 1
    computed = leader.num_computed_tokens
    # Up to the end of the block in question, which begins where the final keys and values end.
    known = final[: computed + BLOCK[name]]
    assert leader.tokens[:computed] == known[:computed]
    prompt = known + question(1, 2 * BLOCK[name])
    if source == "free":
        core.abort("r0")
    output = core.generate(ask(golden, name, [prompt], first=1))["r1"]
    assert output.num_cached_tokens == computed
    assert output.new_token_ids == cold(name, prompt, 20)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_copies_in_one_step_do_not_mix(golden, cold, name):
    """The source of one copy becomes the target of the next one in the same step."""
    core = golden.core(name, max_num_seqs=4)
    long, other = SYSTEM[:64] + question(1, 100), question(5, 70)
    core.generate(ask(golden, name, [question(2, 20), long, question(3, 20)]))
    core.submit(ask(golden, name, [other], max_tokens=200, first=9)[0])
    while not core._scheduler.get("r9") or not core._scheduler.get("r9").started:
        core.step()
    slots = core.engine.slots
    assert slots.slot_of("r9") == 3
    prompts = [SYSTEM[:64] + question(4), question(6, 3), other[:64] + question(7)]
    core.engine.slots.expire(0)
    requests = ask(golden, name, prompts)
    outputs = core.generate(requests)
    for i, prompt in enumerate(prompts):
        assert outputs[f"r{i}"].new_token_ids == cold(name, prompt, 20)
    assert [outputs[f"r{i}"].num_cached_tokens for i in range(3)] == [64, 0, 64]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("end", ["abort", "fault", "forward"])
def test_followers_go_on_without_their_leader(golden, cold, name, end, monkeypatch):
    prompts = [SYSTEM[:160] + question(i) for i in range(4)]
    core = golden.core(name, max_num_seqs=4, max_num_batched_tokens=64)
    for request in ask(golden, name, prompts):
        core.submit(request)
    core.step()
    assert core._scheduler.get("r0").num_computed_tokens == 64
    assert len(core._scheduler._deferred) == 3
    if end == "abort":
        core.abort("r0")
    elif end == "fault":
        monkeypatch.setattr(core._scheduler.get("r0"), "prepare", lambda n: 1 / 0)
    else:
        break_next_forward(core, random.Random(0))
    got = {f"r{i}": [] for i in range(4)}
    reasons = {}
    cached = {}
    while core.has_work():
        for output in core.step().outputs:
            got[output.request_id] += output.new_token_ids
            reasons[output.request_id] = output.finish_reason
            cached[output.request_id] = output.num_cached_tokens
    assert reasons["r0"] is (FinishReason.ABORT if end == "abort" else FinishReason.ERROR)
    for i in (1, 2, 3):
        assert got[f"r{i}"] == cold(name, prompts[i], 20)
    assert cached == {"r0": 0, "r1": 64, "r2": 160, "r3": 160}
    assert core.stats().free_slots == 4


@pytest.mark.parametrize("name", ["llada2_b8", AR])
def test_a_forward_that_fails_takes_its_copies_with_it(golden, cold, name):
    """A request that was admitted with a copy, but has no part in the forward, lives on without it."""
    core = golden.core(name, max_num_seqs=3, max_num_batched_tokens=8 if name in BLOCK else 2)
    core.generate(ask(golden, name, [SYSTEM[:64] + question(1, 100)]))
    prompts = [question(2, 40), SYSTEM[:64] + question(3)]
    for request in ask(golden, name, prompts):
        core.submit(request)
    copies = []

    def broken(rows, copies_):
        copies.extend(copies_)
        assert len(rows) == 1
        raise RuntimeError("broken on purpose")

    original, core.engine.runner.forward = core.engine.runner.forward, broken
    (output,) = core.step().outputs
    core.engine.runner.forward = original
    assert (output.request_id, output.finish_reason) == ("r0", FinishReason.ERROR)
    assert [num_tokens for _, _, num_tokens in copies] == [64]
    assert core._scheduler.get("r1").num_computed_tokens == 0
    got = []
    while core.has_work():
        got += [token for output in core.step().outputs for token in output.new_token_ids]
    assert got == cold(name, prompts[1], 20)


@pytest.mark.parametrize("name", FAMILIES)
def test_resumed_tokens_are_found_and_kept_too(golden, cold, name):
    core = golden.core(name, max_num_seqs=1)
    prompt = SYSTEM[:24]
    whole = core.generate(ask(golden, name, [prompt], max_tokens=80))["r0"].new_token_ids
    assert whole == cold(name, prompt, 80)
    cut = 40  # at a block border of both
    request = golden.make(
        "resumed",
        prompt,
        max_tokens=80,
        ignore_eos=True,
        diffusion=diffusion_of(name),
        resume=whole[:cut],
    )
    before = core.stats()
    output = core.generate([request])["resumed"]
    assert output.new_token_ids == whole[cut:]
    # The client hears of its prompt only; the statistics count both.
    assert output.num_cached_tokens == 24
    after = core.stats()
    taken = after.num_cached_tokens - before.num_cached_tokens
    assert taken == reusable(name, len(prompt) + cut, len(prompt) + cut)
    assert after.num_prefill_tokens - before.num_prefill_tokens == len(prompt) + cut - taken


@pytest.mark.parametrize("name", FAMILIES)
def test_off_is_off(golden, cold, name):
    prompts = [SYSTEM[:40] + question(i) for i in range(4)]
    core = golden.core(name, max_num_seqs=4, enable_prefix_caching=False)
    assert not core.capabilities.prefix_caching
    assert golden.core(name).capabilities.prefix_caching
    for _ in range(2):
        outputs = core.generate(ask(golden, name, prompts))
        for i, prompt in enumerate(prompts):
            assert outputs[f"r{i}"].new_token_ids == cold(name, prompt, 20)
            assert outputs[f"r{i}"].num_cached_tokens == 0
    assert [core.engine.allocate_slot(str(i)) for i in range(4)] == [0, 1, 2, 3]
    assert core.stats().num_cached_tokens == 0
    assert core.stats().num_prefill_tokens == 2 * sum(map(len, prompts))


@pytest.mark.parametrize("enabled", [False, True])
def test_the_configuration_decides(golden, enabled):
    assert EngineConfig().enable_prefix_caching
    config = EngineConfig(enable_prefix_caching=enabled)
    for name in FAMILIES:
        engine = build_engine(*golden.loaded(name), config)
        assert engine.capabilities.prefix_caching is enabled


@pytest.mark.parametrize("name", ["llada2_b8", AR])
def test_the_slot_api_offers_nothing_stale(golden, cold, name):
    """Slots that it used and freed are right sources; a slot of it is never taken for something else."""
    model, info = golden.loaded(name)
    engine = (QwenEngine if name == AR else LLaDAEngine)(model, info, max_num_seqs=2, max_model_len=256)
    step = engine.batch_decode_step if name == AR else engine.batch_denoise_step
    for prompt in (SYSTEM[:40], SYSTEM[:40] + question(1), question(2, 30)):
        (request,) = ask(golden, name, [prompt])
        engine.allocate_slot(request.request_id)
        (output,) = engine.batch_prefill([request])
        got = list(output.new_token_ids)
        while not output.finished:
            (output,) = step([request])
            got += output.new_token_ids
        assert got == cold(name, prompt, 20)
        assert output.num_cached_tokens == 0
        engine.free_slot(request.request_id)
    assert engine.slots.free_slots == [1, 0]
    assert sorted(map(len, engine.prefix_cache._kept.values()))[0] > 30
