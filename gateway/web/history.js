/** The conversations of the chat, kept in this browser. */

const KEY = "draftgate-conversations";
const MOST = 30;

/** Return the conversations as `{id, system, messages}`, latest first. */
export function conversations() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? [];
  } catch {
    return []; // the browser keeps no data for this page
  }
}

/** Keep a conversation as the latest one. */
export function save(conversation) {
  store([conversation, ...without(conversation.id)].slice(0, MOST));
}

/** Delete a conversation. */
export function remove(id) {
  store(without(id));
}

const without = (id) => conversations().filter((one) => one.id !== id);

/** Store conversations, and drop the oldest ones if the browser has no space. */
function store(all) {
  for (let kept = all; ; kept = kept.slice(0, -1)) {
    try {
      return localStorage.setItem(KEY, JSON.stringify(kept));
    } catch {
      if (!kept.length) return undefined;
    }
  }
}
