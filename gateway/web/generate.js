/** The form, the streamed response, and the statistics of a run. */

import { streamed } from "/web/client.js";
import { byId, duration, figure, make, percent } from "/web/dom.js";
import { Output } from "/web/output.js";

const KINDS = ["completion", "chat"];
const EXAMPLE =
  "class TestParser(unittest.TestCase):\n    def test_empty(self):\n        self.assertEqual(parse(''), [])\n\n" +
  "    def test_one(self):\n        self.assertEqual(parse('a'), ['a'])\n\n";

let kind = "completion";
let conversation = []; // messages of the chat
let running = null; // the AbortController of the run
let ended = () => {};

/** Set up the form. `onEnd(requestId)` is called after each run. */
export function setUp(onEnd) {
  ended = onEnd;
  byId("prompt").value = EXAMPLE;
  for (const one of KINDS) byId(`tab-${one}`).addEventListener("click", () => choose(one));
  document.querySelector("[role=tablist]").addEventListener("keydown", moveTab);
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  byId("ask").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      run();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("fresh").addEventListener("click", startAfresh);
}

function choose(chosen) {
  kind = chosen;
  for (const one of KINDS) {
    const tab = byId(`tab-${one}`);
    tab.setAttribute("aria-selected", String(one === kind));
    tab.tabIndex = one === kind ? 0 : -1;
    byId(`panel-${one}`).hidden = byId(`said-${one}`).hidden = one !== kind;
  }
  byId("fresh").hidden = kind !== "chat";
  byId("empty").hidden = byId(`said-${kind}`).hasChildNodes();
}

function moveTab(event) {
  if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  choose(KINDS[1 - KINDS.indexOf(kind)]);
  byId(`tab-${kind}`).focus();
}

function startAfresh() {
  running?.abort();
  conversation = [];
  byId("said-chat").replaceChildren();
  byId("empty").hidden = false;
  byId("message").focus();
}

/** The body of the request, without the prompt and empty fields. */
function settings() {
  const number = (id) => (byId(id).value === "" ? undefined : byId(id).valueAsNumber);
  const form = byId("form").value;
  return {
    model: byId("model").value || undefined,
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    response_format: form ? { type: form } : undefined,
    speculation: { mode: byId("mode").value, trace: true },
    stream: true,
    stream_options: { include_usage: true },
  };
}

async function run() {
  if (running) return;
  const asked = kind === "chat" ? askedInChat() : askedForCompletion();
  if (!asked) return;
  const { path, body, said } = asked;
  const output = new Output();
  said.append(output.element);
  const figures = { begun: performance.now(), first: null, last: null, id: "", usage: null, decision: null };
  begin();
  try {
    for await (const event of streamed(path, { ...settings(), ...body }, running.signal)) {
      take(event, output, figures);
    }
    setRunState(`Done in ${duration((performance.now() - figures.begun) / 1e3)}.`);
  } catch (error) {
    if (error.name === "AbortError") setRunState("Stopped.");
    else fail(error);
  } finally {
    finish(asked, output, figures);
  }
}

function askedForCompletion() {
  const prompt = byId("prompt").value;
  const said = byId("said-completion");
  said.replaceChildren(make("span", { className: "given" }, prompt));
  return { path: "/v1/completions", body: { prompt }, said, keep() {} };
}

function askedInChat() {
  const content = byId("message").value;
  if (!content.trim()) return null;
  const said = byId("said-chat");
  const turns = conversation;
  turns.push({ role: "user", content });
  const turn = make("p", { className: "turn" }, content);
  said.append(turn);
  byId("message").value = "";
  const keep = (output) => {
    if (output.text) return turns.push({ role: "assistant", content: output.text });
    // The message returns to the input if the response is empty.
    turns.pop();
    turn.remove();
    output.element.remove();
    byId("message").value ||= content;
  };
  return { path: "/v1/chat/completions", body: { messages: turns }, said, keep };
}

function begin() {
  running = new AbortController();
  byId("run").disabled = true;
  byId("stop").disabled = false;
  byId("empty").hidden = byId("problem").hidden = true;
  byId("stats").hidden = byId("reason").hidden = true;
  byId("output").setAttribute("aria-busy", "true");
  setRunState("Generating.");
}

function take(event, output, figures) {
  figures.id = event.id;
  figures.usage = event.usage ?? figures.usage;
  figures.decision = event.metrics?.speculative_decoding ?? figures.decision;
  const choice = event.choices[0];
  if (!choice) return;
  const text = choice.text ?? choice.delta.content ?? "";
  if (text) {
    figures.last = performance.now();
    figures.first ??= figures.last;
  }
  const box = byId("output");
  const follows = box.scrollTop + box.clientHeight >= box.scrollHeight - 24; // the user has not scrolled up
  output.add(text, choice.steps);
  if (follows) box.scrollTop = box.scrollHeight;
}

function finish({ keep }, output, figures) {
  running = null;
  byId("run").disabled = false;
  if (document.activeElement === byId("stop")) byId("run").focus();
  byId("stop").disabled = true;
  byId("output").setAttribute("aria-busy", "false");
  keep(output);
  byId("empty").hidden = byId(`said-${kind}`).hasChildNodes();
  if (figures.usage) show(figures);
  if (figures.id) ended(figures.id.replace(/^[a-z]+-/, ""));
}

function show({ begun, first, last, usage, decision }) {
  const tokens = usage.completion_tokens;
  const seconds = (last - first) / 1e3;
  const drafted = decision.num_drafted_tokens;
  const steps = tokens - decision.num_accepted_tokens;
  const values = {
    tokens: String(tokens),
    rate: seconds > 0 ? figure((tokens - 1) / seconds) : "–",
    ttft: first === null ? "–" : duration((first - begun) / 1e3),
    "per-step": steps > 0 ? figure(tokens / steps) : "–",
    accepted: drafted
      ? `${decision.num_accepted_tokens} of ${drafted} (${percent(decision.num_accepted_tokens / drafted)})`
      : "no drafts",
  };
  for (const [name, value] of Object.entries(values)) {
    document.querySelector(`[data-stat="${name}"]`).textContent = value;
  }
  byId("stats").hidden = byId("reason").hidden = false;
  byId("reason").textContent = `Policy ${decision.policy}: ${decision.reason}`;
}

function setRunState(words) {
  byId("run-state").textContent = words;
}

function fail(error) {
  setRunState("");
  byId("problem").textContent = error.message;
  byId("problem").hidden = false;
}
