/** The metrics of the node, from Prometheus' text format. */

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/** Return the samples of a text as `{name, labels, value}`. */
export function samplesOf(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match) continue;
    const [, name, labels = "", value] = match;
    const pairs = [...labels.matchAll(LABEL)].map(([, label, quoted]) => [label, quoted.replace(/\\[n"\\]/g, (one) => ESCAPES[one])]);
    found.push({ name, labels: Object.fromEntries(pairs), value: Number(value) });
  }
  return found;
}
