/** The tabs that choose the kind of request. */

import { byId } from "/web/dom.js";

/** The kinds of requests, in the order of their tabs. */
const KINDS = ["completion", "compare", "chat"];
const RUN = { completion: "Generate", compare: "Compare", chat: "Generate" };

const offered = () => KINDS.filter((one) => !byId(`tab-${one}`).hidden);

/** The chosen kind. */
export let kind = "completion";

/** Set up the tabs. */
export function setUp() {
  for (const one of KINDS) byId(`tab-${one}`).addEventListener("click", () => choose(one));
  document.querySelector("[role=tablist]").addEventListener("keydown", move);
}

/** Show the tabs of the kinds that the model supports, as `{kind: boolean}`. */
export function offer(supported) {
  for (const [one, shown] of Object.entries(supported)) byId(`tab-${one}`).hidden = !shown;
  if (!offered().includes(kind)) choose("completion");
}

/** Choose a kind: show its prompt and its output. */
export function choose(chosen) {
  kind = chosen;
  for (const one of KINDS) {
    const tab = byId(`tab-${one}`);
    tab.setAttribute("aria-selected", String(one === kind));
    tab.tabIndex = one === kind ? 0 : -1;
  }
  byId("panel-prompt").setAttribute("aria-labelledby", `tab-${kind === "chat" ? "completion" : kind}`);
  byId("panel-prompt").hidden = kind === "chat";
  byId("panel-chat").hidden = byId("conversation").hidden = kind !== "chat";
  byId("run").textContent = RUN[kind];
  document.body.dataset.kind = kind;
  showOutput();
}

/** Show the output of the chosen kind. */
export function showOutput() {
  for (const one of ["completion", "chat"]) byId(`said-${one}`).hidden = one !== kind;
  byId("output").hidden = kind === "compare";
  byId("comparison").hidden = kind !== "compare";
  byId("empty").hidden = kind === "compare" || byId(`said-${kind}`).hasChildNodes();
  byId("stats").hidden = byId("stats").dataset.kind !== kind;
  byId("reason").hidden = byId("stats").hidden || !byId("reason").textContent;
}

function move(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  const kinds = offered();
  choose(kinds[(kinds.indexOf(kind) + step + kinds.length) % kinds.length]);
  byId(`tab-${kind}`).focus();
}
