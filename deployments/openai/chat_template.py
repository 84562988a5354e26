"""From messages and text to prompt tokens, so that no text of a user ever becomes a control token."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deployments.openai.tools import knows_hermes_tools
from replicas.errors import InvalidRequestError, UnsupportedParameterError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Arguments of ``apply_chat_template`` itself, which a request must not set as template variables.
_RESERVED_KWARGS = frozenset(
    {
        "conversation", "messages", "chat_template", "tools", "documents", "add_generation_prompt",
        "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
        "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "self",
        "conversations", "raise_exception", "strftime_now",
    }
)  # fmt: skip


class PromptEncoder:
    """Encodes prompts of one model. Safe to use from several threads.

    A template is rendered with the messages as they are, because templates look into contents (they trim
    them, or drop an earlier turn's thinking). Only what could be read as a control token, which is every
    occurrence of a special token's text in a message and every end of a content that could complete one, is
    replaced by a random marker before and put back after. A special token of the rendered text then counts
    as one only where it touches no marked part; everything between is encoded as plain text. For messages
    without such text the result is that of ``apply_chat_template(tokenize=True)``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from tokenizers import Tokenizer  # imported late, with transformers

        self._tokenizer = tokenizer
        # Own copies: truncation, padding and `encode_special_tokens` are state of a tokenizer, and switching
        # them per call is a race.
        state = tokenizer.backend_tokenizer.to_str()
        self._normal, self._plain = Tokenizer.from_str(state), Tokenizer.from_str(state)
        self._plain.encode_special_tokens = True
        for copy in (self._normal, self._plain):
            copy.no_truncation()
            copy.no_padding()
        added = self._plain.get_added_tokens_decoder()
        self._added_ids = {token.content: i for i, token in added.items()}
        self._special_ids = {
            token.content: i for i, token in added.items() if token.special and token.content
        }
        self._texts = sorted(self._special_ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._texts))) if self._texts else None
        self._prefixes = frozenset(text[:k] for text in self._texts for k in range(1, len(text)))
        self._suffixes = frozenset(text[k:] for text in self._texts for k in range(1, len(text)))
        self._longest = max(map(len, self._texts), default=0)
        #: Characters of the longest token.
        self.longest_token = max(map(len, self._plain.get_vocab(with_added_tokens=True)), default=1)

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Texts of the tokens that the tokenizer marks as special."""
        return tuple(self._texts)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def knows_tools(self) -> bool:
        """Whether the template shows tools, in the one format of calls that is parsed, and the calls' tags are
        text (a tag that is a special token would never be seen in the output)."""
        return knows_hermes_tools(self._tokenizer.chat_template) and "<tool_call>" not in self._special_ids

    def added_token_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """The ids of those texts that are one token which the tokenizer never splits."""
        return {text: self._added_ids[text] for text in texts if text in self._added_ids}

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a raw prompt: plain text throughout, plus what the tokenizer itself adds (BOS)."""
        return list(self._plain.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, by default without special tokens."""
        return str(self._plain.decode(ids, skip_special_tokens=skip_special_tokens))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        check_length: Callable[[int], None] = lambda _: None,
    ) -> list[int]:
        """Tokens of a chat, by default with the generation prompt. ``tools`` (OpenAI's objects) are text of
        users as messages are. ``check_length`` gets the number of characters before they are tokenized, and raises
        when there are too many.

        Raises ``UnsupportedParameterError`` for a model without a chat template, ``InvalidRequestError`` for
        messages that the template refuses or fails on; both name ``messages``.
        """
        text, marked = self.render_chat(
            messages, template_kwargs, tools=tools, add_generation_prompt=add_generation_prompt
        )
        check_length(len(text))
        if not marked:
            return list(self._normal.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        start = 0
        for token, begin, end in self._control_tokens(text, marked):
            ids += self._encode_plain(text[start:begin])
            ids.append(self._special_ids[token])
            start = end
        return ids + self._encode_plain(text[start:])

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text and the spans in it that users wrote and that look like control tokens."""
        if not self.has_chat_template:
            raise UnsupportedParameterError(
                "`messages`: this model's tokenizer has no chat template; use /v1/completions",
                param="messages",
            )
        kwargs = dict(template_kwargs or {})
        if reserved := sorted(_RESERVED_KWARGS & kwargs.keys()):
            raise InvalidRequestError(
                f"`chat_template_kwargs`: {reserved[0]!r} cannot be set by a request",
                param="chat_template_kwargs",
            )
        if odd := [name for name in kwargs if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name)]:
            raise InvalidRequestError(
                f"`chat_template_kwargs`: {odd[0][:64]!a} is not the name of a template variable",
                param="chat_template_kwargs",
            )
        marker = _Marker()
        try:
            masked = [
                {key: value if key == "role" else self._mask(value, marker) for key, value in message.items()}
                for message in messages
            ]
            kwargs = {key: self._mask(value, marker) for key, value in kwargs.items()}
            if tools:
                kwargs["tools"] = [self._mask(tool, marker) for tool in tools]
            rendered = self._tokenizer.apply_chat_template(
                masked, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except Exception as error:  # whatever a template raises is about these messages
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InvalidRequestError(
                f"`messages`: the model's chat template refused them: {marker.restore(reason)[0][:300]}",
                param="messages",
            ) from error
        return marker.restore(str(rendered))

    def _control_tokens(self, text: str, marked: list[tuple[int, int]]) -> list[tuple[str, int, int]]:
        """Special tokens of a rendered text that the template wrote: (token, begin, end), in order."""
        found: list[tuple[str, int, int]] = []
        if self._pattern is None:
            return found
        position, at = 0, 0
        while match := self._pattern.search(text, position):
            while at < len(marked) and marked[at][1] <= match.start():
                at += 1
            if at < len(marked) and marked[at][0] < match.end():
                position = match.start() + 1  # a user's text: a real one may still begin inside it
                continue
            found.append((match.group(), match.start(), match.end()))
            position = match.end()
        return found

    def _encode_plain(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids) if text else []

    def _mask(self, value: Any, marker: _Marker) -> Any:
        if isinstance(value, str):
            return self._mask_text(value, marker)
        if isinstance(value, Mapping):
            return {self._mask(key, marker): self._mask(item, marker) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mask(item, marker) for item in value]
        return value

    def _mask_text(self, text: str, marker: _Marker) -> str:
        if self._pattern is None:
            return text
        masked = self._pattern.sub(lambda match: marker.add(match.group()), text)
        # Ends that could form a control token together with what the template puts beside them. Ordinary
        # text rarely ends so, and stays as it is.
        for k in range(min(self._longest - 1, len(masked)), 0, -1):
            if masked[:k] in self._suffixes:
                masked = marker.add(masked[:k]) + masked[k:]
                break
        for k in range(min(self._longest - 1, len(masked)), 0, -1):
            if masked[-k:] in self._prefixes:
                masked = masked[:-k] + marker.add(masked[-k:])
                break
        return masked


class _Marker:
    """Stand-ins for pieces of user text: private-use characters round a random number, so that no user can
    write one and no template treats it as blank or as markup."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self._pieces: list[str] = []

    def add(self, text: str) -> str:
        self._pieces.append(text)
        return f"\ue000{self._nonce}:{len(self._pieces) - 1}\ue001"

    def restore(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Puts the pieces back; also gives the (begin, end) spans of the result that they take."""
        parts: list[str] = []
        spans: list[tuple[int, int]] = []
        length = 0
        pieces = re.split(f"\ue000{self._nonce}:([0-9]+)\ue001", text)
        for i, part in enumerate(pieces):
            if i % 2:
                part = self._pieces[int(part)]
                spans.append((length, length + len(part)))
            parts.append(part)
            length += len(part)
        result = "".join(parts)
        if self._nonce in result:
            raise InvalidRequestError(
                "`messages`: text that looks like a control token cannot be encoded with this template",
                param="messages",
            )
        return result, spans
