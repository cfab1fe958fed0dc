"""Tests of the page by axe-core, with all its rules, in light and dark and on every screen."""

from __future__ import annotations

import re
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import expect

from draftgate.backends.types import StepTrace
from tests.browser.browse import visiting
from tests.browser.conftest import Scene
from tests.browser.draft_steps import TEXT, in_steps
from tests.gateway.harness import ScriptedBackend, running

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

SIZES = {"desktop": (1400, 900), "tablet": (768, 1024), "phone": (390, 844)}
MARKDOWN = """# Title

Some *text* with a [link](https://example.org/) and `code`.

1. one
2. two

> a quote

| name | value |
|------|-------|
| a    | 1     |

```python
def area(self):
    return self.width
```
"""
FINISHED = re.compile("^Done")


async def violations(scene: Scene) -> list[Any]:
    """Return the violated rules, with the elements that violate them. Axe skips hidden ones."""
    found = (await Axe().run(scene.page)).response["violations"]
    return [(one["id"], [node["target"] for node in one["nodes"]]) for one in found]


async def answer(scene: Scene, button: str, texts: list[str]) -> None:
    """Press a button, and let the worker answer each request."""
    await scene.page.get_by_role("button", name=button).click()
    for text in texts:
        request = await scene.backend.submitted.get()
        drafting = request.speculation.mode != "off"
        pattern = {} if drafting else {"pattern": (StepTrace(1),)}
        scene.deliver(request, *in_steps(scene.backend.tokenizer, text, **pattern))
    await expect(scene.page.locator("#run-state")).to_have_text(FINISHED)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
async def test_axe_finds_no_violation(browser, scheme: str, size: str) -> None:
    """Axe finds no violation before and after a completion, a comparison, a chat and an error."""
    width, height = SIZES[size]
    look = {"color_scheme": scheme, "reduced_motion": "reduce"}
    backend = ScriptedBackend()
    async with (
        running(backends=[backend]) as gateway,
        visiting(
            browser, gateway.url, viewport={"width": width, "height": height}, **look
        ) as visit,
    ):
        scene = Scene(visit, gateway, backend)
        page = visit.page
        assert await violations(scene) == []
        await answer(scene, "Generate", [TEXT])
        gateway.node.live.take()
        await expect(page.locator("#decisions tr")).to_have_count(1)
        await page.locator("#said-completion .from-ngram").first.hover()
        await expect(page.get_by_role("tooltip")).to_be_visible()
        assert await violations(scene) == []
        await page.get_by_role("tab", name="Compare").click()
        await answer(scene, "Compare", [TEXT * 8, TEXT * 8])
        assert await violations(scene) == []
        await page.get_by_role("tab", name="Chat").click()
        await page.get_by_label("Message").fill("hello")
        await answer(scene, "Generate", [MARKDOWN * 3])
        assert await violations(scene) == []
        await page.get_by_role("button", name="Show tokens").click()
        await page.get_by_label("Max tokens").fill("9999")
        await page.get_by_label("Message").fill("too long")
        await page.get_by_role("button", name="Generate").click()
        await expect(page.get_by_role("alert")).to_be_visible()
        assert await violations(scene) == []
