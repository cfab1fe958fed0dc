"""Tests of `/v1/models` with OpenAI's client."""

from __future__ import annotations

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Model

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_model_is_listed_and_can_be_retrieved(api: AsyncOpenAI, model: str) -> None:
    """The server lists one model, which the client can retrieve by its id."""
    listed = (await api.models.list()).data
    assert [entry.id for entry in listed] == [model]
    assert (await api.models.retrieve(model)).root == listed[0].root


async def test_retrieving_another_model_raises_not_found(api: AsyncOpenAI) -> None:
    """The client raises a not-found error for an unknown model."""
    with pytest.raises(openai.NotFoundError) as missing:
        await api.models.retrieve("org/other")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


async def test_model_satisfies_the_clients_type_and_has_max_model_len(
    api: AsyncOpenAI, model: str
) -> None:
    """The model satisfies the client's type and has the maximum context length."""
    raw = await api.models.with_raw_response.retrieve(model)
    parsed = Model.model_validate_json(raw.text)
    assert (parsed.id, parsed.object) == (model, "model")
    assert parsed.model_extra["max_model_len"] > 0
