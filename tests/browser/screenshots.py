"""Take the screenshots of the live page: python -m tests.browser.screenshots [DIRECTORY].

The engine completes Python code with the shipped model while a changing load draws the charts. With
`--views`, the screenshots show each state of the page on a phone, a tablet and a notebook, in light
and dark, to look at after a change of the page.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx
from playwright.async_api import Browser, Page, expect

from draftgate.gateway.app import Listening
from tests.browser.browse import chromium, visiting
from tests.browser.states import ENDED, STATES, adjust, views
from tests.gateway.harness import running

IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"
LOAD: Final = (1, 2, 4, 8, 14, 8, 3, 1)
"""Number of concurrent streams in each phase of `PHASE_S` seconds.

The load rises until draft slots cost time and falls again.
"""

PHASE_S: Final = 12.0
VIEW: Final = {"width": 1280, "height": 1100}
LONGEST_SHOWN: Final = 8
PROMPTS: Final = (
    "def read_lines(path):\n    with open(path) as file:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import asyncio\n\n\nclass Server:\n    def __init__(self, host, port):\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "for key, value in sorted(counts.items()):\n    print(",
)


async def load(gateway: Listening) -> None:
    """Send the requests of all load phases."""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60.0) as http:
        sent = 0

        async def stream(until_s: float) -> None:
            nonlocal sent
            while time.monotonic() < until_s:
                sent += 1
                prompt = PROMPTS[sent % len(PROMPTS)]
                body = {"prompt": prompt, "max_tokens": 96, "temperature": 0.6, "seed": sent}
                (await http.post("/v1/completions", json=body)).raise_for_status()

        for streams in LOAD:
            until_s = time.monotonic() + PHASE_S
            await asyncio.gather(*(stream(until_s) for _ in range(streams)))


@asynccontextmanager
async def engine():
    """Run a node with the shipped model and the settings of `draftgate serve`."""
    async with running(backend="engine", threads=1) as gateway:
        yield gateway


@asynccontextmanager
async def example_page(browser: Browser, gateway: Listening, scheme: str) -> AsyncIterator[Page]:
    """Open the page with a fixed seed, and check the page at the end."""
    async with visiting(
        browser, gateway.url, color_scheme=scheme, viewport=VIEW, device_scale_factor=1.5
    ) as visit:
        await visit.page.get_by_role("tab", name="Completion").click()
        await adjust(visit.page, seed="1")
        yield visit.page
        visit.check()


async def take_screenshot(browser: Browser, gateway: Listening, scheme: str, path: Path) -> None:
    """Run the page's example and save a screenshot with the card of a drafted token."""
    async with example_page(browser, gateway, scheme) as page:
        await page.get_by_role("button", name="Generate").click()
        await expect(page.locator("#state-completion")).to_have_text(ENDED, timeout=60_000)
        await expect(page.locator("#decisions tr.mine")).to_have_count(1)
        await open_draft_card(page)
        await page.screenshot(path=path, full_page=True, animations="disabled")


async def take_comparison(browser: Browser, gateway: Listening, scheme: str, path: Path) -> None:
    """Compare the page's example with and without speculation, and save a screenshot."""
    async with example_page(browser, gateway, scheme) as page:
        await page.get_by_role("tab", name="Compare").click()
        await page.get_by_role("button", name="Compare").click()
        await expect(page.locator("#state-compare")).to_have_text("Done.", timeout=60_000)
        await page.locator("#box").screenshot(path=path, animations="disabled")


async def open_draft_card(page: Page) -> None:
    """Open the card of a step with accepted and rejected draft tokens."""
    tokens = page.locator("#said-completion .token")
    card = page.get_by_role("tooltip")
    for index in range(await tokens.count()):
        await tokens.nth(index).hover()
        await expect(card).to_be_visible()
        accepted = await card.locator("tr.accepted").count()
        rejected = await card.locator("tr.rejected").count()
        if accepted >= 2 and rejected and accepted + rejected <= LONGEST_SHOWN:
            return


async def take_all(directory: Path) -> None:
    """Take the light and the dark screenshots."""
    async with engine() as gateway, chromium() as browser:
        await load(gateway)
        for scheme in ("light", "dark"):
            await take_screenshot(browser, gateway, scheme, directory / f"live-page-{scheme}.png")
            await take_comparison(browser, gateway, scheme, directory / f"comparison-{scheme}.png")


async def take_views(directory: Path) -> None:
    """Take each state of the page in each size and colour scheme."""
    async with chromium() as browser:
        for name, state in STATES.items():
            async with state(browser) as page:
                async for view in views(page):
                    path = directory / f"{name}-{view}.png"
                    await page.screenshot(path=path, full_page=True, animations="disabled")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=IMAGES)
    parser.add_argument("--views", action="store_true", help="show each state, size and scheme")
    arguments = parser.parse_args()
    asyncio.run((take_views if arguments.views else take_all)(arguments.directory))
