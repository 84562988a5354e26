"""From token ids to text, one token at a time: incremental UTF-8 and stop strings.

Everything here works per token, so its results do not depend on how tokens are grouped into steps, chunks
or blocks: the text of a stream is the text of the whole.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
#: Tokens that may be held back while a text ends in U+FFFD (other decoders than byte-level): a character
#: has at most four bytes, so at most four byte tokens.
_MAX_HELD_TOKENS = 8


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2's BPE: printable Latin-1 bytes stand for themselves, the others, in
    order, for the code points from 256 on."""
    table: dict[str, int] = {}
    shifted = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            table[chr(byte)] = byte
        else:
            table[chr(shifted)] = byte
            shifted += 1
    return table


class TokenTable:
    """What one tokenizer's ids stand for; built once per model and shared by its requests.

    ``is_byte_level``: every token is a fixed string of bytes, whatever its neighbours are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.backend: Any = tokenizer.backend_tokenizer
        self.special_ids = frozenset(
            token_id for token_id, token in self.backend.get_added_tokens_decoder().items() if token.special
        )
        decoder = json.loads(self.backend.to_str()).get("decoder") or {}
        self.is_byte_level = decoder.get("type") == "ByteLevel"
        self._byte_of_char = _byte_of_char()
        self._pieces: dict[int, bytes] = {}

    def piece(self, token_id: int) -> bytes:
        """The bytes of a token; special tokens too; empty for an id that the tokenizer does not know."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def _make_piece(self, token_id: int) -> bytes:
        if not self.is_byte_level:
            return str(self.backend.decode([token_id], skip_special_tokens=False)).encode()
        token = self.backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        try:
            return bytes(self._byte_of_char[char] for char in token)
        except KeyError:  # an added token that is written in plain text
            return str(token).encode()

    def new_detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        if self.is_byte_level:
            return ByteLevelDetokenizer(self)
        return WindowDetokenizer(self, prompt_token_ids)


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The text that this token makes certain; "" while a character is incomplete. Special tokens give
        no text."""

    def finish(self) -> str:
        """What is still held back (the U+FFFD of an incomplete character); nothing may be pushed after."""


class ByteLevelDetokenizer:
    """Exact and linear: concatenated outputs equal ``decode(ids, skip_special_tokens=True)``."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._table.special_ids:
            return ""
        return self._decoder.decode(self._table.piece(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For other decoders (SentencePiece's, with byte fallback): a token's text depends on its neighbours,
    so a short window is decoded with and without the new tokens, and the difference is the text."""

    def __init__(self, table: TokenTable, prompt_token_ids: Sequence[int] = ()) -> None:
        self._table = table
        # The end of the prompt decides whether the first token keeps its leading space.
        self._window = [i for i in prompt_token_ids[-4:] if i not in table.special_ids]
        self._shown = len(self._window)  # tokens of the window whose text is out

    def _decode(self, ids: list[int]) -> str:
        return str(self._table.backend.decode(ids, skip_special_tokens=True))

    def push(self, token_id: int) -> str:
        if token_id in self._table.special_ids:
            return ""
        self._window.append(token_id)
        if len(self._window) - self._shown > _MAX_HELD_TOKENS:
            return self._take()
        return "" if self._decode(self._window).endswith(_REPLACEMENT) else self._take()

    def _take(self) -> str:
        shown = self._decode(self._window[: self._shown])
        text = self._decode(self._window)[len(shown) :]
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text

    def finish(self) -> str:
        return self._take() if len(self._window) > self._shown else ""


class StopChecker:
    """Cuts a text right before the first stop string that completes, and never shows a part of one.

    Of several stop strings that complete at the same character the longest wins. Work per character is
    constant on average (Knuth-Morris-Pratt, one automaton per stop string).
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = sorted({text for text in stop if text}, key=len, reverse=True)
        self._fail = [_prefix_function(text) for text in self._stop]
        self._matched = [0] * len(self._stop)
        self._held = ""
        self.stopped: str | None = None  # the stop string that ended the text

    def feed(self, text: str) -> str:
        """The text that may be shown now. After a stop string completed nothing is shown any more."""
        if self.stopped is not None:
            return ""
        if not self._stop or not text:
            return text
        text = self._held + text
        for position in range(len(self._held), len(text)):
            for i, stop in enumerate(self._stop):
                if self._advance(i, text[position]) == len(stop):
                    self.stopped, self._held = stop, ""
                    return text[: position + 1 - len(stop)]
        cut = len(text) - max(self._matched)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The held-back prefix of a stop string that never completed."""
        held, self._held = self._held, ""
        return held

    def _advance(self, i: int, char: str) -> int:
        stop, matched = self._stop[i], self._matched[i]
        while matched and stop[matched] != char:
            matched = self._fail[i][matched - 1]
        if stop[matched] == char:
            matched += 1
        self._matched[i] = matched
        return matched


def _prefix_function(text: str) -> list[int]:
    """For each prefix of ``text``, the length of its longest proper prefix that is also its suffix."""
    lengths = [0] * len(text)
    matched = 0
    for i in range(1, len(text)):
        while matched and text[i] != text[matched]:
            matched = lengths[matched - 1]
        if text[i] == text[matched]:
            matched += 1
        lengths[i] = matched
    return lengths
