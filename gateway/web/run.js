/** A streamed response: its events and its figures. */

import { send } from "/web/client.js";
import { count, duration, figure, followEnd, milliseconds, percent } from "/web/dom.js";

/**
 * One request and what is known of its response.
 *
 * `begun_ms`, `first_ms` and `last_ms` are times of `performance.now()`: of the request, and of the
 * first and the last text. `usage` and `decision` are null if the server does not report them.
 * `finish` is the `finish_reason` of the response, or "" before its end.
 */
export class Run {
  #received = 0; // tokens of all steps so far
  #firstTokens = 0; // tokens up to the first text, in which the rate must not count

  /** Prepare a request whose text goes to an output, within a box that scrolls. */
  constructor(output, box) {
    this.output = output;
    this.box = box;
    this.id = "";
    this.usage = null;
    this.decision = null;
    this.reason = "";
    this.finish = "";
    this.begun_ms = performance.now();
    this.first_ms = null;
    this.last_ms = null;
  }

  /** Send a body, and add the text as it arrives. Calls `onEvent` for each event. Throws NodeError. */
  async stream(path, body, signal, onEvent = () => {}) {
    const { headers, events } = await send(path, body, signal);
    this.reason = headers.get("x-speculation-reason") ?? "";
    for await (const event of events) {
      this.#add(event);
      onEvent();
    }
    if (this.decision) this.reason = `Policy ${this.decision.policy}: ${this.decision.reason}`;
  }

  #add(event) {
    this.id = event.id ?? this.id;
    this.usage = event.usage ?? this.usage;
    this.decision = event.metrics?.speculative_decoding ?? this.decision;
    const choice = event.choices?.[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const text = choice.text ?? choice.delta?.content ?? "";
    const reasoning = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
    for (const step of choice.steps ?? []) this.#received += step.tokens.length;
    if (this.first_ms === null) this.#firstTokens = this.#received;
    if (text || reasoning) {
      this.last_ms = performance.now();
      this.first_ms ??= this.last_ms;
    }
    followEnd(this.box, () => this.output.add(text, choice.steps, reasoning));
  }

  /** The number of tokens so far, or 0 if the server does not report it. */
  get tokens() {
    return this.usage?.completion_tokens ?? this.#received;
  }

  /** Whether a limit on the number of tokens ended the response. */
  get wasCut() {
    return this.finish === "length";
  }

  /** How the response ended, in words. */
  get ending() {
    if (this.wasCut) return this.tokens ? `Stopped after ${count(this.tokens, "token")}.` : "Stopped at the limit of tokens.";
    return `Done in ${duration((performance.now() - this.begun_ms) / 1e3)}.`;
  }

  /** The id without the prefix of its kind, as in decisions. */
  get requestId() {
    return this.id.replace(/^[a-z]+-/, "");
  }

  /** Tokens per second after the first text, or null if unknown. */
  get rate() {
    const seconds = (this.last_ms - this.first_ms) / 1e3;
    if (!this.usage || !(seconds > 0)) return null;
    return (this.usage.completion_tokens - Math.max(this.#firstTokens, 1)) / seconds;
  }

  /** The texts of the figures by name. A figure that the server does not report is missing. */
  figures() {
    const found = {
      rate: figure(this.rate),
      ttft: this.first_ms === null ? "–" : milliseconds((this.first_ms - this.begun_ms) / 1e3),
    };
    if (this.usage) found.tokens = String(this.usage.completion_tokens);
    if (this.usage && this.decision) Object.assign(found, this.#drafts());
    return found;
  }

  #drafts() {
    const { num_accepted_tokens: accepted, num_drafted_tokens: drafted } = this.decision;
    const tokens = this.usage.completion_tokens;
    const steps = tokens - accepted;
    return {
      "per-step": steps > 0 ? figure(tokens / steps) : "–",
      accepted: drafted ? `${accepted} of ${drafted} (${percent(accepted / drafted)})` : "no drafts",
    };
  }
}

/** Show figures in a list whose entries have `data-stat`, and hide the entries without a figure. */
export function showFigures(list, figures) {
  for (const value of list.querySelectorAll("[data-stat]")) {
    const text = figures[value.dataset.stat];
    value.textContent = text ?? "";
    value.parentElement.hidden = text === undefined;
  }
  list.hidden = false;
}
