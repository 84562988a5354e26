"""Bounds of grammars on vLLM: those of the torch engine, and a request that reaches them fails instead of ending well.

vLLM's guidance backend gives llguidance no limits, whose own let one mask take seconds in a step that all requests wait
for; and past a limit it allows nothing but EOS, so that half a JSON text would end with `stop`.
"""

from __future__ import annotations

from typing import Any

from replicas.grammars import grammar_limits


def bound_grammars() -> None:
    """Gives vLLM's matchers ``grammar_limits``, and makes an exhausted one refuse its token, for which vLLM ends the
    request with an error; safe to call again. Where the backend has changed, nothing happens."""
    try:
        from vllm.v1.structured_output.backend_guidance import (
            GuidanceBackend,
            GuidanceGrammar,
            serialize_guidance_grammar,
        )
    except ImportError:
        return
    backend: Any = GuidanceBackend
    if getattr(backend, "_blockserve_bounds", False):
        return
    accept_tokens = GuidanceGrammar.accept_tokens

    def compile_bounded(self: Any, kind: Any, text: str, stop_token_ids: set[int] | None = None) -> Any:
        from llguidance import LLMatcher

        text = serialize_guidance_grammar(
            kind, text, self.disable_any_whitespace, self.disable_additional_properties
        )
        matcher = LLMatcher(self.ll_tokenizer, text, limits=grammar_limits(), log_level=1)
        grammar = GuidanceGrammar(matcher, self.ll_tokenizer, self.vocab_size)
        grammar.check_error()
        return grammar

    def accept_while_it_can_be_followed(self: Any, request_id: str, tokens: list[int]) -> bool:
        return bool(accept_tokens(self, request_id, tokens)) and not self.ll_matcher.get_error()

    backend.compile_grammar = compile_bounded
    GuidanceGrammar.accept_tokens = accept_while_it_can_be_followed
    backend._blockserve_bounds = True
