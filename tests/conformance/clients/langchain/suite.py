"""LangChain's standard tests of chat models, with `ChatOpenAI`."""

from __future__ import annotations

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

CALLS = "model: the shipped model is not trained for calls"
RAMBLES = "model: where a schema allows further properties, the shipped model writes no end"
NOT_JSON = "model: the shipped model does not read which keys the prompt asks for"

EXPECTED = {
    f"TestShipped::{name}": reason
    for reason, names in {
        CALLS: (
            "test_tool_calling[model0]",
            "test_tool_calling[model1]",
            "test_tool_calling_async",
            "test_tool_choice",
            "test_tool_calling_with_no_arguments",
            "test_agent_loop[model0]",
            "test_agent_loop[model1]",
            "test_unicode_tool_call_integration",
        ),
        RAMBLES: (
            "test_structured_output[typeddict]",
            "test_structured_output[json_schema]",
            "test_structured_output_async[typeddict]",
            "test_structured_output_async[json_schema]",
            "test_structured_output_pydantic_2_v1",
        ),
        NOT_JSON: ("test_json_mode",),
    }.items()
    for name in names
}
"""The reasons of expected failures."""


class Standard(ChatModelIntegrationTests):
    """The features that all models of Draftgate have."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return self.chat_model_params["model"]


class TestScripted(Standard):
    """A model that follows instructions passes every test that applies."""

    node = "SCRIPTED"

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "scripted", "base_url": os.environ[self.node] + "/v1",
                "api_key": "none", "max_retries": 0, "stream_usage": True}  # fmt: skip


class TestResponses(TestScripted):
    """The same tests pass through `/v1/responses`."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestToolless(TestScripted):
    """The same tests pass with a chat template that does not render tools."""

    node = "TOOLLESS"


class TestShipped(Standard):
    """The shipped model passes every test that needs no understanding."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "draftgate-demo", "base_url": os.environ["SHIPPED"] + "/v1",
                "api_key": "none", "max_retries": 0, "stream_usage": True, "temperature": 0,
                "max_tokens": 100}  # fmt: skip
