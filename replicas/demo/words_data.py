"""Training examples for block diffusion: a conversation, cut at one block, with that block noised."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.demo.tasks import Task, random_word, sample_task
from replicas.demo.words_tokenizer import EOS_ID, MASK_ID, ROLE_END_ID, encode_chat

BLOCK_LENGTH = 32
MAX_BLOCKS = 6
"""Longer training sequences are drawn again: they cost much and teach little."""

FILL_WEIGHT = 0.1
"""Loss weight of end-of-text tokens after the first: trivial, and most of a block."""

ALL_MASKED_SHARE = 0.35
"""Share of examples whose block is masked whole, as it is in every block's first forward."""

_SYSTEM_PROMPTS = ("You are a helpful assistant.", "Be brief.", "You are Blockserve.", "Answer in one word.")


@dataclass(frozen=True)
class Example:
    """One noised block after its clean past.

    Attributes:
        ids: token ids, a whole number of blocks; the last block holds masks.
        targets: the last block's true ids, BLOCK_LENGTH of them.
        weights: loss weights of the last block; 0 where the token was not masked.
    """

    ids: list[int]
    targets: list[int]
    weights: list[float]


def sample_chat(rng: random.Random, *, held_out: bool) -> tuple[list[dict[str, str]], Task]:
    """A conversation that ends with a task's prompt: mostly bare, some with history or a system prompt."""
    messages = []
    if rng.random() < 0.1:
        text = rng.choice(_SYSTEM_PROMPTS) if rng.random() < 0.6 else " ".join(
            random_word(rng) for _ in range(rng.randint(1, 6))
        )  # fmt: skip
        messages.append({"role": "system", "content": text})
    while rng.random() < 0.15:
        past = sample_task(rng, held_out=held_out)
        messages.append({"role": "user", "content": past.prompt})
        messages.append({"role": "assistant", "content": past.answer})
    task = sample_task(rng, held_out=held_out)
    messages.append({"role": "user", "content": task.prompt})
    return messages, task


def make_example(rng: random.Random) -> Example:
    """Draws a conversation and one block of its answer, and masks that block at a random noise level.

    The prompt's tail in the first answer block is fixed and never masked; blocks before the chosen one
    are clean; the answer ends in `<|role_end|><|endoftext|>` and is filled up with the latter.
    """
    while True:
        messages, task = sample_chat(rng, held_out=False)
        prompt = encode_chat(messages)
        whole = [*prompt, *task.answer.encode(), ROLE_END_ID, EOS_ID]
        first, final = len(prompt) // BLOCK_LENGTH, (len(whole) - 1) // BLOCK_LENGTH
        if final < MAX_BLOCKS:
            break
    block = rng.randint(first, final)
    start, end = block * BLOCK_LENGTH, (block + 1) * BLOCK_LENGTH
    filled = whole + [EOS_ID] * (end - len(whole))
    noise = 1.0 if rng.random() < ALL_MASKED_SHARE else 1.0 - rng.random()
    ids, weights = filled[:end], [0.0] * BLOCK_LENGTH
    free = range(max(start, len(prompt)), end)
    masked = [p for p in free if rng.random() < noise] or [rng.choice(free)]
    for position in masked:
        ids[position] = MASK_ID
        weights[position - start] = 1.0 if position < len(whole) else FILL_WEIGHT
    return Example(ids, filled[start:end], weights)


class Batches:
    """Endless seeded batches, each of examples with equally many blocks, so that nothing is padded.

    Args:
        seed: of the examples.
        tokens: rough size of a batch in tokens, context included.
    """

    def __init__(self, seed: int, tokens: int) -> None:
        self._rng = random.Random(seed)
        self._tokens = tokens
        self._pools: dict[int, list[Example]] = {}

    def __next__(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [N, S], targets [N, BLOCK_LENGTH] and weights [N, BLOCK_LENGTH] of the next full pool."""
        while True:
            example = make_example(self._rng)
            pool = self._pools.setdefault(len(example.ids), [])
            pool.append(example)
            if len(pool) * len(example.ids) >= self._tokens:
                del self._pools[len(example.ids)]
                return (
                    torch.tensor([e.ids for e in pool]),
                    torch.tensor([e.targets for e in pool]),
                    torch.tensor([e.weights for e in pool]),
                )
