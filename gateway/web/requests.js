/** The latest requests of the node, and the page of one of them. */

import { showAccount } from "/web/account.js";
import { causeOf } from "/web/causes.js";
import { getJson } from "/web/client.js";
import { byId, cells, clock, copyButton, count, duration, figure, link, make, milliseconds, percent } from "/web/dom.js";
import { listMoves } from "/web/moves.js";

const EVERY_MS = 3000;
const LIMIT = 100;
const FILTERS = ["q", "model", "tenant", "worker", "ending"];
const MOST_SPANS = 24;

/** The phases of a request in words. */
const PHASES = { queue: "Queue of the gateway", "worker.queue": "Queue of the worker", prefill: "Prefill", decode: "Decode", "first token": "First token", stream: "Stream" };

const id = decodeURIComponent(location.pathname.replace(/^\/requests\/?/, "").replace(/\/$/, ""));

let shown = ""; // key of what the page shows, to skip updates without news
let asked = 0; // number of the latest question, because answers may overtake each other

/** How a request ended, with its status if that is an error. */
const endingOf = ({ ending, status, error }) => [ending, ...(status >= 400 ? [`(${status}${error ? ` ${error}` : ""})`] : [])].join(" ");

const draftsOf = ({ drafted_tokens: drafted, accepted_tokens: accepted }) =>
  drafted ? `${accepted} of ${drafted} (${percent(accepted / drafted)})` : "–";

/** The model that the client has asked for, with the one that responds in its place, if any. */
const modelOf = ({ model, requested_model: requested }) => (requested ? `${requested} → ${model}` : model);

/** The id of the batch to whose lines a request belongs, or null. */
const batchOf = ({ client_id: name }) => /^(batch_[0-9a-f]{24})-/.exec(name)?.[1] ?? null;

// --- The list ------------------------------------------------------------------------------------

function row(record) {
  return cells("#listed", [
    clock(record.started_s),
    link(record.request_id),
    modelOf(record) || "–",
    (record.tenant || "–") + (batchOf(record) ? " (batch)" : ""),
    record.workers.join(", ") || "–",
    endingOf(record),
    milliseconds(record.ttft_s),
    milliseconds(record.tpot_s),
    String(record.output_tokens),
    draftsOf(record),
    duration(record.seconds),
  ]);
}

const query = () => new URLSearchParams(FILTERS.map((name) => [name, byId(`filter-${name}`).value.trim()]).filter(([, value]) => value));

/** Offer the values of a filter, and keep the chosen one, even if no request has it any more. */
function offer(name, values) {
  const menu = byId(`filter-${name}`);
  const chosen = menu.value;
  const options = ["", ...new Set([...values, ...(chosen ? [chosen] : [])])];
  if (menu.options.length === options.length && options.every((one, index) => menu.options[index].value === one)) return;
  menu.replaceChildren(...options.map((value) => make("option", { value }, value || "all")));
  menu.value = chosen;
}

async function list() {
  asked += 1;
  const number = asked;
  const wanted = query();
  const { records, models, tenants, workers, endings } = await getJson(`/records?${new URLSearchParams([...wanted, ["limit", LIMIT]])}`);
  if (number !== asked) return;
  history.replaceState(null, "", wanted.size ? `/requests?${wanted}` : "/requests");
  Object.entries({ model: models, tenant: tenants, worker: workers, ending: endings }).forEach(([name, values]) => offer(name, values));
  const key = JSON.stringify(records.map((one) => [one.client_id, one.started_s.toFixed(0), one.ending, one.output_tokens]));
  if (key === shown) return;
  shown = key;
  byId("requests").replaceChildren(...records.map(row));
  byId("listed-table").hidden = records.length === 0;
  const words = wanted.size ? "No request matches." : "No requests yet.";
  byId("number").textContent = records.length ? `${count(records.length, "request")}${records.length === LIMIT ? ", the latest" : ""}` : words;
}

function setUpList() {
  byId("listed").hidden = false;
  const given = new URLSearchParams(location.search);
  for (const name of FILTERS) {
    const value = given.get(name) ?? "";
    if (name !== "q") offer(name, value ? [value] : []);
    byId(`filter-${name}`).value = value;
    byId(`filter-${name}`).addEventListener("input", () => refresh(list));
  }
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  setInterval(() => document.hidden || refresh(list), EVERY_MS);
  return refresh(list);
}

// --- One request ---------------------------------------------------------------------------------

/** The facts of a request by their names. Those that it does not have are null. */
function facts(record) {
  const some = (value, text = String(value)) => (value ? text : null);
  return {
    Ending: endingOf(record),
    Model: record.model || null,
    "Requested model": record.requested_model && `${record.requested_model} (${record.fallback.replaceAll("_", " ")})`,
    Batch: batchOf(record),
    Tenant: record.tenant || null,
    Workers: record.workers.join(", ") || null,
    Endpoint: record.endpoint,
    Begun: new Date(record.started_s * 1e3).toLocaleString(),
    Duration: duration(record.seconds),
    TTFT: some(record.ttft_s !== null, milliseconds(record.ttft_s)),
    TPOT: some(record.tpot_s !== null, milliseconds(record.tpot_s)),
    "Prompt tokens": `${record.prompt_tokens}${record.cached_tokens ? `, ${record.cached_tokens} cached` : ""}`,
    "Output tokens": String(record.output_tokens),
    "Accepted drafts": draftsOf(record),
    "Time saved by drafts": some(record.saved_s, `${record.saved_s < 0 ? "−" : ""}${duration(Math.abs(record.saved_s))}`),
    Cost: some(record.cost_usd !== null, `${Number(record.cost_usd?.toPrecision(3))} USD`),
    Resumes: some(record.resumes),
    Preemptions: some(record.preemptions),
    "x-request-id": record.client_id === record.request_id ? null : record.client_id,
    Trace: record.trace_id,
  };
}

function phases(spans, seconds) {
  const most = Math.max(seconds, ...spans.map((span) => span.end_s), 1e-9);
  const several = new Set(spans.map((span) => span.choice)).size > 2;
  return spans.slice(0, MOST_SPANS).map(({ name, begin_s: begin, end_s: end, choice }) => {
    const bar = make("span", { className: "bar-of-phase" });
    bar.style.left = `${(100 * Math.max(begin, 0)) / most}%`;
    bar.style.width = `${(100 * Math.max(end - begin, 0)) / most}%`;
    const track = make("span", { className: "phase-track", "aria-hidden": "true" }, bar);
    const words = `${PHASES[name] ?? name}${several && choice !== null ? `, choice ${choice}` : ""}`;
    return make("li", {}, make("span", {}, words), track, make("span", { className: "number" }, duration(end - begin)));
  });
}

function decision(one) {
  const { plan, request, load, route, phases: divided, outcome } = one;
  const words = [];
  if (plan.proposer) words.push(`Up to ${count(plan.max_draft_tokens, "draft token")} per step by ${plan.proposer}`);
  if (plan.price !== null) words.push(`slot price ${figure(plan.price)}`);
  words.push(`speculation ${plan.mode}`, `${load.running} running`, `${load.waiting} waiting`, `${count(request.prompt_tokens, "prompt token")}`);
  const lines = [
    ["Policy", plan.policy],
    ["Cause", causeOf(one)],
    ["Reason", plan.reason],
    ["Inputs", words.join(", ")],
    ["Route", route && `${route.policy}: ${route.reason}`],
    ["Prompt and output", divided && `${divided.policy}: ${divided.reason}`],
    ["Other model", one.fallback],
    ["Client", one.path],
    ["Outcome", outcome && `${outcome.accepted_tokens} of ${count(outcome.drafted_tokens, "draft")} accepted in ${count(outcome.spec_steps, "step")} with drafts`],
    ...(outcome?.revisions ?? []).map((revision) => [`After ${count(revision.output_tokens, "token")}`, revision.reason]),
  ].filter(([, text]) => text);
  const list = make("dl", { className: "facts-list" }, ...lines.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text))));
  return make("li", {}, make("h3", {}, clock(one.decided_s), ` on ${one.worker_id}`), list);
}

function steps(list, { output_tokens: tokens, accepted_tokens: accepted, drafted_tokens: drafted }) {
  byId("steps-section").hidden = drafted === 0;
  byId("steps-summary").textContent = `${count(tokens, "output token")} took ${count(tokens - accepted, "step")}; ${accepted} of ${count(drafted, "draft")} accepted.${list.length ? " The first steps with drafts, as accepted/drafted:" : ""}`;
  byId("steps").replaceChildren(
    ...list.map(([offered, taken]) => make("li", { className: taken === offered ? "whole" : taken ? "part" : "none" }, `${taken}/${offered}`)),
  );
}

async function show() {
  const { record, spans, steps: listed, decisions } = await getJson(`/records/${encodeURIComponent(id)}`);
  byId("problem").hidden = true;
  const entries = Object.entries(facts(record)).filter(([, text]) => text !== null && text !== "");
  byId("facts").replaceChildren(...entries.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text))));
  byId("error").hidden = !record.reason;
  byId("error").textContent = record.reason;
  byId("phases").replaceChildren(...phases(spans, record.seconds));
  byId("phases-section").hidden = spans.length === 0;
  byId("hidden-phases").hidden = spans.length <= MOST_SPANS;
  byId("hidden-phases").textContent = `${count(spans.length - MOST_SPANS, "further phase")}`;
  byId("decided").replaceChildren(...decisions.map(decision));
  byId("no-decision").hidden = decisions.length > 0;
  steps(listed, record);
  listMoves(decisions.flatMap((one) => one.moves.map((move) => ({ request_id: one.request_id, move }))));
  return record.ending !== "running";
}

async function setUpRequest() {
  byId("one").hidden = false;
  byId("one-title").replaceChildren("Request ", make("code", {}, id));
  byId("one-bar").append(copyButton(() => id));
  document.title = `Request ${id.slice(0, 8)} – Draftgate`;
  while ((await refresh(show)) === false) await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
}

/** Run what shows the page, and show its error. Returns its result. */
async function refresh(work) {
  try {
    const found = await work();
    byId("problem").hidden = true;
    return found;
  } catch (error) {
    byId("problem").textContent = error.message;
    byId("problem").hidden = false;
    return null;
  }
}

if ((await showAccount()).role !== null) await (id ? setUpRequest() : setUpList());
