"""Accessibility tests of the page: names, landmarks, contrast, narrow screens and reduced
motion."""

from __future__ import annotations

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import expect

from tests.browser.conftest import Scene
from tests.browser.states import STATES, generate, views

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

LEAST_CONTRAST = 4.5
"""Least contrast of text of any size in WCAG 2.2 AA."""

LEAST_GRAPHIC_CONTRAST = 3.0
"""Least contrast of graphics in WCAG 2.2 AA, such as underlines of sources and control borders."""

CONTRASTS = """
() => {
  const numbers = (colour) => {
    const found = colour.match(/[\\d.]+/g).map(Number);
    return { rgb: found.slice(0, 3), alpha: found[3] ?? 1 };
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ratio = (a, b) => {
    const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const { rgb, alpha } = numbers(getComputedStyle(one).backgroundColor);
      if (alpha === 1) return rgb;
      if (alpha !== 0) throw new Error(`${one.tagName} is translucent`);
    }
    throw new Error("the element has no opaque background");
  };
  const name = (element) => `${element.tagName}#${element.id}.${element.className}`;
  const texts = [], graphics = [];
  for (const element of document.body.querySelectorAll("*")) {
    if (!element.checkVisibility() || element.closest("svg, .hidden, .skip")) continue;
    const style = getComputedStyle(element);
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const typed = element.matches("input:not([type=checkbox]), textarea, select");
    if ((own || typed) && !element.matches(":disabled, :has(> :disabled)")) {
      texts.push([name(element), ratio(numbers(style.color).rgb, ground(element))]);
    }
    if (typed) {
      const border = numbers(style.borderTopColor).rgb;
      graphics.push([name(element), ratio(border, ground(element.parentElement))]);
    }
    if (element.matches(".token") && style.textDecorationLine !== "none") {
      const line = numbers(style.textDecorationColor).rgb;
      graphics.push([name(element), ratio(line, ground(element))]);
    }
  }
  for (const line of document.querySelectorAll("#charts .line")) {
    const stroke = numbers(getComputedStyle(line).stroke).rgb;
    graphics.push([name(line.parentElement) + line.getAttribute("class"),
                   ratio(stroke, ground(line.closest("figure")))]);
  }
  return { texts, graphics };
}
"""


QUICK_VIEWS = ("390-light", "1400-dark")
"""The views of each state in quick runs: both colour schemes, a phone and a wide screen."""


@pytest.mark.parametrize("state", STATES)
async def test_axe_reports_no_violation(browser, state: str, request) -> None:
    """axe finds no fault in names, roles, references and contrast, on phones and wide screens."""
    every = request.config.getoption("--long")
    async with STATES[state](browser) as page:
        async for view in views(page):
            if every or view in QUICK_VIEWS:
                results = await Axe().run(page)
                assert results.violations_count == 0, f"{view}: {results.generate_report()}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_contrast_is_sufficient_in_light_and_dark(scene: Scene, scheme: str) -> None:
    """Text has a contrast of 4.5:1 and graphics have 3:1 in both colour schemes.

    axe does not check graphics and the card of a token.
    """
    await scene.page.emulate_media(color_scheme=scheme)
    await generate(scene)
    scene.gateway.node.live.take()
    await scene.page.locator("#said-completion .from-ngram").first.hover()
    await expect(scene.page.get_by_role("tooltip")).to_be_visible()
    await scene.page.locator("#said-completion .from-ngram").first.evaluate(
        "span => span.getAnimations().forEach((animation) => animation.finish())"
    )
    found = await scene.page.evaluate(CONTRASTS)
    assert len(found["texts"]) > 60
    assert len(found["graphics"]) > 20
    assert [item for item in found["texts"] if item[1] < LEAST_CONTRAST] == []
    assert [item for item in found["graphics"] if item[1] < LEAST_GRAPHIC_CONTRAST] == []


async def test_page_follows_the_systems_colour_scheme(scene: Scene) -> None:
    """The page changes its colours with the system's colour scheme."""
    grounds = []
    for scheme in ("light", "dark", "light"):
        await scene.page.emulate_media(color_scheme=scheme)
        grounds.append(
            await scene.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        )
    assert grounds[0] == grounds[2] != grounds[1]


async def test_sources_differ_by_style_too(scene: Scene) -> None:
    """Underlines or italics distinguish the sources of tokens, in addition to colours."""
    styles = await scene.page.locator("#legend .token").evaluate_all(
        "spans => spans.map((span) => { const s = getComputedStyle(span);"
        " return s.fontStyle + s.textDecorationStyle + s.textDecorationLine; })"
    )
    assert len(styles) == len(set(styles)) == 9


async def test_page_has_landmarks_and_headings(scene: Scene) -> None:
    """The page has a banner, a main region with named sections and ordered headings."""
    page = scene.page
    await expect(page.get_by_role("banner")).to_have_count(1)
    await expect(page.get_by_role("main")).to_have_count(1)
    for name in ("Generate", "Overview", "Workers", "Recent decisions"):
        await expect(page.get_by_role("region", name=name)).to_be_visible()
    levels = await page.locator("h1, h2, h3").evaluate_all("all => all.map((h) => h.tagName)")
    assert levels == ["H1", "H2", "H3", "H3", "H2", "H2", "H3", "H2", "H2"]
    assert await page.locator("html").get_attribute("lang") == "en"


@pytest.mark.parametrize("width", [360, 768, 1020, 1440])
async def test_page_never_scrolls_sideways(scene: Scene, width: int) -> None:
    """The page never scrolls sideways, even with a response and the card of a token."""
    await scene.page.set_viewport_size({"width": width, "height": 800})
    await generate(scene)
    for spot in ("first", "last"):
        await getattr(scene.page.locator("#said-completion .token"), spot).focus()
        await expect(scene.page.get_by_role("tooltip")).to_be_visible()
        assert await scene.page.evaluate("() => document.documentElement.scrollWidth") <= width
        box = await scene.page.get_by_role("tooltip").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width


async def test_reduced_motion_disables_animations(scene: Scene) -> None:
    """The page has no animations and transitions if the user prefers reduced motion."""
    await scene.page.emulate_media(reduced_motion="reduce")
    await generate(scene)
    moving = await scene.page.evaluate(
        "() => [...document.querySelectorAll('*')].filter((element) => {"
        " const style = getComputedStyle(element);"
        " return style.animationName !== 'none' || style.transitionDuration !== '0s';"
        "}).length"
    )
    assert moving == 0


async def test_focus_is_visible(scene: Scene) -> None:
    """Every focused element has a visible outline."""
    await generate(scene)
    await scene.page.locator("#prompt").focus()
    # The table comes last. The number of elements before it depends on whether a request has ended.
    for _ in range(30):
        await scene.page.keyboard.press("Tab")
        ring, kind = await scene.page.evaluate(
            "() => { const style = getComputedStyle(document.activeElement);"
            " return [style.outlineStyle + style.outlineWidth, document.activeElement.className]; }"
        )
        assert ring == "solid2px"
        if kind == "scroll":
            return
    raise AssertionError("the table never had the focus")
