from pathlib import Path

import pytest

from replicas.engine.diffusion_state import DiffusionState
from replicas.engine.request_state import AutoregressiveState
from replicas.engine.scheduler import Scheduler
from replicas.engine.slots import SlotAllocator
from replicas.model_info import ModelInfo
from replicas.protocol import GenerationRequest, SamplingParams

AR = ModelInfo(Path("m"), "Qwen3ForCausalLM", 100, 1024, (7,))
DIFFUSION = ModelInfo(Path("m"), "LLaDA2MoeModelLM", 100, 1024, (7,), 32, 99)


def state(name, num_prompt, *, diffusion=False, max_tokens=8):
    request = GenerationRequest(name, "m", (1,) * num_prompt, SamplingParams(max_tokens=max_tokens))
    return (DiffusionState if diffusion else AutoregressiveState)(request, DIFFUSION if diffusion else AR, 0)


def advance(rows, token=1):
    """What a forward does to the states."""
    for scheduled in rows:
        row = scheduled.state.prepare(scheduled.num_tokens)
        scheduled.state.apply(row, [token] * len(row.decide), [0.0] * len(row.decide))


def plan(rows):
    return [(row.state.request_id, row.num_tokens) for row in rows]


def test_admission_is_first_come_first_served_and_waits_for_a_slot():
    slots = SlotAllocator(2)
    scheduler = Scheduler(slots, max_num_batched_tokens=100)
    states = [state(name, 4) for name in "abc"]
    for each in states:
        scheduler.add(each)
    assert plan(scheduler.schedule()) == [("a", 4), ("b", 4)]
    assert [each.request_id for each in scheduler.waiting] == ["c"]
    scheduler.remove(states[0])
    assert plan(scheduler.schedule()) == [("b", 4), ("c", 4)]
    scheduler.remove(states[1])
    scheduler.remove(states[2])
    scheduler.remove(states[2])  # twice is harmless
    assert scheduler.schedule() == []
    assert slots.num_free == 2
    assert len(scheduler) == 0


def test_prompts_share_the_budget_in_order_of_arrival():
    scheduler = Scheduler(SlotAllocator(4), max_num_batched_tokens=10)
    for name, length in (("a", 14), ("b", 3), ("c", 30)):
        scheduler.add(state(name, length))
    seen = []
    for _ in range(3):
        rows = scheduler.schedule()
        seen.append(plan(rows))
        advance(rows)
    # a and b decode from the third step on, and c takes what they leave.
    assert seen == [[("a", 10)], [("a", 4), ("b", 3), ("c", 3)], [("a", 1), ("b", 1), ("c", 8)]]


def test_decoding_requests_never_wait_for_a_prompt_nor_the_prompt_for_them():
    scheduler = Scheduler(SlotAllocator(40), max_num_batched_tokens=32)
    for i in range(32):
        scheduler.add(state(str(i), 1, max_tokens=500))
    advance(scheduler.schedule())
    scheduler.add(state("long", 100))
    for _ in range(3):
        rows = scheduler.schedule()
        assert [row.num_tokens for row in rows[:32]] == [1] * 32
        assert rows[32].state.request_id == "long"
        assert rows[32].num_tokens == 16
        advance(rows)


@pytest.mark.parametrize("budget", [32, 50, 64, 100, 2048])
def test_diffusion_chunks_are_whole_blocks_and_end_in_the_canvas(budget):
    scheduler = Scheduler(SlotAllocator(1), max_num_batched_tokens=budget, block_length=32)
    one = state("a", 170, diffusion=True)
    scheduler.add(one)
    computed = 0
    while not one.started:
        (row,) = scheduler.schedule()
        assert row.num_tokens % 32 == 0
        assert 0 < row.num_tokens <= budget
        computed += row.num_tokens
        advance([row])
    # Five whole prompt blocks and the canvas: each computed once before the first decision.
    assert computed == 192
    assert one.num_computed_tokens == 160


def test_a_finished_block_is_committed_with_the_next_ones_first_pass():
    scheduler = Scheduler(SlotAllocator(1), max_num_batched_tokens=2048, block_length=32)
    one = state("a", 40, diffusion=True, max_tokens=60)
    scheduler.add(one)
    lengths = []
    while one.finish_reason is None:
        rows = scheduler.schedule()
        lengths.append((rows[0].num_tokens, one.num_computed_tokens))
        advance(rows)
    # Prompt block and canvas together; 24 masks, one a step; then commit and next canvas together.
    assert lengths[0] == (64, 0)
    assert lengths[1:24] == [(32, 32)] * 23
    assert lengths[24] == (64, 32)
    assert lengths[25:56] == [(32, 64)] * 31


def test_budget_below_two_blocks_commits_in_a_forward_of_its_own_only_while_prefilling():
    scheduler = Scheduler(SlotAllocator(1), max_num_batched_tokens=32, block_length=32)
    one = state("a", 64, diffusion=True, max_tokens=64)
    scheduler.add(one)
    forwards = 0
    while one.finish_reason is None:
        advance(scheduler.schedule())
        forwards += 1
    assert one.num_forwards == 64
    assert forwards == 64 + 2


def test_queued_tokens_count_prompt_and_new_tokens():
    one = state("a", 40, max_tokens=8)
    assert one.num_queued_tokens == 48
    advance_once = one.prepare(one.chunk(30))
    one.apply(advance_once, [], [])
    assert one.num_queued_tokens == 18
