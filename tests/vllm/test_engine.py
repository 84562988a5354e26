"""The engine protocol on vLLM, both families: parameters, ends of all kinds, deaths."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import psutil
import pytest
from vllm_client import LLADA2, QWEN, cases, request, start

from replicas.errors import EngineDeadError, InvalidRequestError
from replicas.protocol import DiffusionParams, FinishReason

PROMPT = cases(QWEN, "greedy.json")[0]["prompt_ids"]
LONG = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(params=["qwen", "llada2"])
def client(request):
    return request.getfixturevalue(request.param)


def assert_idle(client) -> None:
    stats = client.engine.stats()
    total = client.engine.capabilities.max_num_seqs
    assert (stats.waiting, stats.running, stats.free_slots, stats.kv_usage) == (0, 0, total, 0)
    client.engine.check_health()


def greedy(client, **sampling) -> list[int]:
    (tokens,) = client.tokens(request("greedy", PROMPT, **sampling))
    return tokens


def test_a_seeded_request_alone_and_among_seven_others(client):
    seeded = request("seeded", PROMPT, max_tokens=40, temperature=0.8, seed=7, ignore_eos=True)
    others = [
        dataclasses.replace(seeded, request_id=f"o{i}", prompt_token_ids=(*PROMPT, *range(5, 5 + i)))
        for i in range(7)
    ]
    (alone,) = client.tokens(seeded)
    assert client.tokens(*others[:3], seeded, *others[3:])[3] == alone
    assert alone != greedy(client, max_tokens=40, ignore_eos=True)


def test_a_seeded_prompt_in_chunks_draws_the_same_alone_and_among_others(client):
    """Chunks are cut by what else the step computes; the tokens drawn after them, but the last, do not count."""
    limit = client.engine._llm.vllm_config.scheduler_config.max_num_batched_tokens
    prompt = [5 + i * 7 % 490 for i in range(limit + 117)]
    seeded = request("long", prompt, max_tokens=24, temperature=0.9, seed=11, ignore_eos=True)
    others = [request(f"o{i}", PROMPT, max_tokens=30, temperature=1.0, seed=i) for i in range(7)]
    (alone,) = client.tokens(seeded)
    assert client.tokens(*others, seeded)[-1] == alone
    (short,) = client.tokens(dataclasses.replace(seeded, prompt_token_ids=tuple(PROMPT)))
    assert short != alone


def test_other_seeds_give_other_tokens_and_top_k_1_is_greedy(client):
    drawn = client.tokens(*(request(f"n{i}", PROMPT, max_tokens=32, temperature=1.0) for i in range(4)))
    assert len({tuple(tokens) for tokens in drawn}) == 4
    # LLaDA2 decides first what it is surest of, and with top_k 1 it is sure of everything: all of a block at once then.
    at_once = DiffusionParams(steps=1) if client.engine.info.is_diffusion else None
    expected, top_1 = client.tokens(
        request("greedy", PROMPT, at_once, max_tokens=70, ignore_eos=True),
        request("top_1", PROMPT, at_once, max_tokens=70, ignore_eos=True, temperature=1.0, top_k=1, seed=3),
    )
    assert top_1 == expected


def test_seeds_that_differ_in_high_bits_draw_other_tokens(client):
    drawn = client.tokens(
        *(
            request(f"s{seed}", PROMPT, max_tokens=24, temperature=1.0, seed=seed)
            for seed in (0, 2**32, 2**62)
        )
    )
    assert len({tuple(tokens) for tokens in drawn}) == 3


def test_top_p_near_0_is_greedy(qwen):
    drawn = qwen.tokens(request("p", PROMPT, max_tokens=20, temperature=1.0, top_p=1e-6, seed=3))
    assert drawn == [greedy(qwen, max_tokens=20)]


def test_stop_tokens_and_min_tokens(client):
    expected = greedy(client, max_tokens=40, ignore_eos=True)
    stop = expected[6]
    first = expected.index(stop)
    (stopped,) = client.run(request("stop", PROMPT, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,)))
    assert stopped.new_token_ids == expected[: first + 1]
    assert stopped.finish_reason is FinishReason.STOP
    (late,) = client.run(
        request("late", PROMPT, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,), min_tokens=first + 3)
    )
    assert len(late.new_token_ids) >= first + 3
    assert stop not in late.new_token_ids[: first + 3]
    assert_idle(client)


def test_a_resumed_request_goes_on(client):
    expected = greedy(client, max_tokens=70, ignore_eos=True)
    # LLaDA2 resumes after whole blocks: inside one, its steps are not repeated.
    given = 7 if not client.engine.info.is_diffusion else 64 - len(PROMPT) % 32
    resumed = dataclasses.replace(
        request("resumed", PROMPT, max_tokens=70, ignore_eos=True), resume_token_ids=tuple(expected[:given])
    )
    assert client.tokens(resumed) == [expected[given:]]


def test_aborts_leave_nothing_behind(client):
    engine = client.engine
    for i in range(12):
        engine.submit(request(f"r{i}", PROMPT, **LONG))
    client.wait("r0", bool)
    assert engine.stats().waiting >= 1
    for i in range(12):
        engine.abort(f"r{i}")
    engine.abort("nobody")
    for i in range(12):
        assert client.finish(f"r{i}").finish_reason is FinishReason.ABORT
    # The same name at once again: nothing of the first may come to the second.
    engine.submit(request("again", PROMPT, **LONG))
    client.wait("again", bool)
    engine.abort("again")
    engine.submit(request("again", PROMPT, max_tokens=5, ignore_eos=True))
    outputs = client.wait("again", lambda found: found[-1].finish_reason == "length" if found else False)
    aborted = next(i for i, output in enumerate(outputs) if output.finish_reason == "abort")
    second = [token for output in outputs[aborted + 1 :] for token in output.new_token_ids]
    client.forget()
    assert second == greedy(client, max_tokens=5, ignore_eos=True)
    late = dataclasses.replace(request("late", PROMPT, **LONG), deadline=time.time() + 0.05)
    (ended,) = client.run(late)
    assert ended.error.code == "deadline_exceeded"
    assert_idle(client)


BAD = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": float("nan")}, "top_p"),
    ({"max_tokens": 10**4}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 99}, "logprobs"),
    ({"min_tokens": 6}, "min_tokens"),
    ({"stop_token_ids": (10**6,)}, "stop_token_ids"),
]
BAD_DIFFUSION = [
    (DiffusionParams(steps=0), "steps"),
    (DiffusionParams(threshold=float("nan")), "threshold"),
    (DiffusionParams(editing_threshold=float("nan")), "editing_threshold"),
    (DiffusionParams(editing_threshold=0.5, max_post_steps=10**6), "max_post_steps"),
    (DiffusionParams(steps=4, minimal_topk=0), "minimal_topk"),
]


@pytest.mark.parametrize(("change", "param"), BAD)
def test_bad_requests_are_named_and_the_next_one_works(client, change, param):
    arguments = {"max_tokens": 5} | change
    prompt = arguments.pop("prompt", PROMPT)
    with pytest.raises(InvalidRequestError) as info:
        client.engine.submit(request("bad", prompt, **arguments))
    assert info.value.param == param
    assert len(greedy(client, max_tokens=5, ignore_eos=True)) == 5
    assert_idle(client)


@pytest.mark.parametrize(("diffusion", "param"), BAD_DIFFUSION)
def test_bad_diffusion_parameters_are_named(llada2, diffusion, param):
    with pytest.raises(InvalidRequestError) as info:
        llada2.engine.submit(request("bad", PROMPT, diffusion, max_tokens=5))
    assert info.value.param == param
    assert len(greedy(llada2, max_tokens=5, ignore_eos=True)) == 5


def test_a_mask_in_the_prompt_is_named(llada2):
    with pytest.raises(InvalidRequestError, match="mask token") as info:
        llada2.engine.submit(request("bad", [5, llada2.engine.info.mask_token_id], max_tokens=5))
    assert info.value.param == "prompt"


def test_extreme_parameters_that_are_allowed_work(client):
    arguments = [
        {"temperature": 1e-9, "seed": -(2**63)},
        {"temperature": 2.0, "seed": 2**63 - 1},
        {"temperature": 1.0, "top_k": 10**6, "top_p": 1e-9},
        {"stop_token_ids": tuple(range(60))},
        {"logprobs": 20},
        {"logprobs": 0},
    ]
    requests = [
        request(f"x{i}", PROMPT, max_tokens=6, min_tokens=6, **extra) for i, extra in enumerate(arguments)
    ]
    assert [len(tokens) for tokens in client.tokens(*requests)] == [6] * 6
    assert_idle(client)


def test_logprobs_are_the_reference_s(qwen):
    case = next(case for case in cases(QWEN, "greedy.json") if case.get("logprobs"))
    (output,) = qwen.run(request("l", case["prompt_ids"], max_tokens=case["max_tokens"], logprobs=5))
    assert len(output.logprobs) == len(output.new_token_ids)
    for entry, expected in zip(output.logprobs, case["logprobs"], strict=False):
        assert entry.token_id == expected["token"]
        assert entry.logprob == pytest.approx(expected["logprob"], abs=1e-3)
        assert [token for token, _ in entry.top] == [token for token, _ in expected["top5"]]


@pytest.mark.parametrize("name", [QWEN, LLADA2])
def test_a_killed_engine_process_ends_requests_and_the_engine(name):
    before = set(psutil.Process().children(recursive=True))
    client = start(name)
    engine = client.engine
    engine.submit(request("r", PROMPT, max_tokens=900, ignore_eos=True))
    client.wait("r", bool)
    processes = [p for p in psutil.Process().children(recursive=True) if p not in before]
    core = max(processes, key=lambda p: p.memory_info().rss)
    os.kill(core.pid, signal.SIGKILL)
    killed = time.monotonic()
    output = client.finish("r")
    assert time.monotonic() - killed < 1.0
    assert (output.error.code, output.error.retryable) == ("engine_dead", True)
    with pytest.raises(EngineDeadError):
        engine.check_health()
    with pytest.raises(EngineDeadError):
        engine.submit(request("next", [1], max_tokens=1))
    client.close()
    assert isinstance(client.error, EngineDeadError)
    assert_nothing_left(before)


def test_shutdown_ends_requests_and_leaves_no_process():
    before = set(psutil.Process().children(recursive=True))
    client = start(QWEN)
    client.engine.submit(request("r", PROMPT, max_tokens=900, ignore_eos=True))
    client.wait("r", bool)
    client.close()
    client.close()
    assert client.finish("r").error.code == "engine_dead"
    assert_nothing_left(before)


def assert_nothing_left(before: set[psutil.Process]) -> None:
    for _ in range(100):
        left = [p for p in psutil.Process().children(recursive=True) if p not in before and p.is_running()]
        # The interpreter's own, for shared memory: it ends with this process.
        left = [
            p
            for p in left
            if p.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in str(p.cmdline())
        ]
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(f"left behind: {[(p.pid, p.cmdline()) for p in left]}")
