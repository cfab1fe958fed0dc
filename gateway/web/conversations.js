/**
 * Conversations: their messages as a tree, their storage in this browser, and their export.
 *
 * A conversation is `{id, system, updated_ms, messages, chosen}`. A message is `{parent, role,
 * content}`, and that of the model also has `model`, `reasoning`, `tokens`, `end` and `facts`.
 * `parent` is the index of the message before it, or ROOT. Messages with the same parent are versions
 * of each other, and `chosen` maps a parent to the version that the page shows.
 */

let key = "draftgate-chats";
const MOST = 100; // conversations
const MOST_CHARS = 2_000_000; // half of what browsers keep for a page
const TITLE_CHARS = 60;

/** The parent of a first message. */
export const ROOT = -1;

/** Keep the conversations of a tenant apart from those of others who use this browser. */
export function belongTo(tenant) {
  key = `draftgate-chats/${tenant}`;
}

/** Return a conversation without messages. */
export function create() {
  // Browsers have randomUUID only on local and HTTPS pages.
  const id = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
  return { id, system: "", updated_ms: Date.now(), messages: [], chosen: {} };
}

/** Add a message after another one, choose it, and return its index. */
export function add(conversation, parent, message) {
  const at = conversation.messages.push({ parent, ...message }) - 1;
  conversation.chosen[parent] = at;
  return at;
}

/** Remove the messages from an index on, which must be the latest ones. */
export function removeFrom(conversation, from) {
  conversation.messages.length = from;
  for (const [parent, at] of Object.entries(conversation.chosen)) {
    if (at < from) continue;
    const left = versions(conversation, Number(parent));
    if (left.length && Number(parent) < from) conversation.chosen[parent] = left.at(-1);
    else delete conversation.chosen[parent];
  }
}

/** Return the indices of the messages with a parent, oldest first. */
export function versions({ messages }, parent) {
  return messages.flatMap((message, at) => (message.parent === parent ? [at] : []));
}

/** Return the indices of the messages that the page shows, up to one of them or to the last. */
export function path({ chosen }, end = null) {
  const shown = [];
  for (let at = chosen[ROOT]; at !== undefined; at = chosen[at]) {
    shown.push(at);
    if (at === end) break;
  }
  return shown;
}

/** Return the first line of the first message. */
export function titleOf(conversation) {
  const first = conversation.messages[path(conversation)[0] ?? 0]?.content ?? "";
  return first.trim().split("\n")[0].slice(0, TITLE_CHARS) || "Untitled";
}

/** Return the kept conversations, latest first. */
export function kept() {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? [];
  } catch {
    return []; // the browser keeps no data for this page
  }
}

/** Return the kept conversations with a text in any of their messages, latest first. */
export function search(text) {
  const wanted = text.trim().toLowerCase();
  return kept().filter(({ messages }) => messages.some(({ content }) => content.toLowerCase().includes(wanted)));
}

/** Keep a conversation as the latest one. */
export function keep(conversation) {
  conversation.updated_ms = Date.now();
  store([conversation, ...without(conversation.id)].slice(0, MOST));
}

/** Delete a conversation, or all of them without an id. */
export function remove(id = null) {
  store(id === null ? [] : without(id));
}

const without = (id) => kept().filter((one) => one.id !== id);

/** Store conversations without the oldest ones that do not fit. */
function store(all) {
  const texts = all.map((one) => JSON.stringify(one));
  let size = 0;
  let fitting = texts.filter((text, index) => (size += text.length) <= MOST_CHARS || index === 0);
  for (;;) {
    try {
      return localStorage.setItem(key, `[${fitting.join(",")}]`);
    } catch {
      if (!fitting.length) return undefined;
      fitting = fitting.slice(0, -1); // other pages of this origin use the space
    }
  }
}

/** Return a whole conversation as JSON. */
export const toJson = (conversation) => `${JSON.stringify({ title: titleOf(conversation), ...conversation }, null, 2)}\n`;

/** Return the messages that the page shows as Markdown. */
export function toMarkdown(conversation) {
  const system = conversation.system ? [`## System prompt\n\n${conversation.system}`] : [];
  const turns = path(conversation).map((at) => {
    const { role, model, content } = conversation.messages[at];
    return `## ${role === "user" ? "You" : model || "Assistant"}\n\n${content.trim()}`;
  });
  return `${[`# ${titleOf(conversation)}`, ...system, ...turns].join("\n\n")}\n`;
}
