/** The task of the form, one at a time: its buttons, its state and its errors. */

import { byId } from "/web/dom.js";

let running = null; // the AbortController of the task

/** Connect the button that stops the task. */
export function setUp() {
  byId("stop").addEventListener("click", stop);
}

/** Stop the task, if one runs. */
export function stop() {
  running?.abort();
}

/**
 * Run a task, unless another one runs. `task(signal)` returns the words for its end. The page shows
 * an error that it throws.
 */
export async function perform(task) {
  if (running) return;
  running = new AbortController();
  begin();
  try {
    say(await task(running.signal));
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else fail(error);
  } finally {
    running = null;
    end();
  }
}

/** Show what the task does. */
export function say(words) {
  byId("run-state").textContent = words;
}

function begin() {
  byId("run").disabled = true;
  byId("stop").disabled = false;
  byId("problem").hidden = true;
  say("Generating.");
}

function end() {
  byId("run").disabled = false;
  if (document.activeElement === byId("stop")) byId("run").focus();
  byId("stop").disabled = true;
}

function fail(error) {
  say("");
  byId("problem").textContent = error.message;
  byId("problem").hidden = false;
}
