/** The node's charts, fed by `/live`. */

import { Chart, SPAN_S } from "/web/charts.js";
import { byId, count, figure, milliseconds, percent } from "/web/dom.js";

const SUMMARY_MS = 60_000; // interval of the summaries for screen readers

const one = (of) => [{ name: "", of }];
const ranks = (field) => ["p50", "p90", "p99"].map((rank) => ({ name: rank, of: (s) => s[field]?.[rank] ?? null }));

const drafts = { what: "drafts", known: (s) => s.price !== null };
const memory = { what: "KV use", known: (s) => s.kv_usage !== null };

/** What users feel comes first, then speculation, then the load. `report` is what a chart needs. */
const CHARTS = [
  { title: "Tokens/s", hint: "Tokens generated for all requests", lines: one((s) => s.tokens_per_s), show: figure, least: 10, size: "full" },
  { title: "TTFT", hint: "Time to first token, percentiles over the last minute", lines: ranks("ttft_s"), show: milliseconds, least: 0.001, size: "half" },
  { title: "TPOT", hint: "Time per output token, percentiles over the last minute", lines: ranks("tpot_s"), show: milliseconds, least: 0.001, size: "half" },
  { title: "Acceptance", hint: "Running share of draft tokens that are accepted", lines: one((s) => s.acceptance), show: percent, most: 1, report: drafts },
  { title: "Drafts per step", hint: "Mean draft tokens verified per step, over the last minute's requests", lines: one((s) => s.chosen_k), show: figure, least: 1, report: drafts },
  { title: "Slot price", hint: "Survival that makes a draft slot worth verifying", lines: one((s) => s.price), show: figure, least: 0.1, report: drafts },
  { title: "Running", hint: "Sequences in the batches of the workers", lines: one((s) => s.running), show: (n) => count(n, "sequence"), least: 4, size: "load" },
  { title: "Waiting", hint: "Requests waiting in the gateway and at workers", lines: one((s) => s.waiting + s.queued), show: (n) => count(n, "request"), least: 4, size: "load" },
  { title: "KV use", hint: "Share of the KV blocks in use", lines: one((s) => s.kv_usage), show: percent, most: 1, report: memory },
];

const charts = CHARTS.map((spec) => new Chart(spec));
let samples = [];
let paused = false;
let summed_ms = -Infinity;

/** Whether updates are paused. */
export const isPaused = () => paused;

let source = null; // the EventSource
let lost = () => {};

/** Create the charts. `onLost()` is called when the connection breaks. */
export function setUp(onLost) {
  lost = onLost;
  byId("charts").append(...charts.map((chart) => chart.element));
  byId("pause").addEventListener("click", pause);
}

/** Connect to the node, unless a connection exists. */
export function connect() {
  // An EventSource gives up after an error response, such as that of a proxy.
  if (source && source.readyState !== EventSource.CLOSED) return;
  source = new EventSource("/live");
  source.addEventListener("message", (event) => take(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    state("disconnected");
    lost();
  });
}

function pause() {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (!paused) draw();
  else state("paused");
}

function take(sample) {
  // The node sends the stored samples again after a reconnect.
  if (samples.length && sample.at_s <= samples.at(-1).at_s) return;
  samples = [...samples.filter((old) => old.at_s >= sample.at_s - SPAN_S), sample];
  // The stored samples arrive in one burst, so draw them once.
  if (!paused && !draw.due) draw.due = requestAnimationFrame(draw);
}

function draw() {
  draw.due = 0;
  if (!samples.length || paused) return;
  for (const chart of charts) chart.update(samples);
  showReported(samples.at(-1));
  state("last two minutes");
  summarise();
}

/** Hide the charts of figures that no worker reports, and name these figures. */
function showReported(sample) {
  CHARTS.forEach(({ report }, index) => (charts[index].element.hidden = !(report?.known(sample) ?? true)));
  const missing = [drafts, memory].filter(({ known }) => !known(sample)).map(({ what }) => what);
  byId("unreported").hidden = missing.length === 0;
  byId("unreported").textContent = `Not reported by the workers: ${missing.join(", ")}.`;
}

function summarise() {
  if (performance.now() - summed_ms < SUMMARY_MS) return;
  summed_ms = performance.now();
  const { running, waiting, queued, price } = samples.at(-1);
  const priced = price === null ? "" : `, slot price ${figure(price)}`;
  byId("live-summary").textContent = `${running} running, ${waiting + queued} waiting${priced}`;
}

function state(words) {
  if (byId("live-state").textContent !== words) byId("live-state").textContent = words;
}
