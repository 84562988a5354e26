"""What a request gets does not depend on what else is in the engine, nor on how it is cut into steps."""

import random

import pytest

from replicas.engine.llada_engine import LLaDAEngine
from replicas.engine.qwen_engine import QwenEngine
from replicas.errors import SlotError, SlotsExhaustedError
from replicas.protocol import DiffusionParams, FinishReason

FAMILIES = ["llada2_b32", "qwen3_dense_tied"]
EDITING = DiffusionParams(threshold=0.7, editing_threshold=0.5)


def mixed_requests(golden, name, count=8, **sampling):
    """Requests of prompt lengths 1 to 170 (120 for Qwen), LLaDA2.0 and 2.1 rules, different lengths."""
    prompts = golden.prompts(name)
    picked = [prompts[i * (len(prompts) - 1) // (count - 1)] for i in range(count)]
    diffusion = name.startswith("llada")
    return [
        golden.make(
            f"r{i}",
            prompt,
            max_tokens=17 + 7 * i,
            diffusion=(EDITING if i % 3 == 2 else DiffusionParams(threshold=0.9)) if diffusion else None,
            **{key: value[i] if isinstance(value, list) else value for key, value in sampling.items()},
        )
        for i, prompt in enumerate(picked)
    ]


def tokens_of(outputs):
    return {name: (output.new_token_ids, output.finish_reason) for name, output in outputs.items()}


def solo(golden, name, requests, **kwargs):
    return {
        request.request_id: tokens_of(golden.core(name, max_num_seqs=1, **kwargs).generate([request]))[
            request.request_id
        ]
        for request in requests
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_lengths_in_any_order_equal_solo(golden, name):
    requests = mixed_requests(golden, name)
    lengths = [len(request.prompt_token_ids) for request in requests]
    assert lengths[0] == 1
    assert lengths[-1] >= 120
    expected = solo(golden, name, requests)
    for seed in range(3):
        shuffled = random.Random(seed).sample(requests, len(requests))
        core = golden.core(name, max_num_seqs=8)
        assert tokens_of(core.generate(shuffled)) == expected
        assert core.stats().max_running_seen == 8


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("width", [2, 3, 32])
def test_any_width_and_staggered_arrival_equal_solo(golden, name, width):
    requests = mixed_requests(golden, name)
    expected = solo(golden, name, requests)
    core = golden.core(name, max_num_seqs=width)
    got = {request.request_id: [] for request in requests}
    reasons = {}
    waiting = list(requests)
    while waiting or core.has_work():
        if waiting:
            core.submit(waiting.pop())
        for output in core.step().outputs:
            got[output.request_id] += output.new_token_ids
            if output.finished:
                reasons[output.request_id] = output.finish_reason
    assert {name: (tokens, reasons[name]) for name, tokens in got.items()} == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_seeded_sampling_alone_equals_sampling_among_others(golden, name):
    requests = mixed_requests(
        golden, name, temperature=[0.8, 0.0, 0.8, 1.0, 0.8, 0.0, 1.5, 0.8], top_p=0.95, seed=list(range(8))
    )
    expected = solo(golden, name, requests)
    assert tokens_of(golden.core(name, max_num_seqs=8).generate(requests)) == expected
    # Chunking does not matter either.
    assert tokens_of(golden.core(name, max_num_batched_tokens=32).generate(requests)) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_seeds_decide(golden, name):
    prompt = golden.prompts(name)[3]
    diffusion = DiffusionParams(threshold=0.9) if name.startswith("llada") else None

    def texts(seeds):
        requests = [
            golden.make(f"s{i}", prompt, max_tokens=24, temperature=1.0, seed=seed, diffusion=diffusion)
            for i, seed in enumerate(seeds)
        ]
        return [tuple(o.new_token_ids) for o in golden.core(name).generate(requests).values()]

    assert len(set(texts([1, 2, 3, 4]))) == 4
    assert len(set(texts([5, 5, 5]))) == 1
    assert len(set(texts([None, None, None]))) == 3


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("chunk", [32, 64, 256, 4096])
def test_chunk_sizes_give_the_same(golden, name, chunk):
    requests = mixed_requests(golden, name)
    expected = solo(golden, name, requests)
    core = golden.core(name, max_num_batched_tokens=chunk)
    assert tokens_of(core.generate(requests)) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_one_forward_per_step_for_eight_live_requests(golden, name):
    requests = [
        golden.make(f"r{i}", prompt, max_tokens=64, ignore_eos=True, diffusion=None)
        for i, prompt in enumerate(golden.prompts(name)[:8])
    ]
    core = golden.core(name, max_num_seqs=8)
    for request in requests:
        core.submit(request)
    core.step()
    assert core.stats().running == 8
    for _ in range(12):
        before = core.stats()
        core.step()
        after = core.stats()
        assert after.running == 8
        assert after.num_forwards == before.num_forwards + 1
        assert after.steps == before.steps + 1
        if name.startswith("llada"):
            assert after.num_denoise_row_forwards == before.num_denoise_row_forwards + 8
        else:
            assert after.num_decode_tokens == before.num_decode_tokens + 8


def test_no_request_no_forward(golden):
    core = golden.core("llada2_b8")
    assert core.step().outputs == []
    assert core.stats().num_forwards == core.stats().steps == 0


@pytest.mark.parametrize("max_tokens", [1, 31, 33, 37])
@pytest.mark.parametrize("diffusion", [DiffusionParams(), DiffusionParams(eos_early_stop=False), EDITING])
def test_max_tokens_is_exact(golden, max_tokens, diffusion):
    requests = [
        golden.make(f"r{i}", prompt, max_tokens=max_tokens, ignore_eos=True, diffusion=diffusion)
        for i, prompt in enumerate(golden.prompts("llada2_b32")[::4])
    ]
    for output in golden.core("llada2_b32").generate(requests).values():
        assert len(output.new_token_ids) == max_tokens
        assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", FAMILIES)
def test_stop_tokens_and_min_tokens(golden, name):
    prompt = golden.prompts(name)[3]
    diffusion = DiffusionParams(threshold=0.9) if name.startswith("llada") else None

    def generate(**sampling):
        request = golden.make("r", prompt, max_tokens=40, diffusion=diffusion, ignore_eos=True, **sampling)
        return golden.core(name).generate([request])["r"]

    plain = generate().new_token_ids
    assert len(plain) == 40
    stop = plain[9]
    at = plain.index(stop)
    stopped = generate(stop_token_ids=(stop,))
    assert stopped.new_token_ids == plain[: at + 1]
    assert stopped.finish_reason is FinishReason.STOP
    # Below min_tokens the token is not chosen; what follows may differ then.
    longer = generate(stop_token_ids=(stop,), min_tokens=at + 1).new_token_ids
    assert stop not in longer[: at + 1]
    assert longer[-1] == stop or len(longer) == 40


@pytest.mark.parametrize("name", FAMILIES)
def test_resuming_goes_on_where_it_stopped(golden, name):
    prompt = golden.prompts(name)[4]
    diffusion = DiffusionParams(threshold=0.9) if name.startswith("llada") else None
    whole = (
        golden.core(name)
        .generate([golden.make("r", prompt, max_tokens=70, ignore_eos=True, diffusion=diffusion)])["r"]
        .new_token_ids
    )
    # At block borders for block diffusion, anywhere otherwise.
    for cut in [32 - len(prompt) % 32, 64 - len(prompt) % 32] if diffusion else [1, 17, 69]:
        request = golden.make(
            "r", prompt, max_tokens=70, ignore_eos=True, diffusion=diffusion, resume=whole[:cut]
        )
        assert golden.core(name).generate([request])["r"].new_token_ids == whole[cut:]


def test_llada20_streams_the_decided_left_part_and_21_whole_blocks(golden):
    prompt = golden.prompts("llada2_b32")[3]
    for params, whole in ((DiffusionParams(threshold=0.9), False), (EDITING, True)):
        core = golden.core("llada2_b32")
        core.submit(golden.make("r", prompt, max_tokens=70, ignore_eos=True, diffusion=params))
        sizes, position = [], len(prompt)
        while core.has_work():
            for output in core.step().outputs:
                if output.new_token_ids:
                    position += len(output.new_token_ids)
                    sizes.append(position)
        assert position == len(prompt) + 70
        if whole:
            assert all(end % 32 == 0 for end in sizes[:-1])
        else:
            assert any(end % 32 for end in sizes[:-1])


def test_a_predicted_mask_never_stays(golden, monkeypatch):
    """The goldens' output row of the mask token is zero, so they cannot show a mask that is predicted."""
    model, _ = golden.loaded("llada2_b8")
    mask = 319
    compute_logits = type(model).compute_logits

    def wants_masks(self, hidden):
        logits = compute_logits(self, hidden)
        logits[:, mask] = logits.max(dim=-1).values + 1
        return logits

    monkeypatch.setattr(type(model), "compute_logits", wants_masks)
    for params in (DiffusionParams(), DiffusionParams(threshold=0.1, editing_threshold=0.0)):
        for temperature in (0.0, 1.0):
            request = golden.make(
                "r", [1, 2, 3], max_tokens=20, ignore_eos=True, diffusion=params, temperature=temperature
            )
            output = golden.core("llada2_b8").generate([request])["r"]
            assert len(output.new_token_ids) == 20
            assert mask not in output.new_token_ids
    # Unbanned, as in the original, it comes out.
    core = golden.core("llada2_b8", ban_mask_token=False)
    request = golden.make("r", [1, 2, 3], max_tokens=20, diffusion=DiffusionParams())
    assert mask in core.generate([request])["r"].new_token_ids


@pytest.mark.parametrize("name", ["qwen3_dense_tied", "llada2_b32"])
def test_the_slot_api(golden, name):
    diffusion = name.startswith("llada")
    model, info = golden.loaded(name)
    engine = (LLaDAEngine if diffusion else QwenEngine)(model, info, max_num_seqs=3, max_model_len=256)
    step = engine.batch_denoise_step if diffusion else engine.batch_decode_step
    requests = mixed_requests(golden, name)[:3]
    expected = solo(golden, name, requests)

    assert engine.supports_batching()
    engine.allocate_batch_slots(3)
    with pytest.raises(SlotError, match="width is fixed"):
        engine.allocate_batch_slots(4)
    with pytest.raises(SlotError, match="has no slot"):
        engine.batch_prefill(requests[:1])
    for request in requests:
        engine.allocate_slot(request.request_id)
    with pytest.raises(SlotsExhaustedError):
        engine.allocate_slot("one too many")
    with pytest.raises(SlotError, match="was not prefilled"):
        step(requests[:1])

    got = {}
    for output in engine.batch_prefill(requests):
        got[output.request_id] = output.new_token_ids
        assert len(output.new_token_ids) == (0 if diffusion else 1)
    with pytest.raises(SlotError, match="was prefilled before"):
        engine.batch_prefill(requests[:1])
    live = list(requests)
    while live:
        before = engine.runner.num_forwards
        outputs = step(live)
        assert engine.runner.num_forwards == before + 1
        for output in outputs:
            got[output.request_id] += output.new_token_ids
            if output.finished:
                live = [request for request in live if request.request_id != output.request_id]
                engine.free_slot(output.request_id)
    assert got == {name: tokens for name, (tokens, _) in expected.items()}
    assert engine.slots.num_free == 3
    with pytest.raises(SlotError, match="has no slot"):
        engine.free_slot(requests[0].request_id)
    assert step([]) == []


def test_a_single_slot_does_not_batch(golden):
    model, info = golden.loaded("qwen2_5")
    assert not QwenEngine(model, info, max_num_seqs=1, max_model_len=64).supports_batching()


def test_a_short_request_is_not_held_up_by_a_long_prompt(golden):
    prompts = golden.prompts("llada2_b32")
    core = golden.core("llada2_b32", max_num_batched_tokens=64)
    core.submit(golden.make("long", prompts[-1], max_tokens=32, diffusion=DiffusionParams()))
    core.submit(golden.make("short", prompts[1], max_tokens=4, diffusion=DiffusionParams()))
    order = []
    while core.has_work():
        order += [output.request_id for output in core.step().outputs if output.finished]
    assert order == ["short", "long"]
