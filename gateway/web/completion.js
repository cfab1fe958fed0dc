/** The completion of a prompt, with the source of each token. */

import { byId, make } from "/web/dom.js";
import { Output } from "/web/output.js";
import { Run, showFigures } from "/web/run.js";
import { settings } from "/web/settings.js";
import { Task } from "/web/task.js";

let task = null;
let ended = () => {};
let last = null; // the latest run, as {prompt, output}

/** Set up the tab with a prompt. `onEnd(requestId)` is called after each run. */
export function setUp(prompt, onEnd) {
  ended = onEnd;
  byId("prompt").value = prompt;
  task = new Task("completion", () => task.perform(generate));
  byId("continue-completion").addEventListener("click", () => {
    const { prompt, output } = last;
    task.perform((signal) => stream(prompt + output.text, output, signal));
  });
}

function generate(signal) {
  last = { prompt: byId("prompt").value, output: new Output() };
  byId("said-completion").replaceChildren(make("span", { className: "given" }, last.prompt), last.output.element);
  return stream(last.prompt, last.output, signal);
}

/** Send a prompt, show its completion, and return the words for its end. */
async function stream(prompt, output, signal) {
  const run = new Run(output, byId("output"));
  for (const part of ["empty", "stats", "reason", "continue-completion"]) byId(part).hidden = true;
  byId("output").setAttribute("aria-busy", "true");
  let isComplete = false;
  try {
    await run.stream("/v1/completions", { ...settings(), prompt }, signal);
    isComplete = !run.wasCut;
    return run.ending;
  } finally {
    byId("continue-completion").hidden = isComplete || !output.text;
    byId("output").setAttribute("aria-busy", "false");
    finish(run);
  }
}

function finish(run) {
  byId("empty").hidden = byId("said-completion").hasChildNodes();
  if (run.first_ms !== null) {
    showFigures(byId("stats"), run.figures());
    byId("reason").textContent = run.reason;
    byId("reason").hidden = !run.reason;
  }
  if (run.id) ended(run.requestId);
}
