"""langchain-tests' standard suite for chat models; run by test_langchain.py, inside the clients' environment.

`SERVER_URL` is the server's address. Which tests may fail, and why, stands there.
"""

from __future__ import annotations

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


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

    @property
    def model_override_value(self) -> str:
        return "words"


class TestSmolLM2(Served):
    served_model = "smollm2"


class TestQwen3(Served):
    served_model = "tools"
