"""The system's Chromium for tests and screenshots, without downloads."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, Page, async_playwright, expect

from tests.chromium import NAMES, find_chromium
from tests.gateway.harness import PATIENCE_S

expect.set_options(timeout=PATIENCE_S * 1e3)


def chromium_path() -> str:
    """Return the path of the browser.

    Raises:
        LookupError: if no browser is installed.
    """
    found = find_chromium()
    if found is None:
        raise LookupError(f"found none of {', '.join(NAMES)}; install one of them")
    return found


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Run a headless browser, without its sandbox for the root user."""
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
    """An open page with its errors and its requests to other servers.

    Attributes:
        page: the page.
        origin: the URL of the page's node.
        problems: errors and warnings of the console and of scripts.
        strangers: the URLs of requests to other servers.
    """

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.problems: list[str] = []
        self.foreign_urls: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._record_message)
        page.on("request", self._record_request)

    def check(self) -> None:
        """Assert that the page had no errors and sent no requests to other servers."""
        assert (self.problems, self.foreign_urls) == ([], [])

    def _record_message(self, message) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _record_request(self, request) -> None:
        if not request.url.startswith(f"{self.origin}/"):
            self.foreign_urls.append(request.url)


@asynccontextmanager
async def visiting(
    browser: Browser, url: str, key: str | None = None, **context
) -> AsyncIterator[Visit]:
    """Open the page of a node, log in with a key, and wait until the page shows the model."""
    opened = await browser.new_context(**context)
    opened.set_default_timeout(PATIENCE_S * 1e3)
    visit = Visit(await opened.new_page(), url)
    try:
        await visit.page.goto(url)
        if key is not None:
            await visit.page.get_by_label("API key").fill(key)
            await visit.page.get_by_label("API key").press("Enter")
        await visit.page.wait_for_selector("#node[data-state=ready]")
        yield visit
    finally:
        await opened.close()
