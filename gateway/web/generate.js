/** The form, and the completions and chats that it generates. */

import * as chat from "/web/chat.js";
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

let ended = () => {};

/** Set up the form. `onEnd(...requestIds)` is called after each task. */
export function setUp(onEnd) {
  ended = onEnd;
  byId("prompt").value = EXAMPLE;
  tabs.setUp();
  task.setUp();
  chat.setUp();
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
}

function run() {
  if (tabs.kind === "compare") return task.perform((signal) => compare(signal, ended));
  return task.perform(generate);
}

async function generate(signal) {
  const kind = tabs.kind; // the user may change tabs before the end
  const asked = kind === "chat" ? chat.ask() : askForCompletion();
  if (!asked) return "";
  const run = new Run(asked.output, byId("output"));
  begin();
  try {
    await run.stream(asked.path, { ...settings(), ...asked.body }, signal, asked.update);
    return `Done in ${duration((performance.now() - run.begun_ms) / 1e3)}.`;
  } finally {
    asked.keep();
    finish(run, kind);
  }
}

function askForCompletion() {
  const prompt = byId("prompt").value;
  const output = new Output();
  byId("said-completion").replaceChildren(make("span", { className: "given" }, prompt), output.element);
  return { path: "/v1/completions", body: { prompt }, output, update() {}, keep() {} };
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
