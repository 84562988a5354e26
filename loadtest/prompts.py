"""What load-test users ask, and what a right answer is.

A figure counts only if the tokens were right. Any model can be checked against itself: at temperature 0 the
answer under load must equal the answer that the same server gave when it was alone. For models that know
the word tasks, the right answer is known beforehand too.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data" / "mt_bench_question.jsonl"


@dataclass(frozen=True)
class Prompt:
    """``expected`` is the only right answer, or None when only the server's own answer can tell."""

    text: str
    expected: str | None = None


def mt_bench_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """First turns of MT-bench questions, in a seeded order; repeated when there are fewer than ``count``."""
    with DATA.open(encoding="utf-8") as lines:
        turns = [json.loads(line)["turns"][0] for line in lines]
    random.Random(seed).shuffle(turns)
    return [Prompt(turns[i % len(turns)]) for i in range(count)]


def word_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Tasks of the `llada2-words` model with their answers."""
    rng = random.Random(seed)
    tasks: dict[str, Callable[[str], str]] = {
        "repeat": str,
        "reverse": lambda word: word[::-1],
        "uppercase": str.upper,
        "spell": "-".join,
    }
    prompts = []
    for _ in range(count):
        kind = rng.choice(list(tasks))
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8)))
        prompts.append(Prompt(f"{kind}: {word}", tasks[kind](word)))
    return prompts
