"""Training examples and the tokenizer of llada2-words."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from replicas.demo.words_data import BLOCK_LENGTH, FILL_WEIGHT, Batches, make_example
from replicas.demo.words_tokenizer import (
    ASSISTANT_ID,
    EOS_ID,
    HUMAN_ID,
    MASK_ID,
    ROLE_END_ID,
    SPECIAL_TOKENS,
    decode_text,
    encode_chat,
    write_tokenizer,
)

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "reverse: héllo \U0001f600"},
    {"role": "assistant", "content": "x"},
    {"role": "user", "content": " a\n HUMAN\t"},
]


@pytest.fixture
def tokenizer(tmp_path: Path):  # type: ignore[no-untyped-def]
    write_tokenizer(tmp_path, 1024)
    return AutoTokenizer.from_pretrained(tmp_path)


def test_tokenizer_and_template_give_the_ids_of_training(tokenizer) -> None:  # type: ignore[no-untyped-def]
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert tokenizer(text)["input_ids"] == encode_chat(CHAT)
    bare = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text == bare + "<role>ASSISTANT</role>"


def test_special_ids(tokenizer) -> None:  # type: ignore[no-untyped-def]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == EOS_ID
    assert tokenizer.mask_token_id == MASK_ID
    assert tokenizer.convert_tokens_to_ids("<|role_end|>") == ROLE_END_ID
    assert len(tokenizer) == 256 + len(SPECIAL_TOKENS)
    assert tokenizer.decode([*b"hi", ROLE_END_ID, EOS_ID], skip_special_tokens=True) == "hi"


def test_every_byte_is_its_own_id(tokenizer) -> None:  # type: ignore[no-untyped-def]
    text = "".join(chr(i) for i in range(1, 0x250)) + "\U0001f600 한"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_user_text_can_stay_bytes(tokenizer) -> None:  # type: ignore[no-untyped-def]
    text = "<role>HUMAN</role><|mask|>"
    assert tokenizer(text, split_special_tokens=True)["input_ids"] == list(text.encode())
    assert encode_chat([{"role": "user", "content": text}])[1:-2] == list(text.encode())


def test_unknown_role_is_refused(tokenizer) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Exception, match="unknown role: tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_only_the_answer_in_the_last_block_is_noised() -> None:
    rng = random.Random(0)
    answer_starts, blocks_into_answer = set(), set()
    for _ in range(3000):
        example = make_example(rng)
        start = len(example.ids) - BLOCK_LENGTH
        assert len(example.ids) % BLOCK_LENGTH == 0
        prompt = len(example.ids) - example.ids[::-1].index(ASSISTANT_ID)
        assert MASK_ID not in example.ids[: max(start, prompt)]
        assert MASK_ID in example.ids[start:]
        blocks_into_answer.add(start // BLOCK_LENGTH - prompt // BLOCK_LENGTH)
        answer_starts.add(prompt % BLOCK_LENGTH)
        clean = example.ids[:start] + example.targets
        end = clean.index(EOS_ID) if EOS_ID in clean else len(clean)
        for position, weight in enumerate(example.weights, start):
            hidden = example.ids[position] == MASK_ID
            assert hidden or example.ids[position] == clean[position]
            assert weight == (0.0 if not hidden else FILL_WEIGHT if position > end else 1.0)
        assert all(token == EOS_ID for token in clean[end:])
        assert end == len(clean) or clean[end - 1] == ROLE_END_ID
    assert answer_starts == set(range(BLOCK_LENGTH))
    assert blocks_into_answer >= {0, 1, 2}


def test_batches_are_seeded_and_rectangular() -> None:
    first, again, other = Batches(1, 512), Batches(1, 512), Batches(2, 512)
    ids, targets, weights = next(first)
    assert (ids == next(again)[0]).all()
    other_ids = next(other)[0]
    assert other_ids.shape != ids.shape or bool((other_ids != ids).any())
    assert ids.numel() >= 512
    assert targets.shape == weights.shape == (len(ids), BLOCK_LENGTH)
    assert (ids[:, 0] >= HUMAN_ID).all()


def test_decode_text_leaves_special_tokens_out() -> None:
    assert decode_text([*"né".encode(), ROLE_END_ID, EOS_ID]) == "né"
