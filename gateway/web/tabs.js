/** The tabs that choose the kind of request. */

import { byId } from "/web/dom.js";

/** The kinds of requests, in the order of their tabs. */
const KINDS = ["chat", "completion", "compare"];

const offered = () => KINDS.filter((one) => !byId(`tab-${one}`).hidden);

/** The chosen kind. */
export let kind = "completion";

let hasChosen = false; // whether the user has chosen a tab
let changed = () => {};

/** Set up the tabs. `onChange()` is called after each change of the kind. */
export function setUp(onChange) {
  changed = onChange;
  for (const one of KINDS) byId(`tab-${one}`).addEventListener("click", () => pick(one));
  document.querySelector("[role=tablist]").addEventListener("keydown", move);
}

/**
 * Show the tabs of the kinds that the models support, as `{kind: boolean}`, and choose the preferred
 * one unless the user has chosen a tab.
 */
export function offer(supported, preferred) {
  for (const [one, shown] of Object.entries(supported)) byId(`tab-${one}`).hidden = !shown;
  if (!offered().includes(kind) || !hasChosen) choose(preferred);
}

function pick(chosen) {
  hasChosen = true;
  choose(chosen);
}

/** Choose a kind, and show its panel. */
function choose(chosen) {
  kind = chosen;
  for (const one of KINDS) {
    const tab = byId(`tab-${one}`);
    tab.setAttribute("aria-selected", String(one === kind));
    tab.tabIndex = one === kind ? 0 : -1;
    byId(`panel-${one}`).hidden = one !== kind;
  }
  document.body.dataset.kind = kind;
  changed();
}

function move(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  const kinds = offered();
  pick(kinds[(kinds.indexOf(kind) + step + kinds.length) % kinds.length]);
  byId(`tab-${kind}`).focus();
}
