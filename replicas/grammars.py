"""Bounds on the work that a client's grammar may cost: what the ingress tries grammars within, and what the torch
engine keeps to. No torch here."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np

#: Tokens of a trial. What a grammar cannot do mostly shows in the first ones.
TRIAL_STEPS = 24


@functools.cache
def grammar_limits() -> Any:
    """llguidance's ``LLParserLimits``: a mask takes a few hundredths of a second at most, within which all requests of
    a step wait."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        verbose_errors=False,
    )


def try_grammar(grammar: str) -> str:
    """Why a Lark grammar cannot be followed, in llguidance's words; "" when nothing was found.

    Makes a matcher on bytes, and follows one of its texts for a while: so a language without any text, endless
    recursion and states that are too large are found here, not by an engine. Not all of them: another text may
    lead to them.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(_byte_tokenizer(), grammar, limits=grammar_limits(), log_level=0)
    choose = random.Random(0)
    for _ in range(TRIAL_STEPS):
        if matcher.get_error() or matcher.is_stopped():
            break
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if matcher.get_error() or not len(allowed):
            break
        matcher.consume_token(int(choose.choice(allowed.tolist())))
    return str(matcher.get_error())


@functools.cache
def _byte_tokenizer() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
