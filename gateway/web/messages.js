/** The messages of the chat as elements: text, answers, their buttons, and the form that edits one. */

import { button, byId, copyButton, count, followEnd, make } from "/web/dom.js";
import { renderInto } from "/web/markdown.js";
import { Output } from "/web/output.js";

/**
 * A message of the user. `fill(actions)` sets its buttons, and `edit(onSave)` opens a form in place of
 * its text.
 */
export class Question {
  constructor(message) {
    this.message = message;
    this.text = make("p", { className: "turn" }, message.content);
    this.actions = make("div", { className: "message-actions" });
    this.element = make("article", { className: "question", "aria-label": "You" }, this.text, this.actions);
  }

  fill(actions) {
    this.actions.replaceChildren(copyButton(() => this.message.content), ...actions);
  }

  edit(onSave) {
    editInPlace(this.element, this.text, this.message.content, onSave);
  }
}

/** An answer, as Markdown and as tokens, of which the page shows one. */
export class Answer {
  #due = 0; // the animation frame of the next update

  constructor(message) {
    this.message = message;
    this.output = new Output();
    this.output.add(message.content, [], "");
    this.output.reasoning = message.reasoning ?? "";
    this.rendered = make("div", { className: "markdown" });
    this.thoughts = make("details", { hidden: true }, make("summary", {}, "Reasoning"), make("p"));
    this.facts = make("p", { className: "facts" });
    this.actions = make("div", { className: "message-actions" });
    const name = message.model || "Assistant";
    const content = [make("p", { className: "by" }, name), this.thoughts, this.rendered, this.output.element];
    const foot = make("div", { className: "bar foot" }, this.actions, this.facts);
    this.element = make("article", { className: "answer", "aria-label": name }, ...content, foot);
    this.update();
  }

  fill(actions) {
    this.actions.replaceChildren(copyButton(() => this.message.content), ...actions);
    this.facts.textContent = [endingOf(this.message), this.message.facts].filter(Boolean).join(" ");
  }

  edit(onSave) {
    editInPlace(this.element, this.rendered, this.message.content, onSave);
  }

  /** Render the text before the next frame, because chunks arrive more often. */
  updateSoon() {
    this.#due ||= requestAnimationFrame(() => this.update());
  }

  /** Render the text so far. */
  update() {
    cancelAnimationFrame(this.#due);
    this.#due = 0;
    const { text, reasoning } = this.output;
    followEnd(byId("turns"), () => {
      this.thoughts.hidden = !reasoning;
      this.thoughts.lastChild.textContent = reasoning;
      renderInto(this.rendered, text);
    });
  }
}

/** Why an answer ended before the model stopped, or "". */
export function endingOf({ end, tokens }) {
  const after = tokens ? ` after ${count(tokens, "token")}` : "";
  if (end === "full") return `Stopped${after}, because the context is full.`;
  if (end === "length") return `Stopped${after}.`;
  if (end === "stopped") return "Stopped by you.";
  return end === "failed" ? "The answer broke off." : "";
}

/** The buttons that switch between the versions of a message. `onSwitch(step)` moves by -1 or 1. */
export function versionButtons(index, number, onSwitch) {
  if (number < 2) return [];
  const step = (by, sign, label, isLast) =>
    button(sign, () => onSwitch(by), { "aria-label": label, title: label, disabled: isLast, className: "step" });
  return [
    step(-1, "‹", "Previous version", index === 0),
    make("span", { className: "versions" }, `${index + 1}/${number}`),
    step(1, "›", "Next version", index === number - 1),
  ];
}

/** Show a form in place of a text. Enter saves it, and Escape closes it. */
function editInPlace(element, shown, content, onSave) {
  const field = make("textarea", { value: content, "aria-label": "Edited message", rows: 3 });
  const close = () => {
    form.remove();
    shown.hidden = false;
    element.querySelector('[data-action="edit"]')?.focus();
  };
  const save = () => {
    if (!field.value.trim()) return;
    close();
    onSave(field.value);
  };
  const buttons = [button("Save", save, { className: "primary" }), button("Cancel", close)];
  const form = make("div", { className: "edit" }, field, make("div", { className: "bar" }, ...buttons));
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (event.target !== field || !entersText(event)) return;
    event.preventDefault();
    save();
  });
  shown.hidden = true;
  shown.before(form);
  field.focus();
}

/** Whether a key press sends a text: Enter without Shift, and not within an input method. */
export const entersText = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;
