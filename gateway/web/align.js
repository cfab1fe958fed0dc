/**
 * Assigns parts of the text to tokens. The text of the chunks is authoritative, and the texts of
 * single tokens only determine the cuts. The texts differ if a character is split into several tokens
 * (each is U+FFFD alone), if text is held back, or if the tokenizer strips a space.
 */

/** Cuts streamed text into pieces `{text, step, place}`, whose joined texts are that text. */
export class Aligner {
  #waiting = []; // tokens whose text has not arrived, as {text, step, place}

  /** Add the text and steps of a chunk; return its pieces. */
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
      // The server holds back the rest of this token.
      waiting[0] = { ...first, text: first.text.slice(text.length) };
      return { ...first, text };
    }
    return this.#joint(text);
  }

  /** The text of several tokens together, up to a later token that occurs in the text. */
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
