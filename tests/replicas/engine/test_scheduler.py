from pathlib import Path

import pytest
from scheduled_rows import advance, plan

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


def test_prompts_share_the_budget_by_halves_then_in_order_of_arrival():
    scheduler = Scheduler(SlotAllocator(4), max_num_batched_tokens=10)
    for name, length in (("a", 14), ("b", 3), ("c", 30)):
        scheduler.add(state(name, length))
    seen = []
    for _ in range(3):
        rows = scheduler.schedule()
        seen.append(plan(rows))
        advance(rows)
    # 5, 2 and 1 in the first pass, and the 2 that are left go to a. From the third step on a and b decode.
    assert seen == [
        [("a", 7), ("b", 2), ("c", 1)],
        [("a", 7), ("b", 1), ("c", 2)],
        [("a", 1), ("b", 1), ("c", 8)],
    ]


def test_shared_budgets_are_whole_blocks_and_used_in_full():
    scheduler = Scheduler(SlotAllocator(4), max_num_batched_tokens=224, block_length=32)
    for name, length in (("a", 900), ("b", 40), ("c", 200)):
        scheduler.add(state(name, length, diffusion=True))
    # Halves: 3 blocks of 7, 2 of 4, 1 of 2; the last one goes to a.
    assert plan(scheduler.schedule()) == [("a", 128), ("b", 64), ("c", 32)]


def test_one_prompt_has_the_whole_budget():
    for diffusion in (False, True):
        block = 32 if diffusion else None
        scheduler = Scheduler(SlotAllocator(4), max_num_batched_tokens=256, block_length=block)
        scheduler.add(state("a", 900, diffusion=diffusion))
        assert plan(scheduler.schedule()) == [("a", 256)]


def test_decoding_requests_that_need_more_than_the_budget_leave_one_block_to_the_first_prompt():
    scheduler = Scheduler(SlotAllocator(8), max_num_batched_tokens=64, block_length=32)
    for name in "abc":
        scheduler.add(state(name, 1, diffusion=True, max_tokens=200))
    while not all(one.started for one in scheduler.running) or not scheduler.running:
        advance(scheduler.schedule())
    scheduler.add(state("d", 100, diffusion=True))
    scheduler.add(state("e", 100, diffusion=True))
    assert plan(scheduler.schedule()) == [("a", 32), ("b", 32), ("c", 32), ("d", 32)]


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
