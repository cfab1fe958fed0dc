/** The sources of tokens. */

/** The names of the known sources. */
export const NAMES = {
  target: "target",
  ngram: "n-gram",
  eagle: "EAGLE-3",
  draft_model: "draft model",
  sparse_self: "sparse-self",
  prediction: "prediction",
  grammar: "grammar",
  unknown: "unknown",
};

/** The source of the token at an index of a step. */
export function source(step, place) {
  if (step === null) return "unknown";
  if (place >= step.accepted) return "target";
  return step.proposer in NAMES ? step.proposer : "other";
}

/** Show the legend of a source. */
export function showInLegend(from) {
  const entry = document.querySelector(`#legend [data-source="${from}"][hidden]`);
  if (entry) entry.hidden = false;
}
