/** Line charts of the last minutes, as SVG. */

import { make } from "/web/dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 56;

/** Seconds that a chart spans. */
export const SPAN_S = 120;

const GAP_S = 3.5; // the node samples each second, so a longer pause means missing samples

/**
 * One chart.
 *
 * `lines` are `{name, of}`: the name of a line, "" for a single one, and a function that returns its
 * value in a sample, or null. `show` formats a value, `least` is the smallest upper bound of the
 * axis, `most` fixes that bound, `size` is a CSS class.
 */
export class Chart {
  constructor({ title, hint, lines, show, least = 0, most = null, size = "" }) {
    Object.assign(this, { title, lines, show, least, most });
    this.svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    const grid = element("path", { class: "grid", d: `M0 .5H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT - 0.5}H${WIDTH}` });
    this.area = element("path", { class: "area" });
    this.paths = lines.map((_, index) => element("path", { class: `line line-${index}` }));
    this.svg.append(grid, this.area, ...this.paths);
    this.value = make("span", { className: "value" });
    this.bound = make("span", { className: "bound", "aria-hidden": "true" });
    this.element = make(
      "figure",
      { title: hint, className: size },
      make("figcaption", {}, make("span", { className: "name" }, title), this.value),
      make("div", { className: "plot" }, this.svg, this.bound),
    );
    this.update([]);
  }

  /** Draw samples, oldest first, with the last sample at the right edge. */
  update(samples) {
    const series = this.lines.map(({ of }) => samples.map(of));
    const known = series.flat().filter((value) => value !== null);
    const most = this.most ?? roundUp(Math.max(this.least, ...known));
    const end_s = samples.at(-1)?.at_s ?? 0;
    const spot = ({ at_s }, value) => [
      WIDTH * (1 - (end_s - at_s) / SPAN_S),
      (HEIGHT - 2) * (1 - Math.min(value / most, 1)) + 1,
    ];
    const parts = series.map((values) => unbroken(samples, values).map((part) => part.map((one) => spot(...one))));
    parts.forEach((spots, index) => this.paths[index].setAttribute("d", spots.map(path).join("")));
    this.area.setAttribute("d", this.lines.length === 1 ? parts[0].map(area).join("") : "");
    const latest = series.map((values) => values.at(-1) ?? null);
    this.bound.textContent = this.show(most);
    this.#say(latest);
  }

  #say(latest) {
    const words = latest.map((value) => (value === null ? "–" : this.show(value)));
    this.value.replaceChildren(
      ...words.map((word, index) =>
        make("span", { className: `key key-${index}` }, this.lines[index].name ? `${this.lines[index].name} ${word}` : word),
      ),
    );
    const values = words.map((word, index) => `${this.lines[index].name} ${word === "–" ? "no data yet" : word}`.trim());
    this.svg.setAttribute("aria-label", `${this.title}: ${values.join(", ")}`);
  }
}

function element(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** Round up to 1, 2 or 5 times a power of ten. */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((digit) => digit * power).find((bound) => bound >= value * (1 - 1e-9));
}

const at = ([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`;

/** Divide samples and values into parts without missing values and without gaps in time. */
function unbroken(samples, values) {
  const parts = [];
  let before_s = -Infinity;
  samples.forEach((sample, index) => {
    if (values[index] === null) return;
    if (sample.at_s - before_s > GAP_S) parts.push([]);
    parts.at(-1).push([sample, values[index]]);
    before_s = sample.at_s;
  });
  return parts;
}

/** A line through spots. A single spot becomes a dot. */
const path = (spots) => `M${spots.map(at).join("L")}${spots.length === 1 ? "h.1" : ""}`;

/** The area below a line. */
function area(spots) {
  if (spots.length < 2) return "";
  return `M${at([spots[0][0], HEIGHT])}L${spots.map(at).join("L")}L${at([spots.at(-1)[0], HEIGHT])}Z`;
}
