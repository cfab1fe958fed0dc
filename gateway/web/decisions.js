/** The table of recent decisions, and the time that their drafts saved. */

import { causeOf, groups } from "/web/causes.js";
import { getJson } from "/web/client.js";
import { button, byId, cells, clock, figure, link, make, percent } from "/web/dom.js";
import { isPaused } from "/web/live.js";
import { describeMove } from "/web/moves.js";
import { showSaved } from "/web/saved.js";

const EVERY_MS = 3000;
const SHOWN = 50;
const KEPT = 1000; // all stored decisions, to find those of one request

let last = []; // ids of the last run's requests
let listed = []; // the decisions of the table, of all causes
let chosen = null; // the cause whose decisions are shown, or null for all
let shown = ""; // key of the rows in the table, to skip updates without news

/** Refresh the table regularly while the page is visible. */
export function setUp() {
  byId("only-last").addEventListener("change", refresh);
  setInterval(() => document.hidden || isPaused() || refresh(), EVERY_MS);
  refresh();
}

/** Mark and show the decisions of a run's requests. */
export function follow(...requestIds) {
  last = requestIds;
  byId("only-last").disabled = false;
  refresh();
}

async function refresh() {
  const only = byId("only-last").checked;
  let found;
  try {
    const { decisions, drafts } = await getJson(`/decisions?limit=${only ? KEPT : SHOWN}`);
    showSaved(drafts);
    found = decisions;
  } catch {
    return; // the header shows the state of the node
  }
  listed = only ? found.filter((decision) => last.includes(decision.request_id)) : found;
  const key = JSON.stringify([last, listed.map((one) => [one.request_id, one.decided_s, one.outcome, one.moves.length, one.path])]);
  if (key === shown) return;
  shown = key;
  draw();
}

/** Show the decisions of the chosen cause, or all. */
function draw() {
  if (!listed.some((one) => causeOf(one) === chosen)) chosen = null;
  const focused = document.activeElement?.dataset.cause;
  byId("decisions").replaceChildren(...listed.filter((one) => chosen === null || causeOf(one) === chosen).map(row));
  byId("causes").replaceChildren(...causes(listed));
  if (focused) [...byId("causes").querySelectorAll("button")].find((one) => one.dataset.cause === focused)?.focus();
  byId("no-decisions").hidden = listed.length > 0;
}

/** A button for each cause, which shows only its decisions. */
function causes(decisions) {
  return groups(decisions).map(({ cause, words }) => {
    const pressed = String(cause === chosen);
    const pick = () => {
      chosen = cause === chosen ? null : cause;
      draw();
    };
    return make("li", {}, button(words, pick, { "aria-pressed": pressed, "data-cause": cause }));
  });
}

/** What happened under a plan, and how the path to the client affects its request. */
function happened(outcome, moves, path) {
  const drafted = outcome?.drafted_tokens ? `${outcome.accepted_tokens} of ${outcome.drafted_tokens} drafts accepted` : "no drafts";
  const accepted = outcome ? [drafted] : [];
  const revised = outcome ? outcome.revisions.map((revision) => revision.reason) : [];
  return [...accepted, ...revised, ...moves.map(describeMove), ...(path ? [path] : [])].join("; ");
}

/** The load of a worker. Servers without metrics do not report their KV blocks. */
function describeLoad({ running, waiting, kv_blocks_free: free, kv_blocks_total: total }) {
  const memory = total ? `, KV ${percent(1 - free / total)}` : "";
  return `${running} running, ${waiting} waiting${memory}`;
}

function row({ request_id: id, decided_s: at, plan, load, outcome, moves, path }) {
  const mine = last.includes(id);
  const contents = [
    clock(at),
    [link(id), mine ? " (yours)" : ""],
    plan.policy,
    plan.proposer ?? "none",
    String(plan.max_draft_tokens),
    figure(plan.price),
    plan.reason,
    happened(outcome, moves, path),
    describeLoad(load),
  ];
  return cells("#decided", contents, { className: mine ? "mine" : "" });
}
