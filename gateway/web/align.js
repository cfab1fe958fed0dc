/**
 * Which part of the text is which token. The text of the chunks is what counts; the texts of single
 * tokens only say where to cut it. They differ where a character is spread over several tokens
 * (each shows as U+FFFD alone), where text is held back, and where a tokenizer strips a space.
 */

const KNOWN = new Set(["ngram", "draft_model", "sparse_self", "grammar"]);

/** Where the token at a place of a step came from. */
export function source(step, place) {
  if (step === null) return "untold";
  if (place >= step.accepted) return "target";
  return KNOWN.has(step.proposer) ? step.proposer : "other";
}

/** Cuts text as it arrives into pieces `{text, step, place}` that joined are that text. */
export class Aligner {
  #waiting = []; // tokens whose text is still to come, as {text, step, place}

  /** Take a chunk's text and steps; return its pieces. */
  add(text, steps = []) {
    for (const step of steps) {
      step.tokens.forEach((token, place) => this.#waiting.push({ text: token, step, place }));
    }
    const pieces = [];
    while (text) {
      const piece = this.#next(text);
      pieces.push(piece);
      text = text.slice(piece.text.length);
    }
    return pieces;
  }

  #next(text) {
    const waiting = this.#waiting;
    while (waiting.length && !waiting[0].text) waiting.shift();
    if (!waiting.length) return { text, step: null, place: 0 };
    const first = waiting[0];
    if (text.startsWith(first.text)) return waiting.shift();
    if (first.text.startsWith(text)) {
      // The rest of this token is held back.
      waiting[0] = { ...first, text: first.text.slice(text.length) };
      return { ...first, text };
    }
    return this.#joint(text);
  }

  /** Text that the first tokens give together: up to where a later one stands by itself. */
  #joint(text) {
    const waiting = this.#waiting;
    const first = waiting[0];
    for (let later = 1; later < waiting.length; later++) {
      const token = waiting[later].text;
      const at = token.includes("\ufffd") || !token ? -1 : text.indexOf(token);
      if (at < 0) continue;
      waiting.splice(0, later);
      return at === 0 ? waiting.shift() : { ...first, text: text.slice(0, at) };
    }
    waiting.length = 0;
    return { ...first, text };
  }
}
