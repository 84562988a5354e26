"""``POST /tokenize`` and ``POST /detokenize``: the tokens that a prompt would have, and back. vLLM's wire shape."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Field, model_validator

from deployments.openai.contracts import ModelEntry
from deployments.openai.model import RequestModel
from deployments.openai.protocol import ChatMessage, Int64
from deployments.openai.tools import Tools, plan_tools
from deployments.openai.translate import check_token_ids, refuse_hopeless, refuse_tools_without_template


class TokenizeRequest(RequestModel):
    """Either ``prompt`` or ``messages``. ``add_special_tokens`` (by default true for a prompt) is about what the
    tokenizer itself adds, BOS for most; chat templates write their own."""

    model: Annotated[str, Field(min_length=1)]
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=65536)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: Tools = []

    @model_validator(mode="after")
    def _prompt_or_messages(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("`prompt`: either `prompt` or `messages` is required, and not both")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("`add_special_tokens` applies to `prompt` only: a chat template writes its own")
        return self


class DetokenizeRequest(RequestModel):
    model: Annotated[str, Field(min_length=1)]
    tokens: list[Int64]


async def tokenize(body: TokenizeRequest, entry: ModelEntry) -> dict[str, Any]:
    """The response object. Raises ``InvalidRequestError`` and its subclasses, as a generation would."""
    ids = await asyncio.to_thread(_prompt_tokens if body.messages is None else _chat_tokens, body, entry)
    strings = entry.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": entry.capabilities.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


async def detokenize(body: DetokenizeRequest, entry: ModelEntry) -> dict[str, Any]:
    """The response object; special tokens are part of the text. Raises ``InvalidRequestError``."""
    check_token_ids(body.tokens, entry, "tokens")
    return {"prompt": await asyncio.to_thread(entry.encoder.decode, body.tokens, skip_special_tokens=False)}


def _prompt_tokens(body: TokenizeRequest, entry: ModelEntry) -> list[int]:
    assert body.prompt is not None
    refuse_hopeless(len(body.prompt), entry, "prompt")
    return entry.encoder.encode_text(body.prompt, add_special_tokens=body.add_special_tokens is not False)


def _chat_tokens(body: TokenizeRequest, entry: ModelEntry) -> list[int]:
    assert body.messages is not None
    if body.tools:
        refuse_tools_without_template(entry)
    plan = plan_tools(body.tools, "auto", True)
    refuse_hopeless(sum(len(message.content or "") for message in body.messages), entry, "messages")
    return entry.encoder.encode_chat(
        [message.for_template() for message in body.messages],
        body.chat_template_kwargs,
        tools=plan.for_template() if plan else [],
        add_generation_prompt=body.add_generation_prompt,
        check_length=lambda length: refuse_hopeless(length, entry, "messages"),
    )
