/** The views for operators: models, workers and upstreams, the queue, usage and quotas. */

import { showAccount } from "/web/account.js";
import { getHealth, getJson, getText } from "/web/client.js";
import { byId, cells, duration, make, percent } from "/web/dom.js";
import { samplesOf } from "/web/prometheus.js";

const EVERY_MS = 5000;
const ALL = "all requests"; // the name of the only tenant of a node without API keys

const byText = (a, b) => a.localeCompare(b, "en", { numeric: true });
const whole = (value) => Math.round(value).toLocaleString("en");

/** Show the rows of a table, or words without rows. */
function fill(section, rows, none) {
  const key = JSON.stringify(rows);
  const element = byId(section);
  if (element.dataset.shown === key) return;
  element.dataset.shown = key;
  element.querySelector("tbody").replaceChildren(...rows.map((row) => cells(`#${section}`, row)));
  element.querySelector(".scroll").hidden = rows.length === 0;
  element.querySelector(".none").hidden = rows.length > 0;
  element.querySelector(".none").textContent = none;
}

// --- Models and workers --------------------------------------------------------------------------

/** The state of a model, by the states of its workers. Upstreams do not say which models they run. */
function stateOf(model, workers) {
  const own = workers.filter((one) => [model.id, model.parent, ""].includes(one.model));
  const ready = own.filter((one) => one.status === "ok");
  const sum = (name) => own.reduce((total, one) => total + one[name], 0);
  if (!own.length) return ["–", "–", "–", "–"];
  const state = ready.length ? "ready" : own[0].status;
  return [state, `${ready.length} of ${own.length}`, whole(sum("running")), whole(sum("waiting"))];
}

async function showServers() {
  const [{ data }, { workers }, health] = await Promise.all([getJson("/v1/models"), getJson("/workers"), getHealth()]);
  const reasons = new Map(health.workers.map((one) => [one.id, one.reason ?? ""]));
  const models = data.map((one) => [
    one.id + (one.simulated ? " (simulator)" : ""),
    ...stateOf(one, workers),
    one.max_model_len ? `${whole(one.max_model_len)} tokens` : "–",
    one.proposers?.join(", ") || "–",
  ]);
  fill("models", models, "No models.");
  workers.sort((a, b) => byText(a.worker_id, b.worker_id));
  const servers = workers.map((one) => [
    one.worker_id,
    one.model || "–",
    reasons.get(one.worker_id) && one.status === "ok" ? "paused" : one.status,
    one.role,
    whole(one.running),
    whole(one.waiting),
    one.kv_usage === null ? "–" : percent(one.kv_usage),
    reasons.get(one.worker_id) ?? "",
  ]);
  fill("servers", servers, "No workers.");
}

// --- Tenants -------------------------------------------------------------------------------------

/** The sum of a metric by the values of labels, which a space joins. */
function sums(samples, metric, ...labels) {
  const found = new Map();
  for (const { name, labels: given, value } of samples) {
    if (name !== metric) continue;
    const key = JSON.stringify(labels.map((label) => given[label] ?? ""));
    found.set(key, (found.get(key) ?? 0) + value);
  }
  return [...found].map(([key, value]) => [JSON.parse(key), value]).sort(([a], [b]) => byText(a.join(" "), b.join(" ")));
}

function usage(samples, hasKeys) {
  const tenants = new Map();
  const of = (name) => {
    if (!tenants.has(name)) tenants.set(name, { tokens: 0, cost: null, unknown: 0, saved: 0, refused: 0 });
    return tenants.get(name);
  };
  if (hasKeys) for (const [[name], value] of sums(samples, "draftgate_tenant_tokens_total", "tenant")) of(name).tokens += value;
  else for (const one of ["prompt", "generation"]) for (const [, value] of sums(samples, `draftgate_${one}_tokens_total`)) of("").tokens += value;
  for (const [[name], value] of sums(samples, "draftgate_cost_usd_total", "tenant")) of(name).cost = value;
  for (const [[name], value] of sums(samples, "draftgate_unknown_cost_requests_total", "tenant")) of(name).unknown = value;
  for (const [[name, outcome], value] of sums(samples, "draftgate_draft_seconds_total", "tenant", "outcome")) of(name).saved += outcome === "saved" ? value : -value;
  const refused = hasKeys ? "draftgate_tenant_refused_requests_total" : "draftgate_refused_requests_total";
  for (const [[name], value] of sums(samples, refused, "tenant")) of(name).refused += value;
  return [...tenants]
    .sort(([a], [b]) => byText(a, b))
    .map(([name, { tokens, cost, unknown, saved, refused: rejected }]) => [
      name || ALL,
      whole(tokens),
      cost === null ? "no price" : `${cost.toFixed(4)} USD${unknown ? ` and ${whole(unknown)} unknown` : ""}`,
      saved ? `${saved < 0 ? "−" : ""}${duration(Math.abs(saved))}` : "–",
      whole(rejected),
    ]);
}

async function showTenants(hasKeys) {
  const samples = samplesOf(await getText("/metrics"));
  const waiting = sums(samples, "draftgate_tenant_queued_requests", "model_name", "priority", "tenant");
  fill("queue", waiting.map(([[model, priority, tenant], value]) => [model || "–", priority, tenant || ALL, whole(value)]), "No requests wait.");
  fill("usage", usage(samples, hasKeys), "No requests yet.");
  const left = new Map(sums(samples, "draftgate_tenant_quota_remaining", "tenant", "model_name", "limit").map(([key, value]) => [key.join("\n"), value]));
  const quotas = sums(samples, "draftgate_tenant_quota_per_minute", "tenant", "model_name", "limit").map(([key, rate]) => {
    const [tenant, model, limit] = key;
    const value = left.get(key.join("\n"));
    return [tenant, model || "–", limit, whole(rate), value === undefined ? "unknown" : whole(value)];
  });
  fill("quotas", quotas, hasKeys ? "No key has a quota." : "Quotas need API keys.");
}

async function refresh({ role, required }) {
  try {
    await Promise.all([showServers(), role === "operator" && showTenants(required)]);
    byId("problem").hidden = true;
  } catch (error) {
    byId("problem").textContent = error.message;
    byId("problem").hidden = false;
  }
}

const session = await showAccount();
if (session.role !== null) {
  const sees = session.role === "operator";
  for (const name of ["queue", "usage", "quotas"]) byId(name).hidden = !sees;
  byId("role-note").hidden = sees;
  byId("role-note").replaceChildren("The queue, usage and quotas of all tenants need a key with the role ", make("code", {}, "operator"), ".");
  await refresh(session);
  setInterval(() => document.hidden || refresh(session), EVERY_MS);
}
