"""Tests of the live page in a browser with a scripted worker."""

from __future__ import annotations

import json
import re

import pytest
from playwright.async_api import expect

from draftgate.backends.types import Delta
from tests.browser.conftest import Scene
from tests.browser.draft_steps import TEXT, in_steps
from tests.browser.states import FAILURES, adjust, failing
from tests.gateway.harness import until

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

DONE = re.compile("^Done in")
SOURCES = {
    None: "target",
    "ngram": "ngram",
    "eagle": "eagle",
    "draft_model": "draft_model",
    "sparse_self": "sparse_self",
    "prediction": "prediction",
    "grammar": "grammar",
    "medusa": "other",
}


def output_of(scene: Scene):
    return scene.page.locator("#said-completion .tokens")


async def generate(scene: Scene, text: str = TEXT) -> list[Delta]:
    """Press the button and let the worker respond with the text."""
    await scene.page.get_by_role("button", name="Generate").click()
    request = await scene.backend.submitted.get()
    first, *rest = deltas = in_steps(scene.backend.tokenizer, text)
    scene.deliver(request, first)
    await scene.page.evaluate("0")  # later tokens arrive at a later time, so TPOT is measured
    scene.deliver(request, *rest)
    await expect(scene.page.locator("#state-completion")).to_have_text(DONE)
    return deltas


async def test_tokens_appear_in_order_with_their_sources(scene: Scene) -> None:
    """The page shows the text so far after each step and marks each token's source."""
    await scene.page.get_by_label("Prompt", exact=True).fill("class Box:\n")
    await scene.page.get_by_role("button", name="Generate").click()
    request = await scene.backend.submitted.get()
    assert scene.backend.tokenizer.decode(request.prompt_ids).endswith("class Box:\n")
    shown = ""
    for delta in in_steps(scene.backend.tokenizer, TEXT):
        scene.deliver(request, delta)
        shown += delta.text
        await expect(output_of(scene)).to_have_js_property("textContent", shown)
    assert shown == TEXT
    await expect(scene.page.locator("#state-completion")).to_have_text(DONE)
    expected = []  # tokens of one character share an element
    for delta in in_steps(scene.backend.tokenizer, "def area(self):\n    return self.width"):
        (step,) = delta.steps
        drafted = [SOURCES[step.proposer]] * step.accepted
        expected += [*drafted, *["target"] * (step.tokens - step.accepted)]
    classes = (
        await output_of(scene)
        .locator(".token")
        .evaluate_all("spans => spans.map(span => span.className.match(/from-(\\w+)/)[1])")
    )
    assert classes[: len(expected)] == expected


async def test_card_shows_the_step_on_hover_and_focus(scene: Scene) -> None:
    """The card of a token shows drafts, survivals, price and reason until Escape."""
    await generate(scene)
    card = scene.page.get_by_role("tooltip")
    await expect(card).to_be_hidden()
    await output_of(scene).locator(".from-ngram").first.hover()
    await expect(card).to_be_visible()
    await expect(card.locator("tr.accepted")).to_have_count(2)
    await expect(card.locator("tr.rejected")).to_have_count(1)
    await expect(card).to_contain_text("0.91")
    await expect(card).to_contain_text(
        "3 of 5 draft tokens verified: survival 0.18 of slot 4 is below the price 0.25; 2 accepted"
    )
    await scene.page.keyboard.press("Escape")
    await expect(card).to_be_hidden()
    await output_of(scene).locator(".token").first.focus()
    await expect(card).to_contain_text("no draft tokens")
    await expect(output_of(scene).locator(".token").first).to_have_attribute(
        "aria-describedby", "card"
    )
    await scene.page.keyboard.press("ArrowRight")
    await expect(card).to_contain_text("Step 2")
    await scene.page.keyboard.press("ArrowDown")
    await expect(card).to_contain_text("1 of 1 draft tokens verified: survival 0.62 of slot 1")
    await scene.page.keyboard.press("ArrowUp")
    await scene.page.keyboard.press("Home")
    await expect(card).to_contain_text("Step 1")


async def test_stop_cancels_the_request(scene: Scene) -> None:
    """The stop button cancels the request and keeps the text so far."""
    await scene.page.get_by_role("button", name="Generate").click()
    request = await scene.backend.submitted.get()
    first = in_steps(scene.backend.tokenizer, TEXT)[0]
    scene.deliver(request, first)
    await expect(output_of(scene)).to_have_js_property("textContent", first.text)
    await scene.page.get_by_role("button", name="Stop").click()
    assert await scene.backend.abandoned.get() == request.request_id
    await expect(scene.page.locator("#state-completion")).to_have_text("Stopped.")
    await expect(output_of(scene)).to_have_js_property("textContent", first.text)
    await generate(scene)


async def test_page_can_be_used_with_the_keyboard(scene: Scene) -> None:
    """The page can be used with the keyboard, from the skip link to the tokens."""
    keyboard = scene.page.keyboard
    focused = scene.page.locator("*:focus")
    await scene.page.reload()
    await expect(scene.page.get_by_role("tab", selected=True)).to_have_text("Chat")
    await keyboard.press("Tab")
    await expect(focused).to_have_text("Skip to the prompt")
    await keyboard.press("Enter")
    await keyboard.press("Tab")
    await expect(focused).to_have_text("Chat")
    await keyboard.press("ArrowLeft")
    await expect(focused).to_have_text("Compare")
    await keyboard.press("ArrowLeft")
    await expect(focused).to_have_text("Completion")
    for label in ("model", "open-settings", "prompt"):
        await keyboard.press("Tab")
        await expect(focused).to_have_attribute("id", label)
    await keyboard.press("Control+A")
    await keyboard.type("def f")
    await keyboard.press("Tab")
    await expect(focused).to_have_text("Generate")
    await keyboard.press("Enter")
    request = await scene.backend.submitted.get()
    assert "def f" in scene.backend.tokenizer.decode(request.prompt_ids)
    scene.deliver(request, *in_steps(scene.backend.tokenizer, TEXT))
    await expect(scene.page.locator("#state-completion")).to_have_text(DONE)
    await keyboard.press("Tab")
    await expect(focused).to_have_class(re.compile("token"))
    await expect(scene.page.get_by_role("tooltip")).to_be_visible()
    await keyboard.press("Tab")  # all tokens share one tab stop
    await expect(focused).to_have_text("Pause")


async def test_settings_reach_the_worker(scene: Scene) -> None:
    """The request has the settings of the form and is traced."""
    page = scene.page
    sampled = {"temperature": "0.5", "top_p": "0.9", "max_tokens": "12", "seed": "7"}
    await adjust(page, **sampled, mode="off", form="json_object")
    await page.get_by_label("Prompt", exact=True).press("Control+Enter")
    request = await scene.backend.submitted.get()
    sampling = request.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.5, 12, 7)
    assert sampling.top_p == 0.9
    assert request.speculation.mode == "off"
    assert request.grammar is not None
    assert request.traced
    scene.deliver(request, *in_steps(scene.backend.tokenizer, "{}"))
    await expect(page.locator("#state-completion")).to_have_text(DONE)


async def test_parameters_that_the_user_does_not_set_are_those_of_the_model(scene: Scene) -> None:
    """The page shows the defaults of the model, and sends none of them."""
    page = scene.page
    await expect(page.locator("#temperature")).to_have_attribute("placeholder", "1 by default")
    await expect(page.locator("#top-p")).to_have_attribute("placeholder", "1 by default")
    async with page.expect_request("**/v1/completions") as sent:
        await generate(scene)
    body = json.loads((await sent.value).post_data)
    assert not {"temperature", "top_p", "seed"} & body.keys()


async def test_page_shows_statistics_of_the_run(scene: Scene) -> None:
    """The page shows the tokens, the accepted drafts and the reason of the run."""
    deltas = await generate(scene)
    outcome = deltas[-1].outcome
    tokens = sum(len(delta.token_ids) for delta in deltas)
    await expect(scene.page.locator("#stats [data-stat=tokens]")).to_have_text(str(tokens))
    await expect(scene.page.locator("#stats [data-stat=accepted]")).to_contain_text(
        f"{outcome.num_accepted_tokens} of {outcome.num_drafted_tokens}"
    )
    (decision,) = scene.gateway.node.decisions.latest(1)
    await expect(scene.page.locator("#reason")).to_contain_text(decision.plan.reason)


async def test_charts_are_updated_and_have_text_alternatives(scene: Scene) -> None:
    """The charts draw new samples, and their text alternatives contain the latest values."""
    live, charts = scene.gateway.node.live, scene.page.locator("#charts svg")
    await expect(charts).to_have_count(9)
    live.take()
    tokens = scene.page.get_by_role("img", name=re.compile("^Tokens.s:"))
    await expect(tokens).to_have_accessible_name("Tokens/s: 0")
    before = await tokens.locator(".line").get_attribute("d")
    await generate(scene)
    live.take()
    await expect(tokens).not_to_have_accessible_name("Tokens/s: 0")
    assert await tokens.locator(".line").get_attribute("d") != before
    for title in ("TTFT", "TPOT"):  # p90 and p99 of one request are equal to p50
        chart = scene.page.get_by_role("img", name=re.compile(f"^{title}: p50 [0-9.<]+ ms$"))
        await expect(chart).not_to_have_accessible_name(re.compile("no data yet"))
    for title in ("Slot price", "Drafts per step", "Acceptance", "Running", "Waiting", "KV use"):
        chart = scene.page.get_by_role("img", name=re.compile(f"^{title}: [0-9<]"))
        await expect(chart).to_have_count(1)


async def test_charts_can_be_paused(scene: Scene) -> None:
    """Paused charts draw the samples of the pause when the user resumes them."""
    live = scene.gateway.node.live
    live.take()
    button, line = scene.page.get_by_role("button", name="Pause"), scene.page.locator(".line").first
    await expect(scene.page.locator("#live-state")).to_have_text("last two minutes")
    await button.click()
    await expect(button).to_have_attribute("aria-pressed", "true")
    frozen = await line.get_attribute("d")
    async with scene.page.expect_response("**/decisions*"):
        live.take()
        await generate(scene)  # the page requests decisions after the sample
    assert await line.get_attribute("d") == frozen
    await button.click()
    await expect(line).not_to_have_attribute("d", frozen)


async def test_decisions_are_listed_and_filtered(scene: Scene) -> None:
    """The page lists the newest decision first and can show only the last run."""
    rows = scene.page.locator("#decisions tr")
    await generate(scene)
    await expect(rows).to_have_count(1)
    await generate(scene)
    await expect(rows).to_have_count(2)
    (decision,) = scene.gateway.node.decisions.latest(1)
    for word in (
        decision.plan.policy,
        str(decision.plan.proposer),
        decision.plan.reason,
        f"{decision.outcome.accepted_tokens} of {decision.outcome.drafted_tokens} drafts accepted",
        "running",
    ):
        await expect(rows.first).to_contain_text(word)
    words = "2 requests: every draft slot is worth its price, 78% of drafts accepted"
    await expect(scene.page.locator("#causes")).to_have_text(words)
    await scene.page.get_by_label("only my last run").check()
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text(decision.request_id[:8])


async def test_refusal_is_shown_as_an_alert(scene: Scene) -> None:
    """The page shows a refusal as an alert, and the form remains usable."""
    await adjust(scene.page, max_tokens="9999")
    await scene.page.get_by_role("button", name="Generate").click()
    await expect(scene.page.get_by_role("alert")).to_contain_text("fit, not")
    scene.visit.problems.clear()  # browsers log every 400
    await adjust(scene.page, max_tokens="10")
    await generate(scene)
    await expect(scene.page.get_by_role("alert")).to_be_hidden()


async def test_worker_failure_is_shown(scene: Scene) -> None:
    """The page shows the worker's error and keeps the text before the failure."""
    await scene.page.get_by_role("button", name="Generate").click()
    request = await scene.backend.submitted.get()
    first = in_steps(scene.backend.tokenizer, TEXT)[0]
    scene.deliver(request, first)
    await expect(output_of(scene)).to_have_js_property("textContent", first.text)
    scene.backend.crash("the device is gone")
    await expect(scene.page.get_by_role("alert")).to_contain_text("the device is gone")


@pytest.mark.parametrize("status", FAILURES.values(), ids=FAILURES)
async def test_failed_continuation_keeps_the_text_and_can_be_repeated(
    scene: Scene, status: int
) -> None:
    """If the continuation of a completion fails, the page shows the reason, the text stays, and
    the button continues it later."""
    more = scene.page.get_by_role("button", name="Continue")
    await scene.page.get_by_role("button", name="Generate").click()
    request = await scene.answer_cut("def area")
    async with failing(scene, "/v1/completions", status):
        await more.click()
    await expect(output_of(scene)).to_have_js_property("textContent", "def area")
    await more.click()
    prompts = [request.prompt_ids, (again := await scene.backend.submitted.get()).prompt_ids]
    before, after = map(scene.backend.tokenizer.decode, prompts)
    assert after == f"{before}def area"
    scene.deliver(again, *in_steps(scene.backend.tokenizer, "(self)"))
    await expect(output_of(scene)).to_have_js_property("textContent", "def area(self)")
    await expect(more).to_be_hidden()
    await expect(scene.page.get_by_role("alert")).to_be_hidden()


async def test_completion_that_breaks_off_can_be_continued(scene: Scene) -> None:
    """A completion that breaks off, or that the user stops, has a button that continues it."""
    more = scene.page.get_by_role("button", name="Continue")
    event = {"choices": [{"index": 0, "text": "def", "finish_reason": None}]}
    body, headers = f"data: {json.dumps(event)}\n\n", {"content-type": "text/event-stream"}
    answer = {"body": body, "headers": headers}
    await scene.page.route("**/v1/completions", lambda route: route.fulfill(**answer))
    await scene.page.get_by_role("button", name="Generate").click()
    await expect(scene.page.get_by_role("alert")).to_have_text("The stream ended early.")
    await scene.page.unroute("**/v1/completions")
    await more.click()
    request = await scene.backend.submitted.get()
    scene.deliver(request, in_steps(scene.backend.tokenizer, " area(self)")[0])
    await expect(output_of(scene)).not_to_have_js_property("textContent", "def")
    await scene.page.get_by_role("button", name="Stop").click()
    await expect(more).to_be_visible()


async def test_missing_key_is_explained(scene: Scene) -> None:
    """The page asks the user to log in again after the end of the session."""
    response = {"error": {"message": "no key", "type": "x", "param": None, "code": None}}
    await scene.page.route(
        "**/v1/completions", lambda route: route.fulfill(status=401, body=json.dumps(response))
    )
    await scene.page.get_by_role("button", name="Generate").click()
    await expect(scene.page.get_by_role("alert")).to_contain_text("Reload the page to log in")
    scene.visit.problems.clear()  # browsers log every 401


async def test_closing_the_page_frees_its_request(scene: Scene) -> None:
    """Closing the page frees its request."""
    await scene.page.get_by_role("button", name="Generate").click()
    request = await scene.backend.submitted.get()
    await scene.page.close()
    assert await scene.backend.abandoned.get() == request.request_id
    await until(lambda: scene.gateway.node.in_flight == 0)
