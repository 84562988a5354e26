"""Random work on few slots: whatever ends by itself has the tokens of a cold run, and all slots come back."""

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefix_requests import AR, SYSTEM, ask, break_next_forward, question

from replicas.protocol import FinishReason


def break_row(core, chance):
    """Lets one running request fail before or after its next forward."""
    running = core._scheduler.running
    if running:
        setattr(chance.choice(running), chance.choice(["prepare", "apply"]), lambda *args: 1 / 0)


def pool():
    """Prompts that share beginnings of many lengths, with each other and with themselves."""
    chance = random.Random(1)
    prompts = [SYSTEM[: chance.choice([1, 7, 8, 20, 33, 64, 90])] + question(i, 1 + i % 5) for i in range(10)]
    prompts += [prompts[8] + question(i, 20) for i in range(4)] + [question(30 + i, 12) for i in range(3)]
    return [*prompts, prompts[0], prompts[-1]]


def play(golden, cold, name, actions, seed, **limits):
    """Random work on few slots; every request that ends by itself has its cold tokens."""
    chance = random.Random(seed)
    prompts = pool()
    core = golden.core(name, **limits)
    got, wanted, reasons = {}, {}, {}

    def step():
        for output in core.step().outputs:
            got[output.request_id] += output.new_token_ids
            if output.finished:
                reasons[output.request_id] = output.finish_reason

    for action in actions:
        if action == "submit":
            request_id, max_tokens = str(len(wanted)), chance.choice([1, 3, 12, 30])
            prompt = chance.choice(prompts)
            finished = [key for key, reason in reasons.items() if reason is FinishReason.LENGTH]
            if finished and chance.random() < 0.3:
                # The next turn of a conversation.
                key = chance.choice(finished)
                prompt = ([*wanted[key][0], *got[key], 17])[:120]
            wanted[request_id], got[request_id] = (prompt, max_tokens), []
            (request,) = ask(golden, name, [prompt], max_tokens)
            core.submit(dataclasses.replace(request, request_id=request_id))
        elif action == "abort":
            live = [key for key in wanted if key not in reasons]
            core.abort(chance.choice(live) if live else "nobody")
        elif action == "fault":
            break_row(core, chance)
        elif action == "forward":
            break_next_forward(core, chance)
        else:
            step()
    while core.has_work():
        step()
    stats = core.stats()
    assert (stats.waiting, stats.running) == (0, 0)
    assert stats.free_slots == stats.total_slots == len(core.engine.slots.free_slots)
    assert not core._scheduler._deferred
    assert not core.engine.prefix_cache._running
    for key, (prompt, max_tokens) in wanted.items():
        expected = cold(name, prompt, max_tokens)
        if reasons[key] is FinishReason.LENGTH:
            assert got[key] == expected, (key, prompt, max_tokens)
        else:
            assert got[key] == expected[: len(got[key])]
    return stats


@pytest.mark.parametrize("name", ["llada2_b8", AR])
def test_any_order_of_work_gives_cold_tokens(golden, cold, name):
    actions = st.sampled_from(["submit"] * 6 + ["step"] * 9 + ["abort", "fault", "forward"])

    @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(actions, min_size=20, max_size=80), st.integers(0, 2**16), st.sampled_from([2, 3]))
    def work(actions, seed, slots):
        play(golden, cold, name, actions, seed, max_num_seqs=slots, max_num_batched_tokens=40)

    work()


@pytest.mark.parametrize("static_decode", [False, True])
@pytest.mark.parametrize("name", ["llada2_b32", AR])
def test_24_cycles_of_finish_abort_and_fault_leave_all_slots_free(golden, cold, name, static_decode):
    core_limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "static_decode": static_decode}
    cycle = (
        ["submit"] * 6 + ["step"] * 3 + ["abort", "step", "fault", "step", "step", "forward"] + ["step"] * 9
    )
    stats = play(golden, cold, name, cycle * 24, 5, **core_limits)
    assert stats.num_cached_tokens > 500
    for reason in ("abort", "error", "length"):
        assert stats.num_finished[reason] >= 15
