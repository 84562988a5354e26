"""The LLaDA2.0 decoding rule at temperature 0, in its plainest form, and accuracy by task.

No cache and one sequence at a time: every forward recomputes the whole prefix, as the original
`generate` does. Slow on purpose; it is what the serving engine is checked against.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from replicas.demo.llada2_module import Llada2Module
from replicas.demo.tasks import KINDS, check
from replicas.demo.words_data import BLOCK_LENGTH, sample_chat
from replicas.demo.words_tokenizer import EOS_ID, MASK_ID, ROLE_END_ID, decode_text, encode_chat


@dataclass(frozen=True)
class Decoded:
    """One decoded answer: `ids` up to and with the first `<|endoftext|>`; `forwards` denoising forwards."""

    ids: list[int]
    forwards: int

    @property
    def visible(self) -> int:
        """Tokens up to and with the first `<|role_end|>` or `<|endoftext|>`."""
        ends = [i for i, token in enumerate(self.ids) if token in (ROLE_END_ID, EOS_ID)]
        return ends[0] + 1 if ends else len(self.ids)

    @property
    def text(self) -> str:
        """The answer as the user sees it."""
        return decode_text(self.ids[: self.visible])


@torch.inference_mode()
def decode(
    module: Llada2Module,
    prompt: Sequence[int],
    gen_length: int = 128,
    steps: int = BLOCK_LENGTH,
    threshold: float = 0.95,
) -> Decoded:
    """Generates block by block.

    Each forward sets every masked token whose probability is above `threshold`, or, when those are fewer
    than the schedule asks for (BLOCK_LENGTH spread over `steps`), that many of the most probable ones.
    It stops after the block that holds the first end-of-text token.

    Args:
        module: the model; its logits may be of any dtype, probabilities are float32.
        prompt: token ids without masks, at least one.
        gen_length: most new tokens.
        steps: most forwards for one block.
        threshold: probability in (0, 1).
    """
    length, size = len(prompt), BLOCK_LENGTH
    blocks = -(-(length + gen_length) // size)
    x = torch.full((1, blocks * size), MASK_ID)
    x[0, :length] = torch.tensor(list(prompt))
    forwards = 0
    for block in range(length // size, blocks):
        canvas = x[0, block * size : (block + 1) * size]
        for step in range(steps):
            masked = canvas == MASK_ID
            left = int(masked.sum())
            if not left:
                break
            logits = module(x[:, : (block + 1) * size], size, last=size)[0].float()
            logits[:, MASK_ID] = float("-inf")  # a predicted mask would stay one
            confidence, token = logits.softmax(-1).max(-1)
            confidence = confidence.masked_fill(~masked, -1.0)
            forwards += 1
            quota = size // steps + (step < size % steps)
            chosen = confidence > threshold
            if int(chosen.sum()) < quota:
                chosen = torch.zeros_like(masked)
                chosen[confidence.topk(min(quota, left)).indices] = True
            canvas[chosen] = token[chosen]
        if bool((x[0, length : (block + 1) * size] == EOS_ID).any()):
            break
    ids = x[0, length : length + gen_length].tolist()
    return Decoded(ids[: ids.index(EOS_ID) + 1] if EOS_ID in ids else ids, forwards)


@dataclass
class Score:
    """Sums over decoded answers. Tokens count up to and with the first `<|role_end|>`."""

    asked: int = 0
    right: int = 0
    tokens: int = 0
    forwards: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1."""
        return self.right / max(self.asked, 1)

    @property
    def tokens_per_forward(self) -> float:
        """Visible tokens per denoising forward."""
        return self.tokens / max(self.forwards, 1)


def evaluate(module: Llada2Module, count: int, seed: int, progress: bool = True) -> dict[str, Score]:
    """Decodes `count` prompts that training never saw, with history and system prompts as in training.

    Returns:
        A score by task kind, and under `all` the score over all of them.
    """
    rng = random.Random(seed)
    scores = {kind: Score() for kind in (*KINDS, "all")}
    for _ in tqdm(range(count), desc="evaluate", unit="prompt", disable=not progress):
        messages, task = sample_chat(rng, held_out=True)
        answer = decode(module, encode_chat(messages))
        right = check(task, answer.text)
        for score in (scores[task.kind], scores["all"]):
            score.asked += 1
            score.right += right
            score.tokens += answer.visible
            score.forwards += answer.forwards
            if not right:
                score.wrong.append(f"{task.prompt} -> {answer.text}")
    return scores


def report(scores: dict[str, Score]) -> str:
    """The scores as a Markdown table."""
    rows = ["| Task | Prompts | Right | Tokens per forward |", "|---|---|---|---|"]
    for kind, s in scores.items():
        rows.append(f"| {kind} | {s.asked} | {100 * s.accuracy:.1f} % | {s.tokens_per_forward:.2f} |")
    return "\n".join(rows)
