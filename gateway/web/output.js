/** Generated text on the page, with a span for each token, one tab stop, and cards of steps. */

import { Aligner } from "/web/align.js";
import { make } from "/web/dom.js";
import { describe, hideCard, showCard } from "/web/card.js";
import { NAMES, showInLegend, source } from "/web/sources.js";

/** A streamed response. `element` is its element on the page. */
export class Output {
  #aligner = new Aligner();
  #pieces = new WeakMap(); // span -> piece
  #steps = new Map(); // step -> its number, from 1
  #current = null; // the span with the tab stop

  constructor(name = "Generated tokens") {
    this.element = make("div", {
      className: "tokens",
      role: "group",
      "aria-label": `${name}; use the arrow keys to move between them`,
    });
    this.text = ""; // the whole response, without reasoning
    this.reasoning = "";
    for (const [event, react] of Object.entries({
      mouseover: (e) => this.#point(e.target),
      mouseout: (e) => this.#leave(e),
      focusin: (e) => this.#focus(e.target),
      focusout: () => hideCard(),
      keydown: (e) => this.#key(e),
    })) {
      this.element.addEventListener(event, react);
    }
  }

  /** Append a chunk's reasoning and text, cut into its tokens. */
  add(text, steps, reasoning = "") {
    this.text += text;
    this.reasoning += reasoning;
    for (const step of steps ?? []) this.#steps.set(step, this.#steps.size + 1);
    this.element.append(...this.#aligner.add(reasoning + text, steps).map((piece) => this.#span(piece)));
  }

  /** Mark the tokens from an index on as a loop. */
  markLoop(start) {
    for (const span of [...this.element.children].slice(start)) span.classList.add("looped");
  }

  #span(piece) {
    const from = source(piece.step, piece.place);
    const span = make("span", { className: `token from-${from}`, tabIndex: -1 }, piece.text);
    if (piece.text.startsWith("\n")) span.classList.add("line-end");
    this.#pieces.set(span, piece);
    showInLegend(from);
    if (this.#current === null) this.#makeCurrent(span);
    return span;
  }

  #makeCurrent(span) {
    if (this.#current) this.#current.tabIndex = -1;
    this.#current = span;
    span.tabIndex = 0;
  }

  #point(target) {
    if (this.#pieces.has(target)) this.#show(target);
  }

  #leave(event) {
    // The card stays while the pointer is on it, so that its text can be selected and copied.
    if (event.relatedTarget?.closest?.("#card")) return;
    const focused = document.activeElement;
    if (this.#pieces.has(focused)) this.#show(focused);
    else hideCard();
  }

  #focus(target) {
    if (!this.#pieces.has(target)) return;
    this.#makeCurrent(target);
    this.#show(target);
  }

  #show(span) {
    const { step, place } = this.#pieces.get(span);
    const from = source(step, place);
    const origin = { from, name: from === "other" ? step.proposer : NAMES[from], names: NAMES };
    const mates = [...this.element.children].filter((one) => this.#pieces.get(one).step === step);
    showCard(span, step ? mates : [span], describe(step, this.#steps.get(step), origin));
  }

  #key(event) {
    if (event.key === "Escape") return hideCard();
    const next = this.#target(event.key, event.target);
    if (next === undefined) return;
    event.preventDefault();
    next?.focus();
  }

  /** The span that a key moves to, or null at the ends, or undefined for other keys. */
  #target(key, span) {
    const step = (one) => this.#pieces.get(one).step;
    const beyondStep = (to) => {
      let one = span;
      while (one && step(one) === step(span)) one = to(one);
      return one;
    };
    const before = (one) => one.previousElementSibling;
    const after = (one) => one.nextElementSibling;
    switch (key) {
      case "ArrowLeft":
        return before(span);
      case "ArrowRight":
        return after(span);
      case "ArrowUp":
        return beyondStep(before);
      case "ArrowDown":
        return beyondStep(after);
      case "Home":
        return this.element.firstElementChild;
      case "End":
        return this.element.lastElementChild;
      default:
        return undefined;
    }
  }
}
