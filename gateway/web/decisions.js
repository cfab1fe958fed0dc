/** The table of recent decisions. */

import { getJson } from "/web/client.js";
import { byId, figure, make, percent } from "/web/dom.js";
import { isPaused } from "/web/live.js";

const EVERY_MS = 3000;
const SHOWN = 50;
const KEPT = 1000; // all stored decisions, to find those of one request

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

async function refresh() {
  const only = byId("only-last").checked;
  let found;
  try {
    found = (await getJson(`/decisions?limit=${only ? KEPT : SHOWN}`)).decisions;
  } catch {
    return; // the header shows the state of the node
  }
  if (only) found = found.filter((decision) => last.includes(decision.request_id));
  const key = JSON.stringify([last, found.map((decision) => [decision.request_id, decision.decided_s, decision.outcome])]);
  if (key === shown) return;
  shown = key;
  byId("decisions").replaceChildren(...found.map(row));
  byId("no-decisions").hidden = found.length > 0;
}

/** What happened under a plan, or nothing while the request runs. */
function happened(outcome) {
  if (!outcome) return "";
  const accepted = `${outcome.accepted_tokens} of ${outcome.drafted_tokens} drafts accepted`;
  return [accepted, ...outcome.revisions.map((revision) => revision.reason)].join("; ");
}

/** The load of a worker. Servers without metrics do not report their KV blocks. */
function describeLoad({ running, waiting, kv_blocks_free: free, kv_blocks_total: total }) {
  const memory = total ? `, KV ${percent(1 - free / total)}` : "";
  return `${running} running, ${waiting} waiting${memory}`;
}

function row({ request_id: id, decided_s: at, plan, load, outcome }) {
  const time = new Date(at * 1e3);
  return make(
    "tr",
    last.includes(id) ? { className: "mine" } : {},
    make("td", {}, make("time", { dateTime: time.toISOString() }, time.toLocaleTimeString())),
    make("td", { title: id }, make("code", {}, id.slice(0, 8)), last.includes(id) ? " (yours)" : ""),
    make("td", {}, plan.policy),
    make("td", {}, plan.proposer ?? "none"),
    make("td", { className: "number" }, String(plan.max_draft_tokens)),
    make("td", { className: "number" }, figure(plan.price)),
    make("td", { className: "reason" }, plan.reason),
    make("td", { className: "reason" }, happened(outcome)),
    make("td", {}, describeLoad(load)),
  );
}
