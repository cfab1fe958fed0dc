/** The chat: its turns, its answers as Markdown or as tokens, and its history. */

import { byId, followEnd, make } from "/web/dom.js";
import * as history from "/web/history.js";
import { render } from "/web/markdown.js";
import { Output } from "/web/output.js";
import { showOutput } from "/web/tabs.js";
import { stop } from "/web/task.js";

const TITLE_CHARS = 40;
const COPIED_MS = 1500;

const fresh = () => ({ id: crypto.randomUUID?.() ?? String(Math.random()), system: "", messages: [] });

let conversation = fresh();

/** Set up the buttons and the list of conversations. */
export function setUp() {
  byId("fresh").addEventListener("click", () => open(fresh()));
  byId("conversations").addEventListener("change", ({ target }) => {
    open(history.conversations().find(({ id }) => id === target.value) ?? fresh());
  });
  byId("delete").addEventListener("click", () => {
    history.remove(conversation.id);
    open(fresh());
  });
  byId("show-tokens").addEventListener("click", showTokens);
  list();
}

/**
 * Begin a turn with the message of the form.
 *
 * Returns `path` and `body` of the request, the `output` of its answer, `update`, which shows the
 * text so far, and `keep`, which ends the turn. Returns null without a message.
 */
export function ask() {
  const content = byId("message").value;
  if (!content.trim()) return null;
  const asked = conversation; // the user may open another one before the end
  const messages = [...asked.messages, { role: "user", content }];
  const system = byId("system").value.trim();
  const turn = question(content);
  const answer = new Answer();
  byId("said-chat").append(turn, answer.element);
  byId("message").value = "";
  const keep = () => {
    const { text } = answer.output;
    answer.update();
    if (text) return keepTurn(asked, system, [...messages, { role: "assistant", content: text }]);
    // The message returns to the input if the response is empty.
    turn.remove();
    answer.element.remove();
    byId("message").value ||= content;
  };
  const given = system ? [{ role: "system", content: system }] : [];
  return {
    path: "/v1/chat/completions",
    body: { messages: [...given, ...messages] },
    output: answer.output,
    update: () => answer.updateSoon(),
    keep,
  };
}

function keepTurn(asked, system, messages) {
  Object.assign(asked, { system, messages });
  history.save(asked);
  list();
}

function open(chosen) {
  stop();
  conversation = chosen;
  byId("system").value = chosen.system;
  byId("said-chat").replaceChildren(...chosen.messages.map(shown));
  list();
  showOutput();
  byId("message").focus();
}

/** Show a message of an earlier conversation, whose tokens are unknown. */
function shown({ role, content }) {
  if (role === "user") return question(content);
  const answer = new Answer();
  answer.output.add(content);
  answer.update();
  return answer.element;
}

const question = (content) => make("p", { className: "turn" }, content);

/** List the conversations, with the present one chosen. */
function list() {
  const kept = history.conversations();
  const title = ({ messages }) => messages[0].content.trim().split("\n")[0].slice(0, TITLE_CHARS);
  const options = kept.map((one) => make("option", { value: one.id }, title(one)));
  byId("conversations").replaceChildren(make("option", { value: "" }, "new"), ...options);
  byId("conversations").value = kept.some(({ id }) => id === conversation.id) ? conversation.id : "";
  byId("delete").disabled = !byId("conversations").value;
}

function showTokens() {
  const pressed = byId("show-tokens").getAttribute("aria-pressed") !== "true";
  byId("show-tokens").setAttribute("aria-pressed", String(pressed));
  byId("said-chat").dataset.view = pressed ? "tokens" : "text";
}

/** An answer, as Markdown and as tokens, of which the page shows one. */
class Answer {
  #due = 0; // the animation frame of the next update

  constructor() {
    this.output = new Output();
    this.rendered = make("div", { className: "markdown" });
    const button = make("button", { type: "button", className: "copy" }, "Copy");
    button.addEventListener("click", () => this.#copy(button));
    this.thoughts = make("details", { hidden: true }, make("summary", {}, "Reasoning"), make("p"));
    this.element = make("div", { className: "answer" }, button, this.thoughts, this.rendered, this.output.element);
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
    followEnd(byId("output"), () => {
      this.thoughts.hidden = !reasoning;
      this.thoughts.lastChild.textContent = reasoning;
      this.rendered.replaceChildren(...render(text));
    });
  }

  async #copy(button) {
    await copy(this.output.text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
  }
}

/** Copy a text. Browsers have a clipboard only on local and HTTPS pages. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", { value: text, className: "hidden" });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
