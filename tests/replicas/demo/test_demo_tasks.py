"""The word tasks: answers, the split into training and held-out prompts, determinism."""

from __future__ import annotations

import random

import pytest

from replicas.demo.tasks import HELP, KINDS, Task, check, is_held_out, sample_task, solve


@pytest.mark.parametrize(
    ("kind", "words", "answer"),
    [
        ("repeat", ["one", "two"], "one two"),
        ("reverse", ["hello"], "olleh"),
        ("uppercase", ["hello"], "HELLO"),
        ("sort", ["hello"], "ehllo"),
        ("spell", ["cat"], "c-a-t"),
        ("count", ["hello"], "5"),
        ("help", [], HELP),
    ],
)
def test_answers(kind: str, words: list[str], answer: str) -> None:
    assert solve(kind, words) == answer


def test_every_kind_has_an_answer_tested_above() -> None:
    assert set(KINDS) == {"repeat", "reverse", "uppercase", "sort", "spell", "count", "help"}


@pytest.mark.parametrize("kind", KINDS)
def test_check_accepts_the_answer_and_nothing_else(kind: str) -> None:
    rng = random.Random(3)
    for _ in range(50):
        task = sample_task(rng, kind)
        assert task.kind == kind
        assert check(task, task.answer)
        assert check(task, f" {task.answer}\n")
        assert not check(task, task.answer + "x")
        assert not check(task, task.answer[:-1])
        assert not check(task, "")


def test_prompt_and_answer_fit_each_other() -> None:
    rng = random.Random(4)
    for _ in range(300):
        task = sample_task(rng)
        command, _, rest = task.prompt.partition(": ")
        if task.kind == "help":
            assert command not in KINDS
        else:
            assert task == Task(command, task.prompt, solve(command, rest.split(" ")))


def test_same_seed_same_tasks_and_other_seed_others() -> None:
    def draw(seed: int) -> list[Task]:
        rng = random.Random(seed)
        return [sample_task(rng) for _ in range(20)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_training_prompts_are_never_held_out_ones() -> None:
    rng = random.Random(5)
    for _ in range(300):
        assert is_held_out(sample_task(rng).prompt)
        assert not is_held_out(sample_task(rng, held_out=False).prompt)


def test_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match=r"'dance'.*reverse"):
        sample_task(random.Random(0), "dance")
    with pytest.raises(ValueError, match="'dance'"):
        solve("dance", ["x"])
