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
  #samples = [];
  #pointed = null; // where the pointer is, from 0 at the left edge to 1, or null

  constructor({ title, hint, lines, show, least = 0, most = null, size = "" }) {
    Object.assign(this, { title, lines, show, least, most });
    this.svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    const grid = element("path", { class: "grid", d: `M0 .5H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT - 0.5}H${WIDTH}` });
    this.area = element("path", { class: "area" });
    this.paths = lines.map((_, index) => element("path", { class: `line line-${index}` }));
    this.cursor = element("path", { class: "cursor" });
    this.svg.append(grid, this.area, ...this.paths, this.cursor);
    this.value = make("span", { className: "value" });
    this.bound = make("span", { className: "bound", "aria-hidden": "true" });
    const plot = make("div", { className: "plot" }, this.svg, this.bound);
    const ticks = ["2 min ago", "1 min ago", "now"].map((words) => make("span", {}, words));
    this.element = make(
      "figure",
      { className: size },
      make("figcaption", {}, make("span", { className: "name", title: hint }, title), this.value),
      plot,
      make("div", { className: "axis", "aria-hidden": "true" }, ...ticks),
    );
    plot.addEventListener("pointermove", ({ clientX }) => {
      const { left, width } = plot.getBoundingClientRect();
      this.#point((clientX - left) / width);
    });
    plot.addEventListener("pointerleave", () => this.#point(null));
    this.update([]);
  }

  /** Draw samples, oldest first, with the last sample at the right edge. */
  update(samples) {
    this.#samples = samples;
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
    this.svg.setAttribute("aria-label", `${this.title}: ${this.#spoken(latest)}`);
    this.#say();
  }

  #point(place) {
    this.#pointed = place;
    this.#say();
  }

  /** Show the values under the pointer, or else the latest ones. */
  #say() {
    const end_s = this.#samples.at(-1)?.at_s ?? 0;
    const sample = this.#pointed === null ? this.#samples.at(-1) : nearest(this.#samples, end_s - (1 - this.#pointed) * SPAN_S);
    const ago_s = Math.round(end_s - (sample?.at_s ?? end_s));
    const x = (WIDTH * (1 - ago_s / SPAN_S)).toFixed(1);
    this.cursor.setAttribute("d", this.#pointed === null || !sample ? "" : `M${x} 0V${HEIGHT}`);
    const when = this.#pointed === null ? [] : [make("span", { className: "when" }, sample ? `${ago_s} s ago` : "no sample")];
    this.value.replaceChildren(...when, ...this.#keys(this.lines.map(({ of }) => (sample ? of(sample) : null))));
  }

  #keys(values) {
    return this.#named(values, "–").map(([words, index]) => make("span", { className: `key key-${index}` }, words));
  }

  #spoken(values) {
    return this.#named(values, "no data yet").map(([words]) => words).join(", ");
  }

  /** The names and values of the lines, with their index. A line equal to the one before is left out. */
  #named(values, unknown) {
    const words = values.map((value) => (value === null ? unknown : this.show(value)));
    const named = words.map((word, index) => [`${this.lines[index].name} ${word}`.trim(), index]);
    return named.filter((_, index) => words[index] !== words[index - 1]);
  }
}

/** Return the sample next to a time, or null within a gap. */
function nearest(samples, at_s) {
  const distance = (sample) => Math.abs(sample.at_s - at_s);
  const found = samples.reduce((best, one) => (best && distance(best) <= distance(one) ? best : one), null);
  return found && distance(found) <= GAP_S ? found : null;
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
