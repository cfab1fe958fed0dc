"""Tests of the chat: sending, streaming, continuing, branches, tokens, copies and attachments."""

from __future__ import annotations

import re
from typing import Final

import pytest
from playwright.async_api import Locator, Page, Route, expect

from draftgate.backends.types import Delta, FinishReason
from tests.browser.conftest import Scene
from tests.browser.draft_steps import in_steps
from tests.browser.states import (
    ANSWER,
    FAILURES,
    adjust,
    begin,
    failing,
    paste,
    reply,
    say,
    send,
)

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

WITHOUT_CLIPBOARD: Final = "Object.defineProperty(navigator, 'clipboard', { value: undefined })"

WATCH_LIVE_REGIONS: Final = """
() => {
  window.announced = [];
  const LIVE = ":is([aria-live], [role=status], [role=alert], [role=log])";
  const changes = { childList: true, characterData: true, subtree: true };
  for (const region of document.querySelectorAll(`#box ${LIVE}`)) {
    const note = () => window.announced.push(region.textContent);
    new MutationObserver(note).observe(region, changes);
  }
  window.isLive = (node) => node.closest(LIVE) !== null;
}
"""

DROP: Final = """
([name, type, content]) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([content], name, { type }));
  const event = new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true });
  return document.getElementById("turns").dispatchEvent(event);
}
"""


def message_of(page: Page) -> Locator:
    """Return the field of the message to send."""
    return page.get_by_label("Message", exact=True)


@pytest.mark.parametrize(
    ("defaults", "words"),
    [({}, "until the model stops"), ({"max_new_tokens": 512}, "512 by default")],
)
async def test_limit_of_the_model_is_shown(
    chat_scene: Scene, defaults: dict[str, int], words: str
) -> None:
    """*Settings* has the number of tokens after which the model's answers stop."""
    page = chat_scene.page

    async def answer(route: Route) -> None:
        response = await route.fetch()
        models = await response.json()
        for one in models["data"]:
            one["default_parameters"] = defaults
        await route.fulfill(response=response, json=models)

    await page.route("**/v1/models", answer)
    await page.reload()
    await expect(page.locator("#max-tokens")).to_have_attribute("placeholder", words)


async def test_enter_sends_and_shift_enter_breaks_the_line(chat_scene: Scene) -> None:
    """Enter sends the message, Shift+Enter breaks its line, and an empty message stays."""
    page = chat_scene.page
    await message_of(page).press("Enter")
    await message_of(page).fill("first line")
    await message_of(page).press("Shift+Enter")
    await page.keyboard.type("second line")
    await expect(message_of(page)).to_have_value("first line\nsecond line")
    await page.keyboard.press("Enter")
    assert "first line\nsecond line" in await reply(chat_scene)
    await expect(message_of(page)).to_have_value("")
    await expect(page.locator(".turn")).to_have_text("first line\nsecond line")


async def test_second_message_is_sent_with_the_conversation(chat_scene: Scene) -> None:
    """A request has the messages and answers before it, until a new conversation begins."""
    await say(chat_scene, "first question", "answer to it")
    prompt = await say(chat_scene, "second question")
    words = ("first question", "answer to it", "second question")
    assert sorted(words, key=prompt.index) == list(words)
    await chat_scene.page.get_by_role("button", name="New conversation").click()
    await expect(chat_scene.page.locator("#turns > *")).to_have_count(0)
    assert "first question" not in await say(chat_scene, "third question")


async def test_answer_has_no_limit_by_default(chat_scene: Scene) -> None:
    """An answer may fill the context unless the drawer has a limit."""
    await send(chat_scene.page, "hello")
    request = await chat_scene.backend.submitted.get()
    assert len(request.prompt_ids) + request.sampling.max_tokens == 500  # tokens of its KV memory
    chat_scene.deliver(request, *in_steps(chat_scene.backend.tokenizer, ANSWER))
    await adjust(chat_scene.page, max_tokens="7")
    await send(chat_scene.page, "again")
    assert (await chat_scene.backend.submitted.get()).sampling.max_tokens == 7


async def test_cut_answer_says_so_and_continues(chat_scene: Scene) -> None:
    """The page says after how many tokens a limit ended an answer, and a button continues it."""
    page = chat_scene.page
    await send(page, "tell me")
    request = await chat_scene.answer_cut("Once upon a")
    number = len(chat_scene.backend.tokenizer.encode("Once upon a"))
    await expect(page.locator("#state-chat")).to_have_text(f"Stopped after {number} tokens.")
    await expect(page.locator(".facts")).to_contain_text(f"Stopped after {number} tokens.")
    await page.get_by_role("button", name="Continue").click()
    prompt = await reply(chat_scene, " time.")
    assert prompt.startswith(chat_scene.backend.tokenizer.decode(request.prompt_ids))
    assert prompt.endswith("Once upon a")
    await expect(page.locator(".answer .markdown")).to_have_text("Once upon a time.")
    await expect(page.locator(".answer")).to_have_count(1)
    await expect(page.get_by_role("button", name="Continue")).to_have_count(0)


@pytest.mark.parametrize("status", FAILURES.values(), ids=FAILURES)
async def test_failed_continuation_keeps_the_answer_and_can_be_repeated(
    chat_scene: Scene, status: int
) -> None:
    """If the continuation of an answer fails, the page shows the reason, the text stays, and the
    button continues it later."""
    page = chat_scene.page
    answer, more = page.locator(".answer .markdown"), page.get_by_role("button", name="Continue")
    await send(page, "tell me")
    await chat_scene.answer_cut("Once upon a")
    async with failing(chat_scene, "/v1/chat/completions", status):
        await more.click()
    await expect(answer).to_have_text("Once upon a")
    await more.click()
    assert (await reply(chat_scene, " time.")).endswith("Once upon a")
    await expect(answer).to_have_text("Once upon a time.")
    await expect(page.get_by_role("alert")).to_be_hidden()


async def test_answer_that_is_already_complete_does_not_continue(chat_scene: Scene) -> None:
    """The button to continue disappears if the model adds nothing to a cut answer."""
    page = chat_scene.page
    await send(page, "tell me")
    await chat_scene.answer_cut("The end.")
    await page.get_by_role("button", name="Continue").click()
    request = await chat_scene.backend.submitted.get()
    chat_scene.deliver(request, Delta(0, (), "", finish_reason=FinishReason.STOP))
    await expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    await expect(page.locator(".answer .markdown")).to_have_text("The end.")


async def test_full_context_cannot_continue(chat_scene: Scene) -> None:
    """An answer that has filled the context says so, and has no button to continue."""
    page = chat_scene.page
    chat_scene.backend.kv_tokens = 1000
    await send(page, "count")
    request = await chat_scene.backend.submitted.get()
    ids = tuple(chat_scene.backend.tokenizer.encode("a")) * request.sampling.max_tokens
    chat_scene.deliver(request, Delta(0, ids, "a", finish_reason=FinishReason.LENGTH))
    await expect(page.locator("#state-chat")).to_contain_text("the context is full")
    await expect(page.get_by_role("button", name="Continue")).to_have_count(0)


async def test_stop_keeps_the_text_so_far(chat_scene: Scene) -> None:
    """Stop cancels the request and keeps its text, which can be continued."""
    page = chat_scene.page
    await send(page, "hello")
    request = await chat_scene.backend.submitted.get()
    chat_scene.deliver(request, *in_steps(chat_scene.backend.tokenizer, "one two three four")[:2])
    await expect(page.locator(".answer .markdown")).to_have_text(re.compile("^one"))
    await expect(page.get_by_role("button", name="Send")).to_be_hidden()
    await page.get_by_role("button", name="Stop").click()
    assert await chat_scene.backend.abandoned.get() == request.request_id
    await expect(page.locator("#state-chat")).to_have_text("Stopped.")
    await expect(page.locator(".facts")).to_contain_text("Stopped by you.")
    await expect(page.get_by_role("button", name="Continue")).to_be_visible()
    await expect(page.get_by_role("button", name="Send")).to_be_visible()


async def test_regenerated_answer_is_another_version(chat_scene: Scene) -> None:
    """A regenerated answer is a version beside the first, and the page switches between them."""
    page = chat_scene.page
    first = await say(chat_scene, "hello", "answer one")
    await page.get_by_role("button", name="Regenerate").click()
    assert await reply(chat_scene, "answer two") == first
    shown = page.locator(".answer .markdown")
    await expect(shown).to_have_text("answer two")
    await expect(page.locator(".versions")).to_have_text("2/2")
    await page.get_by_role("button", name="Previous version").click()
    await expect(shown).to_have_text("answer one")
    await expect(page.locator("*:focus")).to_have_accessible_name("Next version")
    assert "answer one" in await say(chat_scene, "more")
    await expect(page.locator(".versions")).to_have_text("1/2")


async def test_edited_message_begins_a_branch(chat_scene: Scene) -> None:
    """An edited message is answered anew, and its other version keeps what followed it."""
    page = chat_scene.page
    await say(chat_scene, "first question", "first answer")
    await say(chat_scene, "second question", "second answer")
    await page.get_by_role("button", name="Edit").first.click()
    field = page.get_by_label("Edited message")
    await field.fill("changed question")
    await field.press("Enter")
    prompt = await reply(chat_scene, "changed answer")
    assert "changed question" in prompt
    assert "first" not in prompt
    await expect(page.locator(".turn")).to_have_text(["changed question"])
    await page.reload()
    await page.locator("#conversations .open").click()
    await expect(page.locator(".turn")).to_have_text(["changed question"])
    await page.get_by_role("button", name="Previous version").click()
    await expect(page.locator(".turn")).to_have_text(["first question", "second question"])
    await expect(page.locator(".answer .markdown").last).to_have_text("second answer")


async def test_editing_can_be_cancelled_and_answers_can_be_edited(chat_scene: Scene) -> None:
    """Escape leaves a message unchanged, and an edited answer is a version without a request."""
    page = chat_scene.page
    await say(chat_scene, "question", "wrong")
    await page.get_by_role("button", name="Edit").first.click()
    await page.get_by_label("Edited message").fill("changed")
    await page.get_by_label("Edited message").press("Escape")
    await expect(page.locator(".turn")).to_have_text("question")
    await expect(page.locator("*:focus")).to_have_text("Edit")
    await page.get_by_role("button", name="Edit").last.click()
    await page.get_by_label("Edited message").fill("right")
    await page.get_by_role("button", name="Save").click()
    await expect(page.locator(".answer .markdown")).to_have_text("right")
    prompt = await say(chat_scene, "next")
    assert "right" in prompt
    assert "wrong" not in prompt


async def test_refused_message_returns_to_its_field(chat_scene: Scene) -> None:
    """A refused message returns to its field and is not part of the conversation."""
    page = chat_scene.page
    await adjust(page, max_tokens="9999")
    await send(page, "asked twice")
    await expect(page.get_by_role("alert")).to_contain_text("fit, not")
    await expect(message_of(page)).to_have_value("asked twice")
    await expect(page.locator("#turns > *")).to_have_count(0)
    await adjust(page, max_tokens="10")
    await message_of(page).press("Enter")
    assert (await reply(chat_scene)).count("asked twice") == 1
    await expect(page.get_by_role("alert")).to_be_hidden()
    chat_scene.visit.problems.clear()  # browsers log every 400


async def test_answer_breaks_off_with_its_reason(chat_scene: Scene) -> None:
    """The page keeps the text before a failure of the worker, and shows the error."""
    page = chat_scene.page
    await begin(chat_scene, "hello")
    chat_scene.backend.crash("the device is gone")
    await expect(page.get_by_role("alert")).to_contain_text("the device is gone")
    await expect(page.locator(".facts")).to_contain_text("The answer broke off.")


async def test_answer_is_shown_as_markdown_or_as_tokens(chat_scene: Scene) -> None:
    """An answer is Markdown until the user asks for its tokens."""
    await say(chat_scene, "hello")
    markdown, tokens = (
        chat_scene.page.locator(".answer .markdown"),
        chat_scene.page.locator(".answer .tokens"),
    )
    await expect(markdown.get_by_role("listitem")).to_have_text(["one", "two"])
    await expect(markdown.locator("strong")).to_have_text("one")
    await expect(tokens).to_be_hidden()
    button = chat_scene.page.get_by_role("button", name="Show tokens")
    await button.click()
    await expect(button).to_have_attribute("aria-pressed", "true")
    await expect(markdown).to_be_hidden()
    await expect(tokens.locator(".from-ngram").first).to_be_visible()
    await expect(tokens).to_have_js_property("textContent", ANSWER)


async def test_answer_grows_while_it_arrives(chat_scene: Scene) -> None:
    """The Markdown contains the text so far while the answer arrives."""
    await send(chat_scene.page, "hello")
    request = await chat_scene.backend.submitted.get()
    deltas = in_steps(chat_scene.backend.tokenizer, "# Title\n\nsome text")
    chat_scene.deliver(request, *deltas[:-1])
    markdown = chat_scene.page.locator(".answer .markdown")
    await expect(markdown.get_by_role("heading", name="Title")).to_be_visible()
    chat_scene.deliver(request, deltas[-1])
    await expect(markdown.locator("p")).to_have_text("some text")


async def test_system_prompt_is_the_first_message(chat_scene: Scene) -> None:
    """The system prompt precedes the conversation in every request."""
    await adjust(chat_scene.page, system="always be brief")
    for message in ("first", "second"):
        prompt = await say(chat_scene, message)
        assert prompt.count("always be brief") == 1
        assert prompt.index("always be brief") < prompt.index("first")


@pytest.mark.parametrize("clipboard", [True, False])
async def test_answer_and_code_can_be_copied(chat_scene: Scene, clipboard: bool) -> None:
    """Buttons copy the source of an answer and of its code, also on pages without a clipboard."""
    page = chat_scene.page
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer = "Run this:\n\n```python\nprint('a')\n```\n"
    await say(chat_scene, "hello", answer)
    if not clipboard:
        await page.evaluate(WITHOUT_CLIPBOARD)
    for box, text in ((".answer .message-actions", answer), (".answer .code", "print('a')")):
        button = page.locator(box).get_by_role("button", name="Copy")
        await button.click()
        await expect(page.locator(box).get_by_role("button", name="Copied")).to_be_visible()
        await message_of(page).fill("")
        await page.keyboard.press("Control+V")
        await expect(message_of(page)).to_have_value(text)


@pytest.mark.parametrize("dropped", [True, False])
async def test_text_files_are_inserted_and_others_refused(chat_scene: Scene, dropped: bool) -> None:
    """A pasted or dropped text file becomes text, and other files are refused with a reason."""
    page = chat_scene.page

    async def offer(name: str, kind: str, content: str) -> None:
        if dropped:
            assert not await page.evaluate(DROP, [name, kind, content])  # the page handled it
        else:
            await paste(page, name, kind, content)

    await message_of(page).fill("Explain: ")
    await offer("a.py", "text/x-python", "x = 1\n")
    text = "Explain: a.py:\n```py\nx = 1\n```\n"
    await expect(message_of(page)).to_have_value(text)
    await offer("photo.png", "image/png", "png")
    alert = page.get_by_role("alert")
    await expect(alert).to_have_text("photo.png is an image. Only text can be sent.")
    await offer("a.bin", "", "a\0b")
    await expect(alert).to_have_text("a.bin is not a text file. Only text can be sent.")
    await offer("big.txt", "text/plain", "a" * 200_001)
    await expect(alert).to_contain_text("big.txt is larger than 200 kB")
    await expect(message_of(page)).to_have_value(text)
    await offer("b.md", "", "```\ncode\n```")
    await expect(message_of(page)).to_have_value(f"{text}b.md:\n````md\n```\ncode\n```\n````\n")
    await expect(alert).to_be_hidden()


async def test_screen_readers_hear_an_answer_once(chat_scene: Scene) -> None:
    """The answer is announced as a whole, and its tokens are in no live region."""
    page = chat_scene.page
    await page.evaluate(WATCH_LIVE_REGIONS)
    await send(page, "hello")
    request = await chat_scene.backend.submitted.get()
    shown = ""
    for delta in in_steps(chat_scene.backend.tokenizer, "one two three four five six"):
        shown += delta.text
        chat_scene.deliver(request, delta)
        await expect(page.locator(".answer .tokens")).to_have_js_property("textContent", shown)
    await expect(page.locator("#spoken")).to_have_text(shown)
    announced = [text for text in await page.evaluate("announced") if text]
    assert [text.split()[0] for text in announced] == ["Generating.", "Done", "one"]
    assert announced[-1] == shown
    assert not await page.locator(".answer .markdown").evaluate("isLive")
    await expect(page.locator("#turns")).to_have_attribute("aria-busy", "false")


async def test_chat_can_be_used_with_the_keyboard(chat_scene: Scene) -> None:
    """The keyboard reaches the settings, the history, the messages and their buttons in order."""
    page, focused = chat_scene.page, chat_scene.page.locator("*:focus")
    await say(chat_scene, "hello")
    await page.get_by_role("tab", name="Chat").focus()
    ids = ["model", "open-settings", "fresh", "search"]
    for label in ids:
        await page.keyboard.press("Tab")
        await expect(focused).to_have_id(label)
    names = ["hello", "Delete hello", "Export Markdown", "Export JSON", "Delete all"]
    names += ["Conversation", "Copy", "Edit", "Copy", "Edit", "Regenerate"]
    names += ["Message", "Show tokens", "Send"]
    for name in names:
        await page.keyboard.press("Tab")
        await expect(focused).to_have_accessible_name(name)
    await page.get_by_role("button", name="Settings").focus()
    await page.keyboard.press("Enter")
    drawer = page.get_by_role("dialog", name="Settings")
    await expect(drawer).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(drawer).to_be_hidden()
    await expect(focused).to_have_id("open-settings")
    await page.keyboard.press("Enter")
    await page.get_by_label("Max tokens").press("Enter")
    await expect(drawer).to_be_hidden()
    await expect(focused).to_have_id("open-settings")
