"""Fixtures of the tests of the load generator."""

from __future__ import annotations

import pytest

from draftgate.loadgen.sending import passage_index


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the indexes of other tests, whose servers may have had the same port."""
    monkeypatch.setattr(passage_index, "_built", {})
