/** Helpers that create elements and format numbers. */

export const byId = (id) => document.getElementById(id);

/** Create an element with properties and children (elements or strings). */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Format a number with at most three significant digits. */
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && Math.abs(value) < 0.01) return "<0.01";
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return String(Number(value.toFixed(digits)));
}

/** Format seconds as ms or s. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 1 ? `${figure(seconds * 1e3)} ms` : `${figure(seconds)} s`;
}

/** Format a latency in ms, so that all latencies have one unit. */
export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const ms = seconds * 1e3;
  return `${ms >= 1000 ? Math.round(ms).toLocaleString("en") : figure(ms)} ms`;
}

/** The time of a Unix time in seconds. */
export function clock(at_s) {
  const time = new Date(at_s * 1e3);
  return make("time", { dateTime: time.toISOString(), title: time.toLocaleString() }, time.toLocaleTimeString());
}

/** A link to the page of a request. */
export const link = (id) => make("a", { href: `/requests/${encodeURIComponent(id)}`, title: id }, make("code", {}, id.slice(0, 8)));

/**
 * Create a row of the table in a section, from the content of its cells. Narrow screens show rows as
 * cards, in which each cell has the name of its column. Explicit roles keep the table a table for
 * screen readers.
 */
export function cells(section, contents, properties = {}) {
  const headers = document.querySelectorAll(`${section} th`);
  const made = contents.map((content, index) => {
    const { textContent, className } = headers[index];
    return make("td", { role: "cell", className, "data-name": textContent }, ...[content].flat());
  });
  return make("tr", { role: "row", ...properties }, ...made);
}

/** A number of things, such as "1 token" or "1,200 tokens". */
export const count = (number, thing) => `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;

export const percent = (share) => `${Math.round(share * 100)}%`;

/** Whether a box shows its end, because the user has not scrolled up. */
export const isAtEnd = (box) => box.scrollTop + box.clientHeight >= box.scrollHeight - 24;

/** Change the content of a box, and scroll to its end unless the user has scrolled up. */
export function followEnd(box, change) {
  const follows = isAtEnd(box);
  change();
  if (follows) box.scrollTop = box.scrollHeight;
}

/** Create a button that runs a function. */
export function button(label, react, properties = {}) {
  const made = make("button", { type: "button", ...properties }, label);
  made.addEventListener("click", () => react(made));
  return made;
}

const COPIED_MS = 1500;

/** Create a button that copies the text that a function returns. */
export function copyButton(text, label = "Copy") {
  return button(label, async (made) => {
    await copy(text());
    made.textContent = "Copied";
    setTimeout(() => (made.textContent = label), COPIED_MS);
  }, { className: "copy" });
}

/** Copy a text. Browsers have a clipboard only on local and HTTPS pages. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", { value: text, className: "hidden" });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
