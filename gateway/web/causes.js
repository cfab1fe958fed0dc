/** The causes of decisions in words, and decisions grouped by them. */

import { count, percent } from "/web/dom.js";

const CAUSES = {
  requested_off: "the request asked for no drafts",
  no_proposer: "the worker has no proposer",
  missing_proposer: "the worker lacks the requested proposer",
  server_off: "speculation is off on the server",
  price_too_high: "no draft slot is worth its price",
  drafts_lose: "drafts have cost time",
  price: "the next draft slot is not worth its price",
  longest_draft: "every draft slot is worth its price",
  client_cap: "the request limits the drafts",
  fixed_length: "the policy has a fixed number of drafts",
  batch_table: "the policy has a table of batch sizes",
  batch_goodput: "the goodput of the batch",
  likeliest_slots: "the likeliest slots of the batch",
  upstream_length: "the request allows shorter drafts than the upstream's",
  upstream_pays: "drafts pay at the upstreams",
  upstream_does_not_pay: "drafts do not pay at the upstreams",
  capacity: "only upstreams of the other kind have capacity",
};

/** The cause of a decision in words. Some policies give only a reason. */
export const causeOf = ({ plan }) => CAUSES[plan.cause] ?? plan.reason;

/** Group decisions by their causes, as `{cause, words}`, the most frequent cause first. */
export function groups(decisions) {
  const found = new Map();
  for (const decision of decisions) {
    const cause = causeOf(decision);
    if (!found.has(cause)) found.set(cause, { cause, number: 0, drafted: 0, accepted: 0 });
    const group = found.get(cause);
    group.number += 1;
    group.drafted += decision.outcome?.drafted_tokens ?? 0;
    group.accepted += decision.outcome?.accepted_tokens ?? 0;
  }
  const sorted = [...found.values()].sort((a, b) => b.number - a.number);
  return sorted.map(({ cause, number, drafted, accepted }) => {
    const share = drafted ? `, ${percent(accepted / drafted)} of drafts accepted` : "";
    return { cause, words: `${count(number, "request")}: ${cause}${share}` };
  });
}
