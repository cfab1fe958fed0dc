"""The system's Chromium for tests and screenshots; it is never downloaded."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, Page, async_playwright, expect

from tests.chromium import NAMES, find_chromium
from tests.gateway.harness import PATIENCE_S

expect.set_options(timeout=PATIENCE_S * 1e3)


def chromium_path() -> str:
    """The browser of this machine.

    Raises:
        LookupError: there is none.
    """
    found = find_chromium()
    if found is None:
        raise LookupError(f"none of {', '.join(NAMES)} is installed")
    return found


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A headless browser, as root without its sandbox."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium_path(), args=[*arguments, "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            await browser.close()


class Visit:
    """A page that is open, and what went wrong or strayed while it was.

    Attributes:
        problems: errors of the console and of scripts.
        strangers: addresses that were asked for and are not of the page's node.
    """

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.problems: list[str] = []
        self.strangers: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._note)
        page.on("request", self._watch)

    def check(self) -> None:
        """Fail on errors and on requests to other servers."""
        assert (self.problems, self.strangers) == ([], [])

    def _note(self, message) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _watch(self, request) -> None:
        if not request.url.startswith(f"{self.origin}/"):
            self.strangers.append(request.url)


@asynccontextmanager
async def visiting(browser: Browser, url: str, **context) -> AsyncIterator[Visit]:
    """Open the page of a node and wait until it shows the model."""
    opened = await browser.new_context(**context)
    opened.set_default_timeout(PATIENCE_S * 1e3)
    visit = Visit(await opened.new_page(), url)
    try:
        await visit.page.goto(url)
        await visit.page.wait_for_selector("#node[data-state=ready]")
        yield visit
    finally:
        await opened.close()
