/** The chat: a conversation whose messages can be edited and answered again, and the message to send. */

import { read } from "/web/attachments.js";
import * as conversations from "/web/conversations.js";
import { add, path, removeFrom, ROOT, versions } from "/web/conversations.js";
import { button, byId, duration, isAtEnd } from "/web/dom.js";
import { Answer, endingOf, entersText, Question, versionButtons } from "/web/messages.js";
import { Run } from "/web/run.js";
import { modelOf, settings } from "/web/settings.js";
import * as sidebar from "/web/sidebar.js";
import { Task } from "/web/task.js";

const MOST_SPOKEN = 2000; // characters of an answer that screen readers announce

let conversation = conversations.create();
let views = new Map(); // index of a message -> its view
let task = null;
let ended = () => {};
let keepNow = () => {}; // keeps the text so far of the answer that arrives

/** Set up the chat. `onEnd(requestId)` is called after each answer. */
export function setUp(onEnd) {
  ended = onEnd;
  task = new Task("chat", send);
  byId("message").addEventListener("keydown", (event) => {
    if (!entersText(event) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    send();
  });
  byId("show-tokens").addEventListener("click", showTokens);
  byId("system").addEventListener("change", keepSystem);
  const panel = byId("panel-chat");
  panel.addEventListener("paste", (event) => take(event, event.clipboardData));
  panel.addEventListener("drop", (event) => take(event, event.dataTransfer));
  panel.addEventListener("dragover", (event) => {
    if (event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  addEventListener("pagehide", () => keepNow());
  sidebar.setUp((chosen) => open(chosen ?? conversations.create()), leave);
  sidebar.show(conversation);
}

/** Send the message of the form. */
function send() {
  const content = byId("message").value;
  if (task.isRunning || !content.trim()) return;
  const question = add(conversation, path(conversation).at(-1) ?? ROOT, { role: "user", content });
  byId("message").value = "";
  answer({ question, first: question });
}

/**
 * Let the model answer a question, or continue the message at an index. The messages from `first` on
 * are removed if no text arrives.
 */
async function answer({ question, first = conversation.messages.length, continued = null }) {
  if (task.isRunning) return;
  const asked = conversation; // the user may open another one before the end
  asked.system = byId("system").value.trim();
  const body = bodyOf(asked, continued ?? question, continued !== null);
  const at = continued ?? add(asked, question, { role: "assistant", content: "", model: body.model });
  show();
  const view = views.get(at);
  byId("turns").scrollTop = byId("turns").scrollHeight;
  const run = new Run(view.output, byId("turns"));
  const length = view.output.text.length;
  const before = continued === null ? 0 : (view.message.tokens ?? 0);
  const isCounted = before > 0 || length === 0;
  const keep = (end) => store(asked, view, run, { end, tokens: isCounted ? before + run.tokens : 0 });
  keepNow = () => keep("stopped");
  begin(true);
  let end = "failed";
  let follows = true; // known before an error makes the box smaller
  await task.perform(async (signal) => {
    signal.addEventListener("abort", () => (end = "stopped"));
    await run.stream("/v1/chat/completions", body, signal, () => view.updateSoon()).finally(() => (follows = isAtEnd(byId("turns"))));
    end = run.wasCut ? (isFull(run.usage, body.model) ? "full" : "length") : "stop";
    return run.wasCut ? "" : run.ending;
  });
  keepNow = () => {};
  begin(false);
  view.update();
  const { text, reasoning } = view.output;
  const isEmpty = text.length === length && !reasoning;
  if (!isEmpty || (continued !== null && end === "stop")) keep(end);
  else if (continued === null) withdraw(asked, first, at, end);
  if (asked === conversation) conclude(view, text.slice(length), { isEmpty, follows });
  else leaveBehind();
  if (run.id) ended(run.requestId);
}

/** The body of the request for the answer after a message, or for the rest of that message. */
function bodyOf(asked, end, isContinued) {
  const system = asked.system ? [{ role: "system", content: asked.system }] : [];
  const said = path(asked, end).map((at) => ({ role: asked.messages[at].role, content: asked.messages[at].content }));
  const body = { ...settings(), messages: [...system, ...said] };
  if (!isContinued) return body;
  const { id = body.model } = modelOf(asked.messages[end].model); // the model that began, if it still exists
  return { ...body, model: id, continue_final_message: true, add_generation_prompt: false };
}

/** Whether an answer has filled the context, so that nothing can continue it. */
function isFull(usage, name) {
  const { max_model_len: most } = modelOf(name);
  return Boolean(usage && most) && usage.prompt_tokens + usage.completion_tokens >= most;
}

/** Put what has arrived of an answer into its message, and keep the conversation. */
function store(asked, { message, output }, run, { end, tokens }) {
  if (asked.isDeleted) return;
  Object.assign(message, { content: output.text, end, tokens, facts: factsOf(run) });
  if (output.reasoning) message.reasoning = output.reasoning;
  conversations.keep(asked);
}

/** The figures of a run in a line. */
function factsOf(run) {
  const { tokens, rate, ttft, accepted } = run.figures();
  const took = run.last_ms === null ? [] : [duration((run.last_ms - run.begun_ms) / 1e3)];
  const drafts = accepted && accepted !== "no drafts" ? [`drafts accepted: ${accepted}`] : [];
  const speed = rate === "–" ? [] : [`${rate} tokens/s`];
  const first = ttft === "–" ? [] : [`TTFT ${ttft}`];
  const length = tokens && !run.wasCut ? [`${tokens} tokens`] : []; // a cut answer says it anyway
  return [...length, ...took, ...speed, ...first, ...drafts].join(" · ");
}

/** Remove an empty answer. The new message at `first` returns to the form, if its conversation is open. */
function withdraw(asked, first, at, end) {
  const { role, content } = asked.messages[first];
  if (asked !== conversation) {
    removeFrom(asked, at);
    if (role === "user" && !asked.isDeleted) conversations.keep(asked);
    return;
  }
  removeFrom(asked, first);
  for (const index of views.keys()) if (index >= first) views.delete(index);
  if (role === "user") byId("message").value ||= content;
  else if (end === "stop") task.fail("The answer is empty.");
}

/** Show the end of an answer and its figures, and let screen readers read the answer once, as a whole. */
function conclude(view, added, { isEmpty, follows }) {
  show();
  if (!isEmpty) sayEnd(view.message, added);
  if (follows) byId("turns").scrollTop = byId("turns").scrollHeight;
}

function sayEnd(message, added) {
  const ending = endingOf(message);
  if (ending && !byId("state-chat").textContent) task.say(ending);
  byId("spoken").textContent = added.slice(0, MOST_SPOKEN);
}

/** List an answer that another conversation has ended, without its state. */
function leaveBehind() {
  task.say("");
  sidebar.show(conversation);
}

function begin(isBusy) {
  byId("turns").setAttribute("aria-busy", String(isBusy));
  byId("thread").classList.toggle("running", isBusy);
}

/** Open a conversation. */
function open(chosen) {
  task.stop();
  conversation = chosen;
  views = new Map();
  byId("system").value = chosen.system;
  byId("spoken").textContent = "";
  task.say("");
  byId("problem-chat").hidden = true;
  show();
  byId("turns").scrollTop = byId("turns").scrollHeight;
  byId("message").focus();
}

/** Leave a conversation that is deleted, or any without an id. */
function leave(id) {
  if (id !== null && id !== conversation.id) return;
  conversation.isDeleted = true; // the answer that arrives must not keep it again
  open(conversations.create());
}

/** Show the messages of the conversation, with their buttons. */
function show() {
  const shown = path(conversation);
  for (const at of shown) {
    const message = conversation.messages[at];
    if (!views.has(at)) views.set(at, message.role === "user" ? new Question(message) : new Answer(message));
    views.get(at).fill(actionsOf(at, message));
  }
  byId("turns").replaceChildren(...shown.map((at) => views.get(at).element));
  byId("welcome").hidden = shown.length > 0;
  sidebar.show(conversation);
}

function actionsOf(at, message) {
  const all = versions(conversation, message.parent);
  const edit = button("Edit", () => views.get(at).edit((content) => change(at, content)), { "data-action": "edit" });
  const again = button("Regenerate", () => answer({ question: message.parent }));
  const more = button("Continue", () => answer({ continued: at }), { className: "continue" });
  const canContinue = ["length", "stopped", "failed"].includes(message.end) && message.content;
  return [
    edit,
    ...(message.role === "assistant" ? [again] : []),
    ...(canContinue ? [more] : []),
    ...versionButtons(all.indexOf(at), all.length, (by) => switchTo(all[all.indexOf(at) + by])),
  ];
}

/** Begin a branch with an edited message, which the model answers if it is the user's. */
function change(at, content) {
  const { parent, role, model: name } = conversation.messages[at];
  const first = add(conversation, parent, { role, content, ...(name ? { model: name } : {}) });
  if (role === "user") return answer({ question: first, first });
  conversations.keep(conversation);
  return show();
}

/** Show another version of a message and what follows it. */
function switchTo(at) {
  conversation.chosen[conversation.messages[at].parent] = at;
  conversations.keep(conversation);
  show();
  const steps = [...views.get(at).element.querySelectorAll(".step:enabled")];
  steps.at(-1)?.focus();
}

function keepSystem() {
  conversation.system = byId("system").value.trim();
  if (conversation.messages.length) conversations.keep(conversation);
}

function showTokens() {
  const pressed = byId("show-tokens").getAttribute("aria-pressed") !== "true";
  byId("show-tokens").setAttribute("aria-pressed", String(pressed));
  byId("box").dataset.view = pressed ? "tokens" : "text";
}

/** Insert pasted or dropped text files into the message, and refuse other files. */
async function take(event, transfer) {
  if (!transfer.files.length) return;
  event.preventDefault();
  const { texts, refusals } = await read(transfer.files);
  const field = byId("message");
  if (texts.length) field.setRangeText(texts.join("\n"), field.selectionStart, field.selectionEnd, "end");
  if (refusals.length) task.fail(refusals.join(" "));
  else byId("problem-chat").hidden = true;
  field.focus();
}
