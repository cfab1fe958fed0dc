/** The settings of the form, which depend on the model. */

import { byId, make } from "/web/dom.js";
import { NAMES, showInLegend } from "/web/sources.js";
import * as tabs from "/web/tabs.js";

const MODES = ["ngram", "eagle", "draft_model", "sparse_self"]; // the modes that name a proposer

let models = [];

const number = (id) => (byId(id).value === "" ? undefined : byId(id).valueAsNumber);

/** Set up the choice of the model. */
export function setUp() {
  byId("model").addEventListener("change", fit);
}

/** Offer the models that generate text, as entries of `/v1/models`. Upstreams do not report tasks. */
export function offer(found) {
  models = found.filter(({ tasks }) => tasks?.includes("generate") ?? true);
  choices("model", models.map(({ id }) => [id, id]));
  fit();
}

/** Offer what the chosen model supports. Models of other servers do not report it. */
function fit() {
  const { chat, proposers } = models.find(({ id }) => id === byId("model").value) ?? {};
  const modes = MODES.filter((mode) => proposers?.includes(mode));
  choices("mode", [["auto", "auto"], ["off", "off"], ...modes.map((mode) => [mode, NAMES[mode]])]);
  if (proposers) ["target", "grammar", ...proposers].forEach(showInLegend);
  tabs.offer({ compare: proposers?.length !== 0, chat: chat !== false });
}

/** Set the options of a list as `[value, name]`, and keep the chosen one if possible. */
function choices(id, options) {
  const chosen = byId(id).value;
  byId(id).replaceChildren(...options.map(([value, name]) => make("option", { value }, name)));
  if (options.some(([value]) => value === chosen)) byId(id).value = chosen;
}

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
