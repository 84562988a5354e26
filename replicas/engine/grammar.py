"""Output that follows a grammar: which tokens may come next, by llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from replicas.errors import InvalidRequestError
from replicas.grammars import grammar_limits
from replicas.model_info import ModelInfo

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarMatcher:
    """Follows the output of one request."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed_tokens(self) -> np.ndarray:
        """uint32 [ceil(V / 32)], as ``LogitAdjustment.allowed``: the tokens that may come next. EOS is among them when
        the output may end here. Raises ``InvalidRequestError`` at the limits of ``grammar_limits``."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        self._raise_error()
        return mask

    def advance(self, token: int) -> bool:
        """Takes the token that was chosen; True when nothing can follow. Raises ``InvalidRequestError``."""
        self._matcher.consume_token(token)
        self._raise_error()
        return bool(self._matcher.is_stopped())

    def _raise_error(self) -> None:
        if error := self._matcher.get_error():
            raise InvalidRequestError(
                f"`grammar` cannot be followed any further: {error.splitlines()[0][:200]}", param="grammar"
            )


class GrammarCompiler:
    """Compiles grammars for one checkpoint's tokenizer, which it reads when the first grammar comes."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(str(self._info.path), trust_remote_code=False)
        return from_tokenizer(tokenizer, n_vocab=max(self._info.vocab_size, len(tokenizer)))

    def matcher(self, grammar: str, tokens: Sequence[int] = ()) -> GrammarMatcher:
        """A matcher of ``grammar`` (Lark) that has taken ``tokens``. Raises ``InvalidRequestError``."""
        from llguidance import LLMatcher

        matcher = LLMatcher(
            self._tokenizer, LLMatcher.grammar_from_lark(grammar), limits=grammar_limits(), log_level=0
        )
        if error := matcher.get_error():
            raise InvalidRequestError(f"`grammar`: {error.splitlines()[0][:300]}", param="grammar")
        if matcher.try_consume_tokens(list(tokens)) != len(tokens):
            raise InvalidRequestError(
                "`resume_token_ids` do not follow the grammar", param="resume_token_ids"
            )
        return GrammarMatcher(matcher)
