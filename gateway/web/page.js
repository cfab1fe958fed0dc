/** The live page: the form, the charts and the table of decisions. */

import { getJson } from "/web/client.js";
import { byId, make } from "/web/dom.js";
import * as decisions from "/web/decisions.js";
import * as generate from "/web/generate.js";
import * as live from "/web/live.js";

const RETRY_MS = 1000;

/** Wait until the node is ready, then show its model. */
async function introduce() {
  try {
    const { status } = await getJson("/health");
    if (status === "ready") return await name();
    node(`the node is ${status}`, status);
  } catch (error) {
    node(error.message, "failed");
    if (error.status === 401) return;
  }
  setTimeout(introduce, RETRY_MS);
}

async function name() {
  const [{ data }, { version }] = await Promise.all([getJson("/v1/models"), getJson("/version")]);
  byId("model").replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
  byId("version").textContent = `v${version}`;
  node(data.map(({ id }) => id).join(", "), "ready");
}

function node(words, state) {
  byId("node").textContent = words;
  byId("node").dataset.state = state;
}

generate.setUp(decisions.follow);
live.setUp();
decisions.setUp();
introduce();
