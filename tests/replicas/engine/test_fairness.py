"""Long prompts and slow requests do not stop short and easy ones."""

import pytest

from replicas.protocol import DiffusionParams

# (model, tokens of the long prompt, block length)
LONG = [("qwen3_dense_tied", 1600, None), ("llada2_b32", 960, 32)]


def diffusion_of(name, threshold=0.0):
    return DiffusionParams(threshold=threshold) if name.startswith("llada") else None


def run(core, arrivals):
    """Steps until all have ended; ``arrivals``: {step: [requests]}. Returns {id: step of its end}, {id: tokens}."""
    ended, tokens = {}, {}
    number = 0
    while any(at >= number for at in arrivals) or core.has_work():
        for request in arrivals.get(number, []):
            core.submit(request)
            tokens[request.request_id] = []
        for output in core.step().outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finished:
                ended[output.request_id] = number
        number += 1
    return ended, tokens


@pytest.mark.parametrize(("name", "length", "block"), LONG)
@pytest.mark.parametrize("caching", [False, True])
def test_a_short_request_does_not_wait_for_a_long_prompt(golden, name, length, block, caching):
    def core(**kwargs):
        return golden.core(
            name, max_model_len=None, max_num_batched_tokens=64, enable_prefix_caching=caching, **kwargs
        )

    prompt = [(7 * i * i + 3) % 290 + 5 for i in range(length)]
    long = golden.make("long", prompt, max_tokens=8, ignore_eos=True, diffusion=diffusion_of(name))
    short = golden.make("short", [5, 6, 7] * 10, max_tokens=8, ignore_eos=True, diffusion=diffusion_of(name))
    arrivals = {0: [long], 3: [short]}
    ended, tokens = run(core(), arrivals)
    serial, expected = run(core(max_num_seqs=1), arrivals)
    assert tokens == expected
    assert ended["short"] < length // 64 <= ended["long"] < serial["short"]
    # 30 tokens are computed in one step, or two beside the long prompt; 7 steps more decide the rest.
    assert ended["short"] <= 3 + 1 + 7
    # And the long one loses no more than the short one's tokens.
    assert ended["long"] - serial["long"] <= 2


@pytest.mark.parametrize(("name", "length", "block"), LONG)
def test_many_short_prompts_do_not_stop_a_long_one(golden, name, length, block):
    """The first in order moves on in every step, whatever arrives."""
    core = golden.core(name, max_model_len=None, max_num_batched_tokens=64, max_num_seqs=4)
    prompt = [(7 * i * i + 3) % 290 + 5 for i in range(length)]
    core.submit(golden.make("long", prompt, max_tokens=4, diffusion=diffusion_of(name)))
    number, computed = 0, 0
    core.step()
    while (state := core._scheduler.get("long")) is not None and not state.started:
        assert state.num_computed_tokens >= computed + (block or 16)
        computed = state.num_computed_tokens
        for _ in range(2):
            core.submit(
                golden.make(
                    f"s{number}", [9 + number % 100] * 40, max_tokens=6, diffusion=diffusion_of(name, 0.9)
                )
            )
            number += 1
        core.step()
    assert number > 20


@pytest.mark.parametrize("name", ["qwen3_dense_tied", "llada2_b32"])
def test_easy_requests_end_on_their_own_time_and_their_slots_are_filled_at_once(golden, name):
    """Eight short ones and a slow one: each takes as many steps as alone."""

    def request(request_id, prompt, max_tokens, threshold=0.0):
        return golden.make(
            request_id,
            prompt,
            max_tokens=max_tokens,
            ignore_eos=True,
            diffusion=diffusion_of(name, threshold),
        )

    slow = request("slow", [9] * 20, 160, 1.0)
    easy = [request(f"e{i}", [20 + 3 * i] * (4 + i), 6 + i) for i in range(8)]
    late = request("late", [150] * 5, 4)
    alone, expected = {}, {}
    for each in [slow, *easy, late]:
        ended, tokens = run(golden.core(name, max_num_seqs=1), {0: [each]})
        alone |= ended
        expected |= tokens
    core = golden.core(name, max_num_seqs=9)
    ended, tokens = run(core, {0: [slow, *easy, late]})
    assert tokens == expected
    for each in [slow, *easy]:
        assert ended[each.request_id] == alone[each.request_id]
    # Nine slots, ten requests: the last one starts in the step after the first end.
    first = min(ended[each.request_id] for each in easy)
    assert ended["late"] == first + 1 + alone["late"]
    assert ended["slow"] > 5 * max(ended[each.request_id] for each in [*easy, late])
