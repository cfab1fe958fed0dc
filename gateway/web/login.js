/** The page for logging in. The key is only in the form, until the node sets a cookie for it. */

import { getJson, postJson } from "/web/client.js";
import { byId } from "/web/dom.js";

/** The page to return to, which must be one of this node. */
function next() {
  const wanted = new URL(new URLSearchParams(location.search).get("next") ?? "/", location.origin);
  return wanted.origin === location.origin ? wanted.href : "/";
}

const { required } = await getJson("/session").catch(() => ({ required: true }));
byId("form-login").hidden = !required;
byId("no-keys").hidden = required;

byId("form-login").addEventListener("submit", async (event) => {
  event.preventDefault();
  byId("problem-login").hidden = true;
  byId("run-login").disabled = true;
  try {
    await postJson("/session", { key: byId("key").value });
    byId("key").value = "";
    location.replace(next());
  } catch (error) {
    byId("problem-login").textContent = error.message;
    byId("problem-login").hidden = false;
    byId("key").focus();
  } finally {
    byId("run-login").disabled = false;
  }
});
