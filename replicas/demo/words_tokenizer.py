"""The tokenizer of `llada2-words`: one token per UTF-8 byte, plus special tokens as LLaDA2 spells them.

The id of a byte is its value. The three role markers are single special tokens: `HUMAN` in a user's text
stays bytes. No merges, so a prompt's length in tokens is its length in bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

BOS_ID, EOS_ID, MASK_ID, ROLE_END_ID, HUMAN_ID, ASSISTANT_ID, SYSTEM_ID = range(256, 263)
SPECIAL_TOKENS: tuple[str, ...] = (
    "<|startoftext|>", "<|endoftext|>", "<|mask|>", "<|role_end|>",
    "<role>HUMAN</role>", "<role>ASSISTANT</role>", "<role>SYSTEM</role>",
)  # fmt: skip
VOCAB_SIZE = 288
"""Rows of the embedding; the ids after the special tokens are spare and never trained."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] in ('system', 'developer') -%}{{- '<role>SYSTEM</role>' -}}"
    "{%- elif message['role'] == 'user' -%}{{- '<role>HUMAN</role>' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- '<role>ASSISTANT</role>' -}}"
    "{%- else -%}{{- raise_exception('unknown role: ' + message['role']) -}}{%- endif -%}"
    "{{- (message['content'] or '') + '<|role_end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<role>ASSISTANT</role>' -}}{%- endif -%}"
)

_ROLE_IDS = {"system": SYSTEM_ID, "user": HUMAN_ID, "assistant": ASSISTANT_ID}


def encode_chat(messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a chat with the generation prompt: what the chat template and tokenizer give.

    Args:
        messages: `role` (`system`, `user` or `assistant`) and `content` each; text is never read as
            special tokens.

    Raises:
        KeyError: another role.
    """
    ids: list[int] = []
    for message in messages:
        ids += [_ROLE_IDS[message["role"]], *message["content"].encode(), ROLE_END_ID]
    return [*ids, ASSISTANT_ID]


def decode_text(ids: Sequence[int]) -> str:
    """Text of the ids that are bytes; special tokens are left out."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def write_tokenizer(directory: Path, max_length: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, loadable with transformers' AutoTokenizer.

    Args:
        directory: an existing folder.
        max_length: the model's context in tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = _byte_letters()
    tokenizer = Tokenizer(models.BPE(vocab={letters[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def _byte_letters() -> list[str]:
    """The visible letter that byte-level tokenizers write for each byte (the table of GPT-2).

    Printable Latin-1 bytes stand for themselves; the others take the letters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]
