/** The form, and the completions and chats that it generates. */

import { compare } from "/web/compare.js";
import { byId, duration, make } from "/web/dom.js";
import { Output } from "/web/output.js";
import { Run, showFigures } from "/web/run.js";
import { settings } from "/web/settings.js";
import * as tabs from "/web/tabs.js";
import * as task from "/web/task.js";

const EXAMPLE =
  "class TestParser(unittest.TestCase):\n    def test_empty(self):\n        self.assertEqual(parse(''), [])\n\n" +
  "    def test_one(self):\n        self.assertEqual(parse('a'), ['a'])\n\n";

let conversation = []; // messages of the chat
let ended = () => {};

/** Set up the form. `onEnd(...requestIds)` is called after each task. */
export function setUp(onEnd) {
  ended = onEnd;
  byId("prompt").value = EXAMPLE;
  tabs.setUp();
  task.setUp();
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  byId("ask").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      run();
    }
  });
  byId("fresh").addEventListener("click", startAfresh);
}

function run() {
  if (tabs.kind === "compare") return task.perform((signal) => compare(signal, ended));
  return task.perform(generate);
}

async function generate(signal) {
  const kind = tabs.kind; // the user may change tabs before the end
  const asked = kind === "chat" ? askedInChat() : askedForCompletion();
  if (!asked) return "";
  const run = new Run(new Output(), byId("output"));
  asked.said.append(run.output.element);
  begin();
  try {
    await run.stream(asked.path, { ...settings(), ...asked.body }, signal);
    return `Done in ${duration((performance.now() - run.begun_ms) / 1e3)}.`;
  } finally {
    asked.keep(run.output);
    finish(run, kind);
  }
}

function askedForCompletion() {
  const prompt = byId("prompt").value;
  const said = byId("said-completion");
  said.replaceChildren(make("span", { className: "given" }, prompt));
  return { path: "/v1/completions", body: { prompt }, said, keep() {} };
}

function askedInChat() {
  const content = byId("message").value;
  if (!content.trim()) return null;
  const said = byId("said-chat");
  const turns = conversation;
  turns.push({ role: "user", content });
  const turn = make("p", { className: "turn" }, content);
  said.append(turn);
  byId("message").value = "";
  const keep = (output) => {
    if (output.text) return turns.push({ role: "assistant", content: output.text });
    // The message returns to the input if the response is empty.
    turns.pop();
    turn.remove();
    output.element.remove();
    byId("message").value ||= content;
  };
  return { path: "/v1/chat/completions", body: { messages: turns }, said, keep };
}

function startAfresh() {
  task.stop();
  conversation = [];
  byId("said-chat").replaceChildren();
  tabs.showOutput();
  byId("message").focus();
}

function begin() {
  byId("empty").hidden = true;
  byId("stats").dataset.kind = "";
  byId("stats").hidden = byId("reason").hidden = true;
  byId("output").setAttribute("aria-busy", "true");
}

function finish(run, kind) {
  byId("output").setAttribute("aria-busy", "false");
  if (run.first_ms !== null) {
    byId("stats").dataset.kind = kind;
    showFigures(byId("stats"), run.figures());
    byId("reason").textContent = run.reason;
  }
  tabs.showOutput();
  if (run.id) ended(run.requestId);
}
