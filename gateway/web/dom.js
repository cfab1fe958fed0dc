/** Small helpers for making elements and numbers people can read. */

export const byId = (id) => document.getElementById(id);

/** Make an element with properties and children (elements or texts). */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** A number with three digits that matter, at most. */
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && Math.abs(value) < 0.01) return "<0.01";
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return String(Number(value.toFixed(digits)));
}

/** Seconds as ms or s. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 1 ? `${figure(seconds * 1e3)} ms` : `${figure(seconds)} s`;
}

export const percent = (share) => `${Math.round(share * 100)} %`;
