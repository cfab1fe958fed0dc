"""A fixed clock for both renderers of chat templates."""

from __future__ import annotations

from datetime import datetime

import pytest

from tests.tokenizer.oracle import NOW


class _Frozen(datetime):
    """A `datetime` whose `now` is fixed."""

    @classmethod
    def now(cls, tz: object = None) -> datetime:
        return NOW


@pytest.fixture(autouse=True, scope="session")
def _frozen_oracle() -> object:
    from transformers.utils import chat_template_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", _Frozen)
        yield
