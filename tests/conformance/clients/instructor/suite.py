"""instructor with OpenAI's client, in its modes for servers with tools or structured output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import instructor
import pytest
from common import MESSAGES
from instructor import Mode
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, field_validator


class Forecast(BaseModel):
    """The weather of a city, whose schema determines all but a few characters."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


class Stay(BaseModel):
    """A stay in any city, of less than a week."""

    city: str
    days: int

    @field_validator("days")
    @classmethod
    def check_days(cls, days: int) -> int:
        """Reject a week."""
        if days >= 7:
            raise ValueError("must be less than a week")
        return days


def opened(url: str, mode: Mode) -> instructor.Instructor:
    """Return a client without retries of failed requests."""
    return instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)


def demand(text: str) -> list[dict[str, str]]:
    """Return a chat whose only message is an instruction for the scripted model."""
    return [{"role": "user", "content": text}]


ENFORCED = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)
FREE = (Mode.JSON, Mode.MD_JSON)


@pytest.mark.parametrize("mode", ENFORCED)
def test_shipped_model_answers_in_the_form(shipped: str, mode: Mode) -> None:
    """The server enforces the schema, so even a small model answers in the form."""
    found = opened(shipped, mode).create(
        model="draftgate-demo", messages=MESSAGES, response_model=Forecast, max_retries=0,
        max_tokens=60,
    )  # fmt: skip
    assert isinstance(found, Forecast)


@pytest.mark.parametrize("mode", FREE)
def test_model_answers_in_the_form_of_its_prompt(scripted: str, mode: Mode) -> None:
    """The mode asks for the form in the prompt, and for a JSON object in `response_format`."""
    json = '{"city": "Rome", "days": 2}'
    text = f"Answer ```json\n{json}\n```" if mode is Mode.MD_JSON else f"Answer {json}"
    found = opened(scripted, mode).create(
        model="scripted", messages=demand(text), response_model=Forecast, max_retries=0
    )
    assert (found.city, found.days) == ("Rome", 2)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
def test_partial_objects_grow(shipped: str, mode: Mode) -> None:
    """A stream has partial objects, of which the last is complete."""
    found = list(
        opened(shipped, mode).create_partial(
            model="draftgate-demo", messages=MESSAGES, response_model=Forecast, max_tokens=60
        )
    )
    assert len(found) > 1
    Forecast.model_validate(found[-1].model_dump())


def test_several_objects_of_a_stream(scripted: str) -> None:
    """A stream has every object of a list."""
    tasks = '{"tasks": [{"city": "Rome", "days": 1}, {"city": "Paris", "days": 2}]}'
    found = opened(scripted, Mode.TOOLS).create_iterable(
        model="scripted", response_model=Forecast, messages=demand(f"Call IterableForecast {tasks}")
    )
    assert [(one.city, one.days) for one in found] == [("Rome", 1), ("Paris", 2)]


def test_parallel_calls(scripted: str) -> None:
    """The model chooses among several functions."""
    found = opened(scripted, Mode.PARALLEL_TOOLS).create(
        model="scripted", response_model=Iterable[Forecast | Stay],
        messages=demand('Call Stay {"city": "Oslo", "days": 3}'),
    )  # fmt: skip
    assert list(found) == [Stay(city="Oslo", days=3)]


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
def test_invalid_object_is_requested_again(scripted: str, mode: Mode) -> None:
    """The second request has the first answer and the error, and gets another answer."""
    verb = "Call Stay" if mode is Mode.TOOLS else "Answer"
    found, response = opened(scripted, mode).create_with_completion(
        model="scripted", response_model=Stay, max_retries=2,
        messages=demand(f'{verb} {{"city": "Oslo", "days": 9}}'),
    )  # fmt: skip
    assert found.days == 3
    assert response.usage.total_tokens > 0


async def test_asynchronous_client(shipped: str) -> None:
    """The asynchronous client gets an object, too."""
    async with AsyncOpenAI(base_url=shipped, api_key="none", max_retries=0) as client:
        found = await instructor.from_openai(client, mode=Mode.TOOLS).create(
            model="draftgate-demo", messages=MESSAGES, response_model=Forecast, max_tokens=60
        )
    assert isinstance(found, Forecast)
