"""Fixtures of the browser tests: a browser per module and a page per test."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest_asyncio

from draftgate.backends.types import Delta, FinishReason, GenerationRequest
from draftgate.gateway.app import Listening
from tests.browser.draft_steps import in_steps
from tests.conftest import IN_CI
from tests.gateway.harness import ScriptedBackend, running

HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
collect_ignore_glob = [] if HAS_PLAYWRIGHT or IN_CI else ["test_*.py"]


@dataclass
class Scene:
    """A page, its node and the worker that the test controls."""

    visit: Any
    gateway: Listening
    backend: ScriptedBackend

    @property
    def page(self):
        return self.visit.page

    def deliver(self, request: GenerationRequest, *deltas: Delta) -> None:
        """Deliver these deltas of the request."""
        for delta in deltas:
            self.backend.sinks.deliver([(request.request_id, delta)])

    async def answer_cut(self, text: str) -> GenerationRequest:
        """Answer the next request with a text that a limit on the tokens ends."""
        request = await self.backend.submitted.get()
        *deltas, last = in_steps(self.backend.tokenizer, text)
        self.deliver(request, *deltas, last._replace(finish_reason=FinishReason.LENGTH))
        return request


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator:
    """The system's Chromium.

    A browser for all modules would close after the last test of the process, which hangs.
    """
    from tests.browser.browse import chromium

    async with chromium() as started:
        yield started


@asynccontextmanager
async def open_scene(browser: Any, tab: str = "Completion") -> AsyncIterator[Scene]:
    """Open a tab of the page of a node with a scripted worker, and check the page at the end."""
    from tests.browser.browse import visiting

    backend = ScriptedBackend()
    async with running(backends=[backend]) as gateway, visiting(browser, gateway.url) as visit:
        await visit.page.get_by_role("tab", name=tab).click()
        yield Scene(visit, gateway, backend)
        visit.check()


@pytest_asyncio.fixture(loop_scope="module")
async def scene(browser) -> AsyncIterator[Scene]:
    """The page of a node with a scripted worker. The test fails on any error of the page."""
    async with open_scene(browser) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def chat_scene(browser) -> AsyncIterator[Scene]:
    """The chat of a node with a scripted worker. The test fails on any error of the page."""
    async with open_scene(browser, "Chat") as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def script_page(browser) -> AsyncIterator:
    """A page whose JavaScript modules the tests of a file call without changing the page."""
    from tests.browser.browse import visiting

    async with (
        running(backends=[ScriptedBackend()]) as gateway,
        visiting(browser, gateway.url) as visit,
    ):
        yield visit.page
        visit.check()
