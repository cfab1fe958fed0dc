/** The menu of models, and the settings in a drawer, which depend on the model and the tab. */

import { byId, make } from "/web/dom.js";
import { NAMES, showInLegend } from "/web/sources.js";
import * as tabs from "/web/tabs.js";

const MODES = ["ngram", "eagle", "draft_model", "sparse_self"]; // the modes that name a proposer

/** Default length of completions in tokens, because a model that only completes may never stop. */
const COMPLETION_TOKENS = 96;

let models = [];
let wanted = ""; // the model that the user chose last, which not every tab offers

const number = (id) => (byId(id).value === "" ? undefined : byId(id).valueAsNumber);
const canChat = ({ chat }) => chat !== false; // models of other servers do not report it

/** Set up the menu, the drawer and the tabs. */
export function setUp() {
  tabs.setUp(fitTab);
  byId("model").addEventListener("change", () => {
    wanted = byId("model").value;
    fitModel();
  });
  const drawer = byId("settings");
  byId("open-settings").addEventListener("click", () => drawer.showModal());
  byId("close-settings").addEventListener("click", () => drawer.close());
  // A click beside the drawer has the dialog itself as its target.
  drawer.addEventListener("click", (event) => event.target === drawer && drawer.close());
  drawer.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.target.tagName !== "INPUT") return;
    event.preventDefault(); // the key would press the button that gets the focus
    drawer.close();
  });
}

/** Offer the models that generate text, as entries of `/v1/models`. Upstreams do not report tasks. */
export function offer(found) {
  models = found.filter(({ tasks }) => tasks?.includes("generate") ?? true);
  offerTabs();
}

/** The entry of `/v1/models` with a name, or an empty object while it is unknown. */
export const modelOf = (name) => models.find(({ id }) => id === name) ?? {};

/** Offer the tabs of the models. The first tab is the chat of a model with a chat template. */
function offerTabs() {
  const compare = models.some(({ proposers }) => proposers?.length !== 0);
  tabs.offer({ compare, chat: models.some(canChat) }, models[0]?.chat ? "chat" : "completion");
}

/** Offer the models and the settings of the chosen tab. */
function fitTab() {
  const fitting = models.filter((one) => {
    if (tabs.kind === "chat") return canChat(one);
    return tabs.kind !== "compare" || one.proposers?.length !== 0;
  });
  choices("model", fitting.map(({ id }) => [id, id]));
  if (fitting.some(({ id }) => id === wanted)) byId("model").value = wanted;
  byId("system-field").hidden = tabs.kind !== "chat";
  fitModel();
}

/** Offer what the chosen model supports. Models of other servers do not report it. */
function fitModel() {
  const { proposers, simulated = false, default_parameters: usual } = modelOf(byId("model").value);
  // An empty field is not sent. A checkpoint without a default has that of the API.
  byId("temperature").placeholder = usual ? `${usual.temperature ?? 1} by default` : "the server's default";
  byId("top-p").placeholder = usual ? `${usual.top_p ?? 1} by default` : "the server's default";
  const length = usual?.max_new_tokens ? `${usual.max_new_tokens} by default` : "until the model stops";
  byId("max-tokens").placeholder = tabs.kind === "chat" ? length : String(COMPLETION_TOKENS);
  const modes = MODES.filter((mode) => proposers?.includes(mode));
  choices("mode", [["auto", "auto"], ["off", "off"], ...modes.map((mode) => [mode, NAMES[mode]])]);
  if (proposers) ["target", "grammar", ...proposers].forEach(showInLegend);
  byId("simulated").hidden = byId("simulated-note").hidden = !simulated;
}

/** Set the options of a list as `[value, name]`, and keep the chosen one if possible. */
function choices(id, options) {
  const chosen = byId(id).value;
  byId(id).replaceChildren(...options.map(([value, name]) => make("option", { value }, name)));
  if (options.some(([value]) => value === chosen)) byId(id).value = chosen;
}

/** Return the body of a streamed request of the chosen tab, without the prompt and empty fields. */
export function settings() {
  const form = byId("form").value;
  return {
    model: byId("model").value || undefined,
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_tokens: number("max-tokens") ?? (tabs.kind === "chat" ? undefined : COMPLETION_TOKENS),
    seed: number("seed"),
    response_format: form ? { type: form } : undefined,
    speculation: { mode: byId("mode").value, trace: true },
    stream: true,
    stream_options: { include_usage: true },
  };
}
