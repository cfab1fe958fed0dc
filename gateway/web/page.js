/** The live page: the form, the charts, the lanes of the workers and the table of decisions. */

import { logIn, showAccount } from "/web/account.js";
import * as chat from "/web/chat.js";
import { getHealth, getJson } from "/web/client.js";
import * as compare from "/web/compare.js";
import * as completion from "/web/completion.js";
import { belongTo } from "/web/conversations.js";
import { byId } from "/web/dom.js";
import * as decisions from "/web/decisions.js";
import * as lanes from "/web/lanes.js";
import * as live from "/web/live.js";
import * as settings from "/web/settings.js";

const CHECK_MS = 5000;
const RETRY_MS = 1000; // while the node does not serve
const EXAMPLE =
  "class TestParser(unittest.TestCase):\n    def test_empty(self):\n        self.assertEqual(parse(''), [])\n\n" +
  "    def test_one(self):\n        self.assertEqual(parse('a'), ['a'])\n\n";

let checking = false;
let timer = 0;
let names = ""; // of the models, or "" while unknown

/** Check the node now, and again later. */
async function check() {
  if (checking) return;
  checking = true;
  clearTimeout(timer);
  const outage = await findOutage();
  if (outage) {
    names = "";
    show(outage.message, outage.state);
  } else {
    show(names, "ready");
    live.connect();
  }
  checking = false;
  if (outage?.status === 401) logIn();
  else timer = setTimeout(check, outage ? RETRY_MS : CHECK_MS);
}

/** Return why the node does not serve, as `{message, state}`, or null after the models are known. */
async function findOutage() {
  try {
    const { status, reason, workers } = await getHealth();
    if (status === "failed") return { message: `The node has failed: ${reason}`, state: status };
    if (status === "unavailable") return { message: `No worker serves: ${reason}`, state: "failed" };
    if (status !== "ready") return { message: `The node is ${status}.`, state: status };
    const reasons = workers.map((worker) => worker.reason);
    if (reasons.length && reasons.every(Boolean)) {
      return { message: `No worker serves: ${reasons[0]}`, state: "failed" };
    }
    if (!names) await introduce();
    return null;
  } catch (error) {
    return { message: error.message, status: error.status, state: "failed" };
  }
}

/** Show the models and the version of the node. */
async function introduce() {
  const [{ data }, { version }] = await Promise.all([getJson("/v1/models"), getJson("/version")]);
  settings.offer(data);
  byId("version").textContent = `v${version}`;
  names = data.map(({ id }) => id).join(", ");
}

function show(words, state) {
  // Screen readers announce each change of a status.
  if (byId("node").textContent !== words) byId("node").textContent = words;
  byId("node").dataset.state = state;
}

/** Check the node and the session after the connection broke. */
function reconnect() {
  names = "";
  check();
}

function start() {
  settings.setUp();
  chat.setUp(decisions.follow);
  completion.setUp(EXAMPLE, decisions.follow);
  compare.setUp(EXAMPLE, decisions.follow);
  live.setUp(reconnect);
  decisions.setUp();
  lanes.setUp();
  check();
}

const session = await showAccount();
if (session.tenant) belongTo(session.tenant);
if (session.role !== null) start();
