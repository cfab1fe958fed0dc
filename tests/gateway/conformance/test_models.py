"""OpenAI's client against a node: `/v1/models`."""

from __future__ import annotations

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Model

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_models(api: AsyncOpenAI, model: str) -> None:
    """The model is listed, and can be looked up by its id."""
    listed = (await api.models.list()).data
    assert [entry.id for entry in listed] == [model]
    assert (await api.models.retrieve(model)).root == listed[0].root


async def test_another_model_is_not_found(api: AsyncOpenAI) -> None:
    """Looking up a model that is not served raises the client's 404."""
    with pytest.raises(openai.NotFoundError) as missing:
        await api.models.retrieve("org/other")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


async def test_the_model_is_of_the_clients_type(api: AsyncOpenAI, model: str) -> None:
    """Every field that the type demands is there, and how long a context may be besides."""
    raw = await api.models.with_raw_response.retrieve(model)
    parsed = Model.model_validate_json(raw.text)
    assert (parsed.id, parsed.object) == (model, "model")
    assert parsed.model_extra["max_model_len"] > 0
