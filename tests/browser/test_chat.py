"""Tests of the chat: Markdown, tokens, copies, the system prompt and the history."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.browser.conftest import Scene
from tests.browser.draft_steps import in_steps
from tests.browser.states import ANSWER, say

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

WITHOUT_CLIPBOARD = "Object.defineProperty(navigator, 'clipboard', { value: undefined })"


async def test_answer_is_shown_as_markdown_or_as_tokens(scene: Scene) -> None:
    """An answer is Markdown until the user asks for its tokens."""
    await say(scene, "hello")
    markdown, tokens = (
        scene.page.locator(".answer .markdown"),
        scene.page.locator(".answer .tokens"),
    )
    await expect(markdown.get_by_role("listitem")).to_have_text(["one", "two"])
    await expect(markdown.locator("strong")).to_have_text("one")
    await expect(tokens).to_be_hidden()
    button = scene.page.get_by_role("button", name="Show tokens")
    await button.click()
    await expect(button).to_have_attribute("aria-pressed", "true")
    await expect(markdown).to_be_hidden()
    await expect(tokens.locator(".from-ngram").first).to_be_visible()
    await expect(tokens).to_have_js_property("textContent", ANSWER)


async def test_answer_grows_while_it_arrives(scene: Scene) -> None:
    """The Markdown contains the text so far while the answer arrives."""
    await scene.page.get_by_role("tab", name="Chat").click()
    await scene.page.get_by_label("Message").fill("hello")
    await scene.page.get_by_role("button", name="Generate").click()
    request = await scene.backend.submitted.get()
    deltas = in_steps(scene.backend.tokenizer, "# Title\n\nsome text")
    scene.deliver(request, *deltas[:-1])
    markdown = scene.page.locator(".answer .markdown")
    await expect(markdown.get_by_role("heading", name="Title")).to_be_visible()
    scene.deliver(request, deltas[-1])
    await expect(markdown.locator("p")).to_have_text("some text")


async def test_system_prompt_is_the_first_message(scene: Scene) -> None:
    """The system prompt precedes the conversation in every request."""
    await scene.page.get_by_role("tab", name="Chat").click()
    await scene.page.get_by_label("System prompt").fill("always be brief")
    for message in ("first", "second"):
        prompt = await say(scene, message)
        assert prompt.count("always be brief") == 1
        assert prompt.index("always be brief") < prompt.index("first")


@pytest.mark.parametrize("clipboard", [True, False])
async def test_answer_can_be_copied(scene: Scene, clipboard: bool) -> None:
    """The button copies the source of the answer, also on pages without a clipboard."""
    context = scene.page.context
    await context.grant_permissions(["clipboard-read", "clipboard-write"])
    await say(scene, "hello")
    if not clipboard:
        await scene.page.evaluate(WITHOUT_CLIPBOARD)
    await scene.page.get_by_role("button", name="Copy").click()
    await expect(scene.page.locator(".copy")).to_have_text("Copied")
    await scene.page.get_by_label("Message").focus()
    await scene.page.keyboard.press("Control+V")
    await expect(scene.page.get_by_label("Message")).to_have_value(ANSWER)


async def test_conversations_are_kept_and_can_be_deleted(scene: Scene) -> None:
    """A conversation returns after a reload, continues with its messages, and can be deleted."""
    page = scene.page
    listed = page.get_by_label("Conversation", exact=True)
    await page.get_by_role("tab", name="Chat").click()
    await page.get_by_label("System prompt").fill("be brief")
    await say(scene, "first question")
    await page.get_by_role("button", name="New conversation").click()
    await expect(page.get_by_label("System prompt")).to_have_value("")
    await say(scene, "other question")
    await page.reload()
    await page.get_by_role("tab", name="Chat").click()
    await expect(listed.locator("option")).to_have_text(["new", "other question", "first question"])
    await listed.select_option("first question")
    await expect(page.locator("#said-chat .turn")).to_have_text("first question")
    await expect(page.locator(".answer .markdown strong")).to_have_text("one")
    await expect(page.get_by_label("System prompt")).to_have_value("be brief")
    prompt = await say(scene, "and then?")
    assert [prompt.count(text) for text in ("first question", "be brief", "other")] == [1, 1, 0]
    await page.get_by_role("button", name="Delete").click()
    await expect(listed.locator("option")).to_have_text(["new", "other question"])
    await expect(page.locator("#said-chat > *")).to_have_count(0)
    await expect(page.get_by_role("button", name="Delete")).to_be_disabled()


async def test_chat_works_without_storage(scene: Scene) -> None:
    """The chat works in a browser that keeps no data for the page."""
    await scene.page.evaluate(
        "() => Object.defineProperty(window, 'localStorage',"
        " { get() { throw new DOMException('denied', 'SecurityError'); } })"
    )
    await say(scene, "hello")
    assert "hello" in await say(scene, "again")
