/** Requests to the node this page came from: JSON, and answers as server-sent events. */

/** What the node said when it refused; `status` is HTTP's, or 0 within a stream. */
export class NodeError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const NO_KEY =
  "This node asks for an API key. Reload the page and, when the browser asks, give the key as the password.";

/** Get a path's JSON. Throws NodeError. */
export async function getJson(path) {
  const response = await fetch(path);
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** Post a body and yield each event's JSON, until `[DONE]`. Throws NodeError, also half-way. */
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
  throw new NodeError("The stream ended too early.", 0);
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
  const told = await response.json().catch(() => null);
  const message = told?.error?.message ?? `The node answered ${response.status}.`;
  return new NodeError(message, response.status);
}
