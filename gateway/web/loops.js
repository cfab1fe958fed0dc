/** Loops at the end of texts, which small models write and n-grams predict perfectly. */

const LEAST_TIMES = 3;
const LEAST_TOKENS = 24; // a shorter repetition, such as a row of dots, can be meant

/**
 * Return the number of tokens before a loop, or of all tokens without a loop. A loop is a sequence
 * that the end of the text repeats at least three times.
 */
export function loopStart(tokens) {
  const most = Math.floor(tokens.length / LEAST_TIMES);
  for (let period = 1; period <= most; period++) {
    let start = tokens.length - period;
    while (start > 0 && tokens[start - 1] === tokens[start - 1 + period]) start -= 1;
    const length = tokens.length - start;
    if (length >= Math.max(LEAST_TIMES * period, LEAST_TOKENS)) return start;
  }
  return tokens.length;
}
