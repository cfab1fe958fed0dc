"""Options, markers and determinism for all tests."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Generator
from contextlib import suppress

import pytest

from tests.chromium import find_chromium
from tests.examples import QUICK

HAS_TORCH = importlib.util.find_spec("torch") is not None
IN_CI = bool(os.environ.get("CI"))

LONGEST = (
    "tests/kernels/test_interpreted.py",
    "tests/kernels/test_compile_attention.py",
    "tests/policies/test_overload.py",
    "tests/packaging/test_distribution.py",
    "tests/launch/test_child.py",
)
"""Long files, which start first. Later in the alphabet, one process would run them alone at the
end, while the others have nothing left to do."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options that include the tests marked long and hub."""
    parser.addoption("--long", action="store_true", help="also run the tests marked long")
    parser.addoption(
        "--hub", action="store_true", help="also run the tests that download from a hub"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Disable the hub before any import and use one thread, so that results are bitwise stable."""
    # A GPU machine may lack hypothesis, which the tests of kernels on the GPU do not use.
    with suppress(ModuleNotFoundError):
        _load_profile(long=config.getoption("--long"))
    if not config.getoption("--hub"):
        os.environ["HF_HUB_OFFLINE"] = "1"
    # Servers in tests neither start from what the user's own workers have learned, nor change it.
    os.environ["DRAFTGATE_NO_ACCEPTANCE_CACHE"] = "true"
    if HAS_TORCH:
        import torch

        torch.set_num_threads(1)


def _load_profile(*, long: bool) -> None:
    """Set the number of examples of property tests, and make them deterministic in CI."""
    from hypothesis import settings
    from hypothesis.internal.conjecture import providers

    # Hypothesis also draws constants from the modules that are imported, so that the examples of a
    # test would depend on the tests before it in the same process.
    providers._get_local_constants = lambda: providers._local_constants

    settings.register_profile("dev", deadline=None)
    settings.register_profile("ci", deadline=None, derandomize=True, database=None)
    settings.load_profile("ci" if IN_CI else "dev")
    if not long:
        settings.register_profile("quick", max_examples=QUICK)
        settings.load_profile("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with the longest files, and skip tests that need a missing option or hardware."""
    items.sort(key=_place)
    reasons = _missing(config, {mark.name for item in items for mark in item.iter_markers()})
    for item in items:
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without searching for garbage.

    The collection makes millions of objects that all stay. Searching them would take a quarter of
    its time, and later searches leave them out.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _place(item: pytest.Item) -> int:
    """Return the place of the test's file among the longest files, or a place after them."""
    file = item.nodeid.partition("::")[0]
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def _missing(config: pytest.Config, marks: set[str]) -> dict[str, str]:
    """Return the marks of tests that must be skipped, with the reasons."""
    reasons = {}
    if not config.getoption("--long"):
        reasons["long"] = "long: run it with --long (make test-long)"
    if not config.getoption("--hub"):
        reasons["hub"] = "downloads from a hub: run it with --hub"
    if "gpu" in marks and not _has_gpu():
        reasons["gpu"] = "no CUDA device"
    # In CI a missing browser fails these tests, because skipped tests would go unnoticed.
    if "browser" in marks and not IN_CI and find_chromium() is None:
        reasons["browser"] = "no chromium"
    return reasons


def _has_gpu() -> bool:
    if not HAS_TORCH:
        return False
    import torch

    return bool(torch.cuda.is_available())
