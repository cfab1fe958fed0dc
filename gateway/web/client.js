/** Requests to the node that served this page, for JSON and server-sent events. */

/** An error response of the node. `status` is the HTTP status, or 0 within a stream. */
export class NodeError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const NO_KEY =
  "This node requires an API key. Reload the page and enter the key as the password.";

/** Fetch JSON from a path. Throws NodeError. */
export async function getJson(path) {
  const response = await fetch(path);
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** Post a body and yield the JSON of each event, until `[DONE]`. Throws NodeError. */
export async function* streamed(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new NodeError(event.error.message, 0);
    yield event;
  }
  throw new NodeError("The stream ended early.", 0);
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
  }
}

async function refusal(response) {
  if (response.status === 401) return new NodeError(NO_KEY, 401);
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The node responded with status ${response.status}.`;
  return new NodeError(message, response.status);
}
