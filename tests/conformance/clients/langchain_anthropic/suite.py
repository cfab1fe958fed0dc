"""LangChain's standard tests of chat models, with `ChatAnthropic`."""

from __future__ import annotations

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestScripted(ChatModelIntegrationTests):
    """A model that follows instructions passes every test that applies."""

    node = "SCRIPTED"

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "scripted", "base_url": os.environ[self.node], "api_key": "none",
                "max_retries": 0, "max_tokens": 200}  # fmt: skip

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "scripted"


class TestToolless(TestScripted):
    """The same tests pass with a chat template that does not render tools."""

    node = "TOOLLESS"
