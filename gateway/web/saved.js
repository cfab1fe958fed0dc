/** The headline: the time that drafts saved or cost in the last minutes. */

import { byId, duration, percent } from "/web/dom.js";

/** Show what drafts brought, as `/decisions` reports it, or nothing without finished requests. */
export function showSaved(drafts) {
  byId("saved").hidden = drafts.saved_share === null;
  if (drafts.saved_share === null) return;
  byId("saved-share").textContent = headline(drafts);
  byId("saved-seconds").textContent = seconds(drafts);
}

/** The headline in words. A tenant gets the figures of its own requests. */
export function headline({ period_s: period, tenant, drafted_tokens: drafted, saved_share: share }) {
  const when = `in the last ${Math.round(period / 60)} minutes`;
  const own = tenant !== null;
  if (Math.round(Math.abs(share) * 100) > 0) {
    const size = percent(Math.abs(share));
    if (share > 0) return `Drafts saved ${size} of ${own ? "your " : ""}decoding time ${when}`;
    return `Drafts cost ${own ? "you " : ""}${size} extra decoding time ${when}`;
  }
  if (!drafted) return `No drafts ${own ? "for your requests " : ""}${when}`;
  return `Drafts changed ${own ? "your " : ""}decoding time by less than 1% ${when}`;
}

/** The seconds in words. Requests that run together each count, so their sum exceeds the time that passes. */
function seconds({ saved_s: saved, decode_s: decode }) {
  const change = saved ? `${duration(Math.abs(saved))} ${saved > 0 ? "saved" : "lost"}, ` : "";
  return `Summed over requests: ${change}${duration(decode)} spent on decoding`;
}
