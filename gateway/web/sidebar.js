/** The history of the chat: the list of kept conversations with its search, deletion and export. */

import * as conversations from "/web/conversations.js";
import { button, byId, count, make } from "/web/dom.js";

let current = null; // the open conversation
let handlers = {};

/**
 * Set up the history. `onOpen(conversation)` opens another conversation, or a new one without an
 * argument, and `onDelete(id)` is called before one is deleted, or all of them without an id.
 */
export function setUp(onOpen, onDelete) {
  handlers = { onOpen, onDelete };
  byId("fresh").addEventListener("click", () => open());
  byId("search").addEventListener("input", list);
  byId("export-markdown").addEventListener("click", () => save("md", "text/markdown", conversations.toMarkdown));
  byId("export-json").addEventListener("click", () => save("json", "application/json", conversations.toJson));
  byId("delete-all").addEventListener("click", () => {
    if (confirm("Delete all conversations of this page from this browser?")) remove();
  });
  byId("open-history").addEventListener("click", () => unfold(!isUnfolded()));
  byId("history").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !isUnfolded()) return;
    unfold(false);
    byId("open-history").focus();
  });
}

/** List the kept conversations, with the open one marked. */
export function show(conversation) {
  current = conversation;
  list();
}

const isUnfolded = () => byId("open-history").getAttribute("aria-expanded") === "true";

/** Show or hide the history on a narrow screen. Wide screens always show it. */
function unfold(shown) {
  byId("open-history").setAttribute("aria-expanded", String(shown));
  byId("history").classList.toggle("unfolded", shown);
}

function open(conversation) {
  unfold(false);
  handlers.onOpen(conversation);
}

function remove(id = null) {
  handlers.onDelete(id);
  conversations.remove(id);
  list();
  (byId("conversations").querySelector("button") ?? byId("fresh")).focus();
}

function list() {
  const wanted = byId("search").value;
  const found = wanted.trim() ? conversations.search(wanted) : conversations.kept();
  byId("conversations").replaceChildren(...found.map(entry));
  byId("found").textContent = wanted.trim() ? `${count(found.length, "conversation")} found` : "";
  byId("export-markdown").disabled = byId("export-json").disabled = !current.messages.length;
  byId("delete-all").disabled = conversations.kept().length === 0;
}

function entry(conversation) {
  const title = conversations.titleOf(conversation);
  const date = new Date(conversation.updated_ms).toLocaleString();
  const isOpen = conversation.id === current.id ? { "aria-current": "true" } : {};
  return make(
    "li",
    {},
    button(title, () => open(conversation), { className: "open", title: `${title} (${date})`, ...isOpen }),
    button("×", () => remove(conversation.id), { className: "delete", "aria-label": `Delete ${title}`, title: "Delete" }),
  );
}

/** Save the open conversation as a file of a type. */
function save(suffix, type, write) {
  const url = URL.createObjectURL(new Blob([write(current)], { type }));
  const name = conversations.titleOf(current).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  make("a", { href: url, download: `${name || "conversation"}.${suffix}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 0);
}
