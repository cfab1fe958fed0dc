/**
 * Markdown as elements, never as HTML source, so that a model cannot add scripts or load images.
 *
 * The libraries that need no build step return HTML, which would need a second library to clean it.
 * This is the part of GitHub's Markdown that models write: headings, lists, tables, quotes, code,
 * emphasis and links. Anything else stays text.
 */

import { copyButton, make } from "/web/dom.js";
import { highlight } from "/web/highlight.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}#{1,6}\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const TABLE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/;
const SAFE = /^(https?:|mailto:)/i;

// Bounds on the length keep the time linear for any text, because a model may write many openers.
const INLINE = new RegExp(
  [
    String.raw`\\(?<escaped>[!-/:-@[-${"`"}{-~])`,
    "(?<ticks>`+)(?<code>[^`]|[^`][^]{0,2000}?[^`])\\k<ticks>(?!`)",
    String.raw`\*\*(?=\S)(?<strong>[^]{0,2000}?\S)\*\*`,
    String.raw`\*(?=[^\s*])(?<em>[^]{0,2000}?[^\s*])\*(?!\*)`,
    String.raw`(?<!\w)_(?=[^\s_])(?<em2>[^]{0,2000}?[^\s_])_(?!\w)`,
    String.raw`~~(?=\S)(?<del>[^]{0,2000}?\S)~~`,
    String.raw`!?\[(?<label>[^\]]{0,500})\]\((?<url>[^()\s]{1,2000})\)`,
  ].join("|"),
  "gu",
);

const rendered = new WeakMap(); // box -> its blocks, as {source, element}

/** Return the elements of a text in Markdown, which may end within a block. */
export function render(text) {
  return parsed(text, []).map(({ element }) => element);
}

/**
 * Show a text in Markdown in a box. Blocks before the last two keep their elements when a text grows,
 * so that a selection, the focus and the place of a scrolled block survive.
 */
export function renderInto(box, text) {
  // Text that arrives later can only change the last block, and the one before that it interrupts.
  const known = (rendered.get(box) ?? []).slice(0, -2);
  const blocks = parsed(text, known);
  let same = 0;
  while (same < blocks.length && blocks[same] === known[same]) same += 1;
  while (box.childNodes.length > same) box.lastChild.remove();
  box.append(...blocks.slice(same).map(({ element }) => element));
  rendered.set(box, blocks);
}

function parsed(text, known) {
  try {
    return blocksOf(text.replace(/\r\n?/g, "\n").split("\n"), known);
  } catch (error) {
    if (error instanceof RangeError) return [{ source: null, element: make("p", {}, text) }]; // thousands of nested quotes
    throw error;
  }
}

const blocks = (lines) => blocksOf(lines, []).map(({ element }) => element);

/** Return the blocks of lines, as `{source, element}`, and reuse those that begin with known ones. */
function blocksOf(lines, known) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const old = known[found.length];
    const isKnown = old?.source && old.source.every((line, index) => line === lines[at + index]);
    const [element, next] = isKnown ? [old.element, at + old.source.length] : block(lines, at);
    if (!isKnown) known = []; // blocks after a change are new
    found.push(isKnown ? old : { source: lines.slice(at, next), element });
    at = next;
  }
  return found;
}

/** Return the block that begins at a line, and the number of the line after it. */
function block(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return fence(lines, at);
  if (HEADING.test(line)) return [heading(line), at + 1];
  if (RULE.test(line)) return [make("hr"), at + 1];
  if (QUOTE.test(line)) return quote(lines, at);
  if (ITEM.test(line)) return list(lines, at);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at);
}

/** A heading of any level, as the headings of the page end with the second. */
function heading(line) {
  const text = HEADING.exec(line)[1].trim().replace(/(^|\s)#+$/, "");
  return make("h3", {}, ...inline(text.trim()));
}

function fence(lines, at) {
  const [, mark, language] = FENCE.exec(lines[at]);
  const closes = (line) => line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  const code = make("code", { className: "block" }, ...highlight(text, language));
  const label = `Code ${language}`.trim();
  const bar = make("div", { className: "code-bar" }, make("span", {}, language), copyButton(() => text));
  const box = make("pre", { tabIndex: 0, role: "group", "aria-label": label }, code);
  return [make("div", { className: "code" }, bar, box), end + 1];
}

function quote(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [make("blockquote", {}, ...blocks(inner)), end];
}

/** A list. The lines of an item are those that are indented further than its mark. */
function list(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (!found || found[1].length > indent.length + 1 || /\d/.test(found[2]) !== ordered) break;
    const begin = end++;
    const belongs = (line) => !line.trim() || /^\s*/.exec(line)[0].length > indent.length + 1;
    while (end < lines.length && belongs(lines[end])) end += 1;
    const width = found[0].length;
    const rest = lines.slice(begin + 1, end).map((line) => line.slice(Math.min(width, /^\s*/.exec(line)[0].length)));
    items.push(make("li", {}, ...item([lines[begin].slice(width), ...rest])));
  }
  const start = ordered ? { start: parseInt(mark, 10) } : {};
  return [make(ordered ? "ol" : "ul", start, ...items), end];
}

/** The content of an item. A single paragraph needs no element of its own. */
function item(lines) {
  const content = blocks(lines);
  const [first, ...others] = content;
  return first?.tagName === "P" ? [...first.childNodes, ...others] : content;
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && TABLE.test(lines[at + 1]);
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const row = (line, tag, properties) =>
    make("tr", {}, ...cells(line).map((text) => make(tag, properties, ...inline(text))));
  const head = make("thead", {}, row(lines[at], "th", { scope: "col" }));
  const body = make("tbody", {}, ...lines.slice(at + 2, end).map((line) => row(line, "td", {})));
  const scroll = { className: "wide", tabIndex: 0, role: "group", "aria-label": "Table" };
  return [make("div", scroll, make("table", {}, head, body)), end];
}

const cells = (line) =>
  line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  return [make("p", {}, ...inline(lines.slice(at, end).map((line) => line.trimStart()).join("\n"))), end];
}

const interrupts = (lines, at) =>
  [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(lines[at])) || isTable(lines, at);

/** Return the nodes of a text within a block. */
function inline(text) {
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    nodes.push(text.slice(at, found.index), span(found));
    at = found.index + found[0].length;
  }
  return [...nodes, text.slice(at)].filter((node) => node !== "");
}

function span({ 0: whole, groups }) {
  const { escaped, code, strong, em, em2, label, url } = groups;
  if (escaped) return escaped;
  if (code !== undefined) return make("code", {}, code.replace(/^ (.*\S.*) $/, "$1"));
  if (strong) return make("strong", {}, ...inline(strong));
  if (em ?? em2) return make("em", {}, ...inline(em ?? em2));
  if (groups.del) return make("del", {}, ...inline(groups.del));
  if (!SAFE.test(url)) return whole;
  return make("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, label || url);
}
