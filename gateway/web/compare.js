/** The comparison of one prompt with and without speculation. */

import { getJson } from "/web/client.js";
import { byId, count, duration, figure, followEnd, make } from "/web/dom.js";
import { loopStart } from "/web/loops.js";
import { Output } from "/web/output.js";
import { Run, showFigures } from "/web/run.js";
import { settings } from "/web/settings.js";
import { Task } from "/web/task.js";

const MOST_SEED = 2 ** 31;

let task = null;
let ended = () => {};

/** Set up the tab with a prompt. `onEnd(...requestIds)` is called with both requests of a comparison. */
export function setUp(prompt, onEnd) {
  ended = onEnd;
  byId("prompt-compare").value = prompt;
  task = new Task("compare", () => task.perform(compare));
}

/**
 * Run the prompt with speculation and then without, and show both beside each other.
 *
 * Runs at the same time would share steps and slow each other down, so the requests run one after the
 * other. During the second run, the first one appears again at its measured times. The run with
 * speculation goes first, because caches can only favour the second one.
 */
async function compare(signal) {
  const given = settings();
  const mode = given.speculation.mode === "off" ? "auto" : given.speculation.mode;
  const body = { ...given, prompt: byId("prompt-compare").value, seed: given.seed ?? randomSeed() };
  const drafted = begin("with", mode);
  const plain = begin("without", "off");
  verdict("…", "", "");
  byId("first-requests").hidden = true;
  const isFirst = await isFirstRun();
  let replay = null;
  try {
    task.say("With speculation.");
    await drafted.run(body, signal);
    task.say("Without speculation, beside the first run at its measured times.");
    replay = drafted.replay();
    await Promise.all([plain.run(body, signal), replay.done]);
    conclude(drafted, plain);
    byId("first-requests").hidden = !isFirst;
    return "Done.";
  } finally {
    replay?.end();
    if (!plain.isComplete) verdict("–", `no speed-up: the run ${drafted.isComplete ? "without" : "with"} speculation did not end`, "");
    const ids = [drafted, plain].flatMap(({ last }) => (last?.id ? [last.requestId] : []));
    if (ids.length) ended(...ids);
  }
}

const randomSeed = () => Math.floor(Math.random() * MOST_SEED);

/** Return whether the node has no decisions yet, from which it would have learned. */
async function isFirstRun() {
  try {
    return (await getJson("/decisions?limit=1")).decisions.length === 0;
  } catch {
    return false; // unknown
  }
}

/** Empty the column of a side, and return it. */
function begin(side, mode) {
  const column = new Column(side, mode);
  column.clear();
  return column;
}

/** One side of the comparison: `with` or `without`. */
class Column {
  #times = []; // {at_ms, count}: number of pieces on the page, and when since the request

  constructor(side, mode) {
    this.side = side;
    this.mode = mode;
    this.box = byId(`said-${side}`);
    this.figures = byId(`stats-${side}`);
    this.note = byId(`loop-${side}`);
    this.loops = false;
    this.last = null; // the Run
    this.isComplete = false; // whether the run has ended by itself
  }

  clear() {
    this.box.replaceChildren();
    this.figures.hidden = this.note.hidden = true;
    byId(`mode-${this.side}`).textContent = this.mode;
  }

  /** Send the prompt. Throws NodeError. */
  async run(body, signal) {
    const output = new Output(`Tokens ${this.side} speculation`);
    this.box.replaceChildren(output.element);
    this.box.setAttribute("aria-busy", "true");
    const run = (this.last = new Run(output, this.box));
    const note = () => {
      this.#times.push({ at_ms: performance.now() - run.begun_ms, count: output.element.childElementCount });
    };
    try {
      const speculation = { ...body.speculation, mode: this.mode };
      await run.stream("/v1/completions", { ...body, speculation }, signal, note);
      this.isComplete = true;
    } finally {
      this.box.setAttribute("aria-busy", "false");
    }
    const seconds = (run.last_ms - run.begun_ms) / 1e3;
    showFigures(this.figures, { ...run.figures(), time: duration(seconds) });
    this.#findLoop(output);
  }

  #findLoop(output) {
    const tokens = [...output.element.children].map((token) => token.textContent);
    const start = loopStart(tokens);
    if (start === tokens.length) return;
    this.loops = true;
    output.markLoop(start);
    this.note.textContent = `Ends in a loop after ${count(start, "token")}.`;
    this.note.hidden = false;
  }

  /** Show the run again at its measured times. Returns `done`, a promise, and `end`, which shows the rest. */
  replay() {
    const pieces = [...this.last.output.element.children];
    for (const piece of pieces) piece.hidden = true;
    const begun_ms = performance.now();
    const due = [...this.#times];
    let timer = 0;
    let finish;
    const done = new Promise((resolve) => (finish = resolve));
    const reveal = (count) => followEnd(this.box, () => pieces.slice(0, count).forEach(show));
    const advance = () => {
      const now_ms = performance.now() - begun_ms;
      let count = 0;
      while (due.length && due[0].at_ms <= now_ms) ({ count } = due.shift());
      if (count) reveal(count);
      // Timers also run in hidden pages, unlike animation frames.
      if (due.length) timer = setTimeout(advance, due[0].at_ms - now_ms);
      else finish();
    };
    const end = () => {
      clearTimeout(timer);
      pieces.forEach(show);
      finish();
    };
    advance();
    return { done, end };
  }
}

function show(piece) {
  piece.hidden = false;
}

/** Show the speed-up and whether both texts are equal. */
function conclude({ last: drafted, loops }, { last: plain, loops: alsoLoops }) {
  const reason = whyNoSpeedUp(drafted, plain, loops || alsoLoops);
  if (reason) return verdict("–", `no speed-up: ${reason}`, equality(drafted, plain));
  verdict(`${figure(drafted.rate / plain.rate)}×`, "as fast with speculation", equality(drafted, plain));
}

function whyNoSpeedUp(drafted, plain, loops) {
  if (!drafted.usage || !plain.usage) return "the server reports no usage";
  if (!drafted.rate || !plain.rate) return "a text arrived in one piece";
  // Drafts predict a repetition without effort, so its speed says nothing about other texts.
  return loops ? "a text ends in a loop, which drafts predict easily" : "";
}

function equality(drafted, plain) {
  if (!drafted.usage || !plain.usage) return "";
  if (drafted.decision?.num_drafted_tokens === 0) return "Neither run had drafts.";
  if (drafted.output.text === plain.output.text) return "Both texts are equal.";
  return "The texts differ.";
}

function verdict(factor, meaning, note) {
  byId("speed-up").replaceChildren(make("strong", {}, factor), " ", make("span", {}, meaning));
  byId("same-text").textContent = note;
}
