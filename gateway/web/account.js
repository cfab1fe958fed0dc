/** The session of the browser: who is logged in, and the way out. */

import { getJson, logOut } from "/web/client.js";
import { byId } from "/web/dom.js";

/** Go to the page for logging in, which returns to this page. */
export function logIn() {
  const here = location.pathname + location.search;
  location.replace(here === "/" ? "/login" : `/login?next=${encodeURIComponent(here)}`);
}

/**
 * Show who is logged in, or log in first. Returns the session, whose `role` is null while the page
 * for logging in opens. It is empty if the node does not respond.
 */
export async function showAccount() {
  const session = await getJson("/session").catch(() => ({}));
  if (session.role === null) logIn();
  else if (session.required) {
    setTimeout(logIn, session.expires_s * 1e3 - Date.now());
    byId("who").textContent = `${session.tenant}, ${session.role}`;
    byId("account").hidden = false;
    byId("log-out").addEventListener("click", logOut);
  }
  return session;
}
