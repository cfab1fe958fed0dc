/** The table of recent decisions, and the time that their drafts saved. */

import { getJson } from "/web/client.js";
import { byId, figure, make, percent } from "/web/dom.js";
import { isPaused } from "/web/live.js";
import { describeMove } from "/web/moves.js";
import { showSaved } from "/web/saved.js";

const EVERY_MS = 3000;
const SHOWN = 50;
const KEPT = 1000; // all stored decisions, to find those of one request

const headers = document.querySelectorAll("#decided th");

let last = []; // ids of the last run's requests
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

/** Explain an empty table. Without drafts, the node has nothing to decide. */
export function explainNone(drafts) {
  const words = drafts ? "No decisions yet." : "The workers report no drafts, so the node has nothing to decide.";
  if (byId("no-decisions").textContent !== words) byId("no-decisions").textContent = words;
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
  if (only) found = found.filter((decision) => last.includes(decision.request_id));
  const key = JSON.stringify([last, found.map((decision) => [decision.request_id, decision.decided_s, decision.outcome, decision.moves.length, decision.path])]);
  if (key === shown) return;
  shown = key;
  byId("decisions").replaceChildren(...found.map(row));
  byId("causes").replaceChildren(...causes(found));
  byId("no-decisions").hidden = found.length > 0;
}

/** How often each cause decided, most frequent first. */
function causes(decisions) {
  const times = new Map();
  for (const { plan } of decisions) times.set(plan.cause, (times.get(plan.cause) ?? 0) + 1);
  const sorted = [...times].sort(([, a], [, b]) => b - a);
  return sorted.map(([cause, number]) => make("li", {}, make("strong", {}, `${number} ×`), ` ${cause.replaceAll("_", " ")}`));
}

/** What happened under a plan, and how the path to the client affects its request. */
function happened(outcome, moves, path) {
  const accepted = outcome ? [`${outcome.accepted_tokens} of ${outcome.drafted_tokens} drafts accepted`] : [];
  const revised = outcome ? outcome.revisions.map((revision) => revision.reason) : [];
  return [...accepted, ...revised, ...moves.map(describeMove), ...(path ? [path] : [])].join("; ");
}

/** The load of a worker. Servers without metrics do not report their KV blocks. */
function describeLoad({ running, waiting, kv_blocks_free: free, kv_blocks_total: total }) {
  const memory = total ? `, KV ${percent(1 - free / total)}` : "";
  return `${running} running, ${waiting} waiting${memory}`;
}

function row({ request_id: id, decided_s: at, plan, load, outcome, moves, path }) {
  const time = new Date(at * 1e3);
  const mine = last.includes(id);
  const cells = [
    [make("time", { dateTime: time.toISOString() }, time.toLocaleTimeString())],
    [make("code", { title: id }, id.slice(0, 8)), mine ? " (yours)" : ""],
    [plan.policy],
    [plan.proposer ?? "none"],
    [String(plan.max_draft_tokens)],
    [figure(plan.price)],
    [plan.reason],
    [happened(outcome, moves, path)],
    [describeLoad(load)],
  ];
  // Narrow screens show rows as cards, in which each cell has the name of its column. Explicit roles
  // keep the table a table for screen readers.
  const row = cells.map((content, index) => {
    const { textContent, className } = headers[index];
    return make("td", { role: "cell", className, "data-name": textContent }, ...content);
  });
  return make("tr", { role: "row", className: mine ? "mine" : "" }, ...row);
}
