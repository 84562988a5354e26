"""langchain-tests' standard suite for chat models; run by test_langchain.py, inside the clients' environment.

`SERVER_URL` is the server's address. `ANSWER_SHEET`, when set: a file; no server is asked then, and what `TestQwen3`
asks is written there with the answers that it wants. Which tests may fail, and why, stands in test_langchain.py.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import httpx
from answer_sheet import Recorder
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


@functools.cache
def token_id(model: str, text: str) -> int | None:
    """The token that the text is, if it is one."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    answer = httpx.post(os.environ["SERVER_URL"] + "/tokenize", json=body, timeout=60)
    tokens = answer.raise_for_status().json()["tokens"]
    return int(tokens[0]) if len(tokens) == 1 else None


def bias(model: str, texts: dict[str, int]) -> dict[int, int]:
    return {token: value for text, value in texts.items() if (token := token_id(model, text)) is not None}


class Served(ChatModelIntegrationTests):
    """What both models share. Images, PDFs, audio and Anthropic's content blocks are refused by name."""

    served_model: str

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": self.served_model,
            "base_url": os.environ["SERVER_URL"] + "/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 128,
            "max_retries": 0,
            "stream_usage": True,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True


class TestSmolLM2(Served):
    """Its chat template knows no tools. Left alone it goes on inside of a JSON string until the limit."""

    served_model = "smollm2"

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return super().chat_model_params | {"logit_bias": bias(self.served_model, {'"': 6, '."': 6, '",': 6})}

    @property
    def model_override_value(self) -> str:
        return "fitted"


class TestQwen3(Served):
    """Has learnt the answers to these questions by heart, so that what needs a model with sense is tested too."""

    served_model = "fitted"

    @property
    def chat_model_params(self) -> dict[str, Any]:
        sheet = os.environ.get("ANSWER_SHEET")
        if sheet is None:
            return super().chat_model_params
        recorder = Recorder(Path(sheet))
        return super().chat_model_params | {
            "http_client": httpx.Client(transport=recorder),
            "http_async_client": httpx.AsyncClient(transport=recorder),
        }

    @property
    def model_override_value(self) -> str:
        return "smollm2"
