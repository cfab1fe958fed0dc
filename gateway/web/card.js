/** The card beside a token: the drafts of its step, their fate, and the reason. */

import { byId, figure, make } from "/web/dom.js";

let owner = null; // the span that the card describes
let marked = []; // the tokens of its step

/** Return the card's content for a step, or for an unknown step if the step is null. */
export function describe(step, number, { from, name, names }) {
  if (step === null) return [heading("Unknown step", "unknown"), make("p", {}, "The worker did not report its steps.")];
  const drafted = names[step.proposer] ?? step.proposer;
  const parts = [heading(`Step ${number}`, from, name)];
  if (step.drafts.length) parts.push(drafts(step));
  parts.push(make("p", { className: "why" }, step.reason));
  parts.push(make("p", { className: "price" }, facts(step, drafted)));
  return parts;
}

function heading(title, from, name) {
  const source = name ? [make("span", { className: `token from-${from}` }, name)] : [];
  return make("p", { className: "title" }, make("strong", {}, title), ...source);
}

function facts(step, drafted) {
  const tokens = step.tokens.length === 1 ? "1 token" : `${step.tokens.length} tokens`;
  const offer = step.offered ? `, ${step.offered} drafted by ${drafted}` : "";
  return `${tokens} added${offer}; slot price ${figure(step.price)}`;
}

/** Return which drafts were accepted, because they equal the step's first tokens in order. */
function verdicts(step) {
  let taken = 0;
  return step.drafts.map((draft) => {
    const good = taken < step.accepted && draft === step.tokens[taken];
    if (good) taken += 1;
    return good;
  });
}

function drafts(step) {
  const good = verdicts(step);
  const rows = step.drafts.map((draft, slot) => {
    const chance = step.survivals[slot];
    const bar = make("meter", { min: 0, max: 1, value: chance ?? 0, "aria-hidden": "true" });
    return make(
      "tr",
      { className: good[slot] ? "accepted" : "rejected" },
      make("td", {}, good[slot] ? "✓ accepted" : "✗ rejected"),
      make("td", {}, make("code", {}, visible(draft))),
      make("td", {}, bar),
      make("td", { className: "number" }, chance === undefined ? "–" : figure(chance)),
    );
  });
  const head = ["", "draft", "survival", ""].map((text) => make("th", { scope: "col" }, text));
  return make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
}

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·");

/** Show content beside a token. `mates` are the tokens of its step. */
export function showCard(span, mates, content) {
  hideCard();
  owner = span;
  marked = mates;
  for (const mate of mates) mate.classList.add("same-step");
  const card = byId("card");
  card.replaceChildren(...content);
  card.hidden = false;
  span.setAttribute("aria-describedby", "card");
  place();
}

/** Hide the card. */
export function hideCard() {
  owner?.removeAttribute("aria-describedby");
  for (const mate of marked) mate.classList.remove("same-step");
  owner = null;
  marked = [];
  byId("card").hidden = true;
}

function place() {
  const card = byId("card");
  const at = owner.getClientRects()[0] ?? owner.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = card;
  const page = document.documentElement;
  const left = Math.max(8, Math.min(at.left, page.clientWidth - width - 8));
  const below = at.bottom + 6;
  const top = below + height > page.clientHeight && at.top - height - 6 > 0 ? at.top - height - 6 : below;
  card.style.left = `${left + window.scrollX}px`;
  card.style.top = `${top + window.scrollY}px`;
}

byId("card").addEventListener("mouseleave", hideCard);
// Several boxes with tokens scroll, and scroll events do not bubble.
document.addEventListener("scroll", () => owner && place(), { capture: true });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideCard();
});
