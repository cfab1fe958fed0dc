/** Requests to the node that served this page, for JSON and server-sent events. */

/** An error response of the node. `status` is the HTTP status, or 0 without a response. */
export class NodeError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const NO_KEY = "You are not logged in any more. Reload the page to log in.";
const SILENT = "The server does not respond.";
const HEALTH_MS = 5000; // a node responds in milliseconds, also under load

let leaving = false;

/** Fetch, but not while the page for logging in opens, when every request would be refused. */
const fetched = (path, options) => (leaving ? new Promise(() => {}) : fetch(path, options));

/** Fetch JSON from a path. Throws NodeError. */
export async function getJson(path) {
  const response = await reached(fetched(path));
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** Fetch the text at a path. Throws NodeError. */
export async function getText(path) {
  const response = await reached(fetched(path));
  if (!response.ok) throw await refusal(response);
  return response.text();
}

/** Post JSON, and return the JSON of the response. Throws NodeError. */
export async function postJson(path, body) {
  const headers = { "content-type": "application/json" };
  const response = await reached(fetched(path, { method: "POST", headers, body: JSON.stringify(body) }));
  if (!response.ok) throw await refusal(response, "");
  return response.json();
}

/** End the session, and open the page for logging in, which returns if the node does not respond. */
export async function logOut() {
  const ending = fetch("/session", { method: "DELETE" });
  leaving = true;
  await ending.catch(() => null);
  location.assign("/login");
}

/** Fetch `/health`, which a failed node answers with status 503. Throws NodeError. */
export async function getHealth() {
  const response = await reached(fetched("/health", { signal: AbortSignal.timeout(HEALTH_MS) }));
  if (!response.ok && response.status !== 503) throw await refusal(response);
  return response.json().catch(() => {
    throw new NodeError(`The node responded with status ${response.status}.`, response.status);
  });
}

/**
 * Post a body. Returns the headers of the response and `events`, which yields the JSON of each event
 * until `[DONE]`. Throws NodeError.
 */
export async function send(path, body, signal) {
  const response = await reached(
    fetched(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    }),
  );
  if (!response.ok) throw await refusal(response);
  return { headers: response.headers, events: parsed(response.body) };
}

/** Wait for a response. Browsers have no other sign of an unreachable server than a TypeError. */
async function reached(fetching) {
  try {
    return await fetching;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new NodeError(SILENT, 0);
  }
}

async function* parsed(stream) {
  try {
    for await (const data of eventData(stream)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new NodeError(event.error.message, 0);
      yield event;
    }
  } catch (error) {
    if (error instanceof TypeError) throw new NodeError("The connection to the server broke.", 0);
    throw error;
  }
  throw new NodeError("The stream ended early.", 0);
}

/** Yield the data of each server-sent event. Lines end with LF, CR or CRLF. */
export async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    // A CR at the end may be the first half of a CRLF.
    const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      if (line !== "" || !data.length) continue;
      yield data.join("\n");
      data = [];
    }
  }
}

/** The error of a response. `noKey` is its message without a session, or "" for the node's own. */
async function refusal(response, noKey = NO_KEY) {
  if (response.status === 401 && noKey) return new NodeError(noKey, 401);
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The node responded with status ${response.status}.`;
  return new NodeError(message, response.status);
}
