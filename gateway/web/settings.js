/** The settings of the form. */

import { byId } from "/web/dom.js";

const number = (id) => (byId(id).value === "" ? undefined : byId(id).valueAsNumber);

/** Return the body of a streamed request, without the prompt and empty fields. */
export function settings() {
  const form = byId("form").value;
  return {
    model: byId("model").value || undefined,
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    response_format: form ? { type: form } : undefined,
    speculation: { mode: byId("mode").value, trace: true },
    stream: true,
    stream_options: { include_usage: true },
  };
}
