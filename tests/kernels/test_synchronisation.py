"""The helper that forbids waiting for the GPU, without a GPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.kernels.synchronisation import forbid_synchronisation


class SyncMode:
    """Takes the place of `torch.cuda.set_sync_debug_mode`, and warns after it has set the mode."""

    def __init__(self) -> None:
        self.mode = "default"
        self.error: Exception | None = None

    def set(self, mode: str) -> None:
        self.mode = mode
        if mode == "error":
            warnings.warn("a prototype feature", UserWarning, stacklevel=1)
            if self.error is not None:
                raise self.error


@pytest.fixture
def sync(monkeypatch: pytest.MonkeyPatch) -> SyncMode:
    sync = SyncMode()
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", sync.set)
    return sync


def test_warning_of_the_mode_is_no_error(sync: SyncMode) -> None:
    """The body runs in the mode although warnings are errors, and other warnings stay errors."""
    with forbid_synchronisation():
        assert sync.mode == "error"
        with pytest.raises(UserWarning, match="of the body"):
            warnings.warn("of the body", UserWarning, stacklevel=1)
    assert sync.mode == "default"


def test_mode_is_restored_if_setting_it_fails(sync: SyncMode) -> None:
    """A mode that was set before an error does not stay on."""
    sync.error = RuntimeError("after the mode was set")
    with pytest.raises(RuntimeError, match="after the mode"), forbid_synchronisation():
        pytest.fail("the body must not run")
    assert sync.mode == "default"
