/** The task of a tab, one at a time: its form, its buttons, its state and its errors. */

import { byId } from "/web/dom.js";

export class Task {
  #running = null; // the AbortController of the task

  /** Connect the form and the buttons of a kind of request. `run()` begins its task. */
  constructor(kind, run) {
    this.form = byId(`form-${kind}`);
    this.runButton = byId(`run-${kind}`);
    this.stopButton = byId(`stop-${kind}`);
    this.state = byId(`state-${kind}`);
    this.problem = byId(`problem-${kind}`);
    this.stopButton.addEventListener("click", () => this.stop());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      run();
    });
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      run();
    });
  }

  get isRunning() {
    return this.#running !== null;
  }

  /** Stop the task, if one runs. */
  stop() {
    this.#running?.abort();
  }

  /**
   * Run a task, unless another one runs. `task(signal)` returns the words for its end. The tab shows
   * an error that it throws.
   */
  async perform(task) {
    if (this.isRunning) return;
    this.#running = new AbortController();
    this.#begin();
    try {
      this.say(await task(this.#running.signal));
    } catch (error) {
      if (error.name === "AbortError") this.say("Stopped.");
      else this.fail(error.message);
    } finally {
      this.#running = null;
      this.#end();
    }
  }

  /** Show what the task does. */
  say(words) {
    this.state.textContent = words;
  }

  /** Show an error in place of the state. */
  fail(message) {
    this.say("");
    this.problem.textContent = message;
    this.problem.hidden = false;
  }

  #begin() {
    this.runButton.disabled = true;
    this.stopButton.hidden = false;
    this.problem.hidden = true;
    this.say("Generating.");
  }

  #end() {
    const hadFocus = document.activeElement === this.stopButton;
    this.runButton.disabled = false;
    this.stopButton.hidden = true;
    if (hadFocus) this.runButton.focus();
  }
}
