/** Moves of running requests in words, and the table of the latest moves. */

import { byId, cells, clock, figure, link, milliseconds } from "/web/dom.js";

const WHY = {
  drain: "its worker is leaving",
  balance: "balance of memory",
  faster: "shorter total time",
  make_room: "room for a waiting request",
  failed: "its worker failed",
  stalled: "its worker made no progress",
  left: "its worker has left",
};

const STAYED = {
  ended: "the request ended first",
  taken: "another move was under way",
  no_room: "no other worker had room",
  behind: "the copy did not catch up",
  rejected: "the destination computed another token",
  late: "the copy took too long",
  failed: "the destination failed",
};

let shown = ""; // key of the rows in the table

/** Why a request moved. */
export function reasonOf({ reason, policy, explanation }) {
  const why = WHY[reason] ?? reason;
  return policy ? `${why} (${policy}): ${explanation}` : why;
}

/** What became of a move. */
export function outcomeOf({ end, blocks, num_bytes: bytes, gap_s: gap }) {
  if (end !== "moved") return `stayed: ${STAYED[end] ?? end}`;
  const copied = blocks ? [`${blocks} blocks`, `${figure(bytes / 1e6)} MB`] : [];
  return ["moved", ...copied, ...(gap === null ? [] : [`gap ${milliseconds(gap)}`])].join(", ");
}

/** A move in one sentence. */
export const describeMove = (move) => `To ${move.sink || "another worker"}: ${outcomeOf(move)}; ${reasonOf(move)}`;

/** List the latest moves. */
export function listMoves(moves) {
  const key = moves.map(({ request_id: id, move }) => `${id} ${move.ended_s}`).join();
  if (key === shown) return;
  shown = key;
  byId("moved").hidden = moves.length === 0;
  byId("moves").replaceChildren(...moves.map(row));
}

function row({ request_id: id, move }) {
  return cells("#moved", [clock(move.ended_s), link(id), move.source, move.sink || "–", reasonOf(move), outcomeOf(move)]);
}
