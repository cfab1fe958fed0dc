/** A lane for each worker with a dot for each running request, which moves with its request. */

import { hideCard, showCard } from "/web/card.js";
import { getJson } from "/web/client.js";
import { byId, make, percent } from "/web/dom.js";
import { isPaused } from "/web/live.js";
import { describeMove, listMoves } from "/web/moves.js";

const EVERY_MS = 1000;
const MOST_DOTS = 64; // of a lane
const MARKED_S = 10; // time for which a request that has moved is marked
const FLIGHT_MS = 900;

const lanes = new Map(); // worker id -> elements of its lane
const dots = new Map(); // key of a stream -> its dot
const streams = new WeakMap(); // dot -> its stream
let latest = []; // the latest moves
let current = null; // the dot with the tab stop
let described = null; // the dot with the card
let asking = false;

const keyOf = ({ request_id: id, prompt }) => `${id} ${prompt}`;

/** Refresh the lanes regularly while the page is visible. */
export function setUp() {
  for (const [event, react] of Object.entries({
    mouseover: (e) => describe(e.target),
    mouseout: (e) => e.relatedTarget?.closest?.("#card") || describe(document.activeElement),
    focusin: (e) => describe(e.target),
    focusout: () => describe(null),
    click: (e) => visit(e.target),
    keydown: move,
  })) {
    byId("lanes").addEventListener(event, react);
  }
  setInterval(() => document.hidden || isPaused() || refresh(), EVERY_MS);
  refresh();
}

async function refresh() {
  if (asking) return;
  asking = true;
  try {
    const found = await getJson("/workers");
    if (!isPaused()) draw(found);
  } catch {
    // the header shows the state of the node
  } finally {
    asking = false;
  }
}

/** Draw a response of `/workers`. */
export function draw({ at_s: now_s, workers, streams: running, moves }) {
  // The processes of a node may know the workers in different orders.
  workers.sort((a, b) => a.worker_id.localeCompare(b.worker_id, "en", { numeric: true }));
  latest = moves;
  const focused = document.activeElement;
  const movers = running
    .map((stream) => [dots.get(keyOf(stream)), stream])
    .filter(([dot, stream]) => dot && streams.get(dot).worker_id !== stream.worker_id)
    .map(([dot]) => [dot, dot.getBoundingClientRect()]);
  drawLanes(workers, running);
  drawDots(workers, running, now_s);
  // A dot that enters another lane loses the focus.
  if (streams.has(focused) && focused.isConnected) focused.focus({ preventScroll: true });
  for (const [dot, from] of movers) fly(dot, from);
  if (!current?.isConnected) makeCurrent(byId("lanes").querySelector("[tabindex]"));
  if (described) describe(described.isConnected && hasCard(described) ? described : null);
  listMoves(moves);
}

const hasCard = (dot) => dot.hasAttribute("aria-describedby");

/** Show a lane for each worker. */
function drawLanes(workers, running) {
  const ids = new Set(workers.map((worker) => worker.worker_id));
  const several = new Set(workers.map((worker) => worker.model)).size > 1;
  drop(lanes, ids, ({ element }) => element);
  workers.forEach((worker, index) => {
    const id = worker.worker_id;
    if (!lanes.has(id)) lanes.set(id, lane(id));
    const { element, state, others, more } = lanes.get(id);
    place(element, byId("lanes"), index);
    element.dataset.status = worker.status;
    write(state, [...(several ? [worker.model] : []), describeWorker(worker)].join(", "));
    const own = running.filter((stream) => stream.worker_id === id);
    const sequences = own.reduce((sum, stream) => sum + stream.sequences, 0);
    const foreign = Math.max(worker.running + worker.waiting - sequences, 0);
    const free = Math.max(MOST_DOTS - own.length, 0);
    while (others.childElementCount > Math.min(foreign, free)) others.lastElementChild.remove();
    while (others.childElementCount < Math.min(foreign, free)) others.append(make("span", { className: "dot other" }));
    others.setAttribute("aria-label", foreign === 1 ? "1 other sequence" : `${foreign} other sequences`);
    others.hidden = foreign === 0;
    const hidden = Math.max(own.length - MOST_DOTS, 0) + Math.max(foreign - free, 0);
    write(more, hidden ? `+${hidden}` : "");
  });
}

function lane(id) {
  const name = make("span", { className: "worker" }, id);
  const state = make("span", { className: "state" });
  const own = make("span", { className: "own", role: "group", "aria-label": `Requests on ${id}; use the arrow keys to move between them` });
  const others = make("span", { className: "others", role: "img" });
  const more = make("span", { className: "more" });
  return { element: make("li", {}, name, state, make("span", { className: "track" }, own, others, more)), state, own, others, more };
}

function describeWorker({ status, running, waiting, kv_usage: usage, role = "any" }) {
  const figures = [...(role === "any" ? [] : [role]), `${running} running`, ...(waiting ? [`${waiting} waiting`] : []), ...(usage === null ? [] : [`KV ${percent(usage)}`])];
  if (status === "failed" || status === "loading") return status;
  return [...(status === "ok" ? [] : [status]), ...figures].join(", ");
}

function drawDots(workers, running, now_s) {
  const keys = new Set(running.map(keyOf));
  drop(dots, keys, (dot) => dot);
  for (const { worker_id: id } of workers) {
    const own = running.filter((stream) => stream.worker_id === id).slice(0, MOST_DOTS);
    own.forEach((stream, index) => place(dot(stream, now_s), lanes.get(id).own, index));
  }
}

/** Return the dot of a stream in its present state. */
function dot(stream, now_s) {
  const key = keyOf(stream);
  if (!dots.has(key)) dots.set(key, make("span", { className: "dot", role: "img", tabIndex: -1 }));
  const found = dots.get(key);
  const moved = movesOf(stream).some(({ end, ended_s: at_s }) => end === "moved" && at_s > now_s - MARKED_S);
  found.classList.toggle("moving", stream.moving);
  found.classList.toggle("moved", moved && !stream.moving);
  found.setAttribute("aria-label", `${nameOf(stream)}, ${stateOf(stream)}`);
  streams.set(found, stream);
  return found;
}

const movesOf = (stream) => latest.filter((one) => keyOf(one) === keyOf(stream)).map((one) => one.move);

function nameOf({ request_id: id, prompt }) {
  return `Request ${id.slice(0, 8)}${prompt ? `, prompt ${prompt}` : ""}`;
}

function stateOf({ tokens, sequences, moving }) {
  return `${tokens} tokens${sequences > 1 ? ` in ${sequences} sequences` : ""}${moving ? ", moving" : ""}`;
}

/** Let a dot that has changed its lane fly there. */
function fly(dot, from) {
  if (!dot.isConnected || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const to = dot.getBoundingClientRect();
  const start = `${from.left - to.left}px ${from.top - to.top}px`;
  dot.animate([{ translate: start }, { translate: "none" }], { duration: FLIGHT_MS, easing: "ease-in-out" });
}

/** Remove the entries of a map whose keys are not in a set, with their elements. */
function drop(map, keys, elementOf) {
  for (const [key, value] of map) {
    if (keys.has(key)) continue;
    elementOf(value).remove();
    map.delete(key);
  }
}

/** Put an element at an index of its parent, without touching it if it is there. */
function place(element, parent, index) {
  if (parent.children[index] !== element) parent.insertBefore(element, parent.children[index] ?? null);
}

function write(element, words) {
  if (element.textContent !== words) element.textContent = words;
}

/** Show the card of a dot, or hide it for anything else. */
function describe(target) {
  if (!streams.has(target)) {
    if (described && hasCard(described)) hideCard();
    described = null;
    return;
  }
  if (target === document.activeElement) makeCurrent(target);
  const stream = streams.get(target);
  const moves = movesOf(stream).map((move) => make("p", { className: "why" }, describeMove(move)));
  const where = make("p", { className: "why" }, `${stateOf(stream)}, on ${stream.worker_id}`);
  const content = [make("p", { className: "title" }, make("strong", {}, nameOf(stream))), where, ...moves];
  const words = content.map((part) => part.textContent).join("");
  // Replacing the same words would end a selection of the user.
  if (target === described && hasCard(target) && words === byId("card").textContent) return;
  described = target;
  showCard(target, [], content);
}

/** Open the page of a dot's request. */
function visit(target) {
  if (streams.has(target)) location.assign(`/requests/${encodeURIComponent(streams.get(target).request_id)}`);
}

function makeCurrent(dot) {
  if (current) current.tabIndex = -1;
  current = dot;
  if (current) current.tabIndex = 0;
}

/** Move the focus between the dots of a lane, and between lanes. */
function move(event) {
  if (event.key === "Escape") return describe(null);
  if (event.key === "Enter") return visit(event.target);
  const groups = [...byId("lanes").querySelectorAll(".own:not(:empty)")];
  const group = groups.indexOf(event.target.parentElement);
  if (group < 0) return;
  const siblings = [...groups[group].children];
  const index = siblings.indexOf(event.target);
  const inLane = (to) => to && [...to.children][Math.min(index, to.childElementCount - 1)];
  const target = {
    ArrowLeft: () => siblings[index - 1],
    ArrowRight: () => siblings[index + 1],
    ArrowUp: () => inLane(groups[group - 1]),
    ArrowDown: () => inLane(groups[group + 1]),
    Home: () => siblings[0],
    End: () => siblings.at(-1),
  }[event.key];
  if (!target) return;
  event.preventDefault();
  target()?.focus();
}
