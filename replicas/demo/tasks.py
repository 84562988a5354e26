"""Word tasks with one right answer each: what the `llada2-words` demo model is trained and checked on.

Every prompt is `<command>: <words>`, every answer is a function of the prompt alone, so a test, a load
test or a benchmark can verify each response it gets. Prompts fall into two disjoint halves by a hash of
their text: training draws from one, everything else from the other, so a prompt made with
`sample_task(rng)` was never seen in training, whatever the seed.

Standard library only: a load generator can use this module without torch.
"""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

HELP = "I can repeat, reverse, uppercase, sort, spell or count. Try: reverse: hello"
"""The answer to any prompt that is not a known command."""

# Shares in the training mixture. `repeat` of several words and `help` give answers of more than one
# diffusion block; sorting needs the most practice.
KIND_WEIGHTS: dict[str, float] = {
    "repeat": 1.8,
    "reverse": 1.2,
    "uppercase": 0.5,
    "sort": 2.4,
    "spell": 0.7,
    "count": 0.4,
    "help": 0.5,
}
KINDS: tuple[str, ...] = tuple(KIND_WEIGHTS)

MAX_WORD_LETTERS = 8
MAX_REPEAT_WORDS = 5

_CONSONANTS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"
_OPENERS = (
    "Hello", "Hi", "Hi there!", "Hey", "Good morning", "Thanks", "Who are you?", "What can you do?",
    "What is", "Where is", "How do I", "Why does", "When was", "Tell me about", "Write a poem about",
    "Explain", "Give me a list of", "Translate", "Can you help me with", "I would like to know about",
    "What is the capital of", "Summarize", "Name three", "Is it true that", "Please describe", "Draw", "The",
)  # fmt: skip
_FILLERS = (
    "the", "a", "of", "and", "my", "your", "in", "to", "is", "for", "France", "water", "people", "music",
    "Python", "weather", "today", "history", "code", "world", "cat", "dog", "house", "number", "time", "it",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One prompt with its only right answer.

    Attributes:
        kind: one of `KINDS`.
        prompt: the user's message, ASCII, e.g. `reverse: hello`.
        answer: what a correct model says, e.g. `olleh`.
    """

    kind: str
    prompt: str
    answer: str


def random_word(rng: random.Random, shortest: int = 3, longest: int = MAX_WORD_LETTERS) -> str:
    """A lower-case word: half the time random letters, else pronounceable consonant-vowel runs."""
    length = rng.randint(shortest, longest)
    if rng.random() < 0.5:
        return "".join(rng.choices(string.ascii_lowercase, k=length))
    start = rng.randrange(2)
    return "".join(rng.choice(_CONSONANTS if (i + start) % 2 else _VOWELS) for i in range(length))


def is_held_out(prompt: str) -> bool:
    """Whether `prompt` belongs to the part of all prompts (one in eight) that training never draws."""
    return zlib.crc32(prompt.encode()) % 8 == 0


def solve(kind: str, words: Sequence[str]) -> str:
    """The right answer of a command.

    Args:
        kind: one of `KINDS`.
        words: the command's words; all kinds but `repeat` and `help` take exactly one.

    Raises:
        ValueError: `kind` is unknown.
    """
    if kind == "repeat":
        return " ".join(words)
    if kind == "reverse":
        return words[0][::-1]
    if kind == "uppercase":
        return words[0].upper()
    if kind == "sort":
        return "".join(sorted(words[0]))
    if kind == "spell":
        return "-".join(words[0])
    if kind == "count":
        return str(len(words[0]))
    if kind == "help":
        return HELP
    raise ValueError(f"unknown task kind {kind!r}; known: {', '.join(KINDS)}")


def _chatter(rng: random.Random) -> str:
    words = [
        rng.choice(_FILLERS) if rng.random() < 0.5 else random_word(rng) for _ in range(rng.randint(0, 6))
    ]
    end = rng.choice(("", "", "?", ".", "!"))
    return " ".join([rng.choice(_OPENERS) if rng.random() < 0.8 else random_word(rng), *words]) + end


def _draw(rng: random.Random, kind: str) -> Task:
    if kind == "help":
        return Task(kind, _chatter(rng), HELP)
    many = kind == "repeat" and rng.random() < 0.6
    words = [random_word(rng) for _ in range(rng.randint(2, MAX_REPEAT_WORDS) if many else 1)]
    return Task(kind, f"{kind}: {' '.join(words)}", solve(kind, words))


def sample_task(rng: random.Random, kind: str | None = None, *, held_out: bool = True) -> Task:
    """Draws one task; the same state of `rng` gives the same task.

    Args:
        rng: the only source of randomness.
        kind: one of `KINDS`, or None to draw one by `KIND_WEIGHTS`.
        held_out: True (default) draws a prompt that training never saw, False one that it may see.

    Raises:
        ValueError: `kind` is unknown.
    """
    if kind is None:
        kind = rng.choices(KINDS, weights=list(KIND_WEIGHTS.values()))[0]
    elif kind not in KIND_WEIGHTS:
        raise ValueError(f"unknown task kind {kind!r}; known: {', '.join(KINDS)}")
    while True:
        task = _draw(rng, kind)
        if is_held_out(task.prompt) == held_out:
            return task


def check(task: Task, text: str) -> bool:
    """Whether `text`, a model's visible answer, is right. Surrounding white space does not count."""
    return text.strip() == task.answer
