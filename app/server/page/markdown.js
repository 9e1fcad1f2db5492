// Markdown to DOM nodes. Text of models becomes text nodes only, and links lead to web and mail addresses only.
//
// Blocks: paragraphs, headings, lists, quotes, tables, rules, and fenced code. A reply that is still growing is drawn
// again block by block: `renderBlocks` keeps the elements of blocks whose source has not changed.

import { copyButton, element } from "./dom.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`\s]*).*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 8; // of lists and quotes
const MAX_INLINE = 4000; // characters of one paragraph whose emphasis and links are looked for

/** Draw a text into an element, given the sources of the blocks that it shows already. Returns the new sources. */
export function renderBlocks(target, text, shown = []) {
  const sources = splitBlocks(text.replace(/\r\n?/g, "\n").split("\n"));
  let same = 0;
  while (same < shown.length && same < sources.length && shown[same] === sources[same]) same += 1;
  while (target.childNodes.length > same) target.lastChild.remove();
  for (const source of sources.slice(same)) target.append(block(source, 0));
  return sources;
}

/** Return the sources of the blocks. A blank line ends a block, except in code and lists. */
function splitBlocks(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = blockEnd(lines, at);
    blocks.push(lines.slice(at, end).join("\n").trimEnd());
    at = end;
  }
  return blocks;
}

/** Return the index after the last line of the block that starts at a line. */
function blockEnd(lines, start) {
  const fence = lines[start].match(FENCE);
  if (fence) return fenceEnd(lines, start, fence[2]);
  if (HEADING.test(lines[start]) || RULE.test(lines[start])) return start + 1;
  if (QUOTE.test(lines[start])) return runEnd(lines, start, (line) => QUOTE.test(line));
  if (ITEM.test(lines[start])) return listEnd(lines, start);
  if (isTable(lines, start)) return runEnd(lines, start, (line) => line.includes("|"));
  return runEnd(lines, start, (line, at) => line.trim() && !(at > start && startsBlock(lines, at)));
}

const startsBlock = (lines, at) =>
  [FENCE, HEADING, QUOTE, ITEM].some((start) => start.test(lines[at])) || isTable(lines, at);
const isTable = (lines, at) =>
  lines[at].includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && lines[at + 1].includes("-");

function runEnd(lines, start, holds) {
  let at = start + 1;
  while (at < lines.length && holds(lines[at], at)) at += 1;
  return at;
}

/** A fence ends at a line of the same characters, or at the end of the text. */
function fenceEnd(lines, start, fence) {
  for (let at = start + 1; at < lines.length; at += 1) {
    const line = lines[at].trim();
    if (line.length >= fence.length && line === fence[0].repeat(line.length)) return at + 1;
  }
  return lines.length;
}

/** A list continues with items, indented lines, and blank lines before either of them. */
function listEnd(lines, start) {
  let end = start + 1;
  for (let at = start + 1; at < lines.length; at += 1) {
    const line = lines[at];
    if (!line.trim()) continue;
    const follows = at === end && !startsBlock(lines, at);
    if (!ITEM.test(line) && !/^\s{2,}/.test(line) && !follows) break;
    end = at + 1;
  }
  return end;
}

function block(source, depth) {
  const lines = source.split("\n");
  const fence = lines[0].match(FENCE);
  if (fence) return code(lines, fence);
  const heading = lines.length === 1 && lines[0].match(HEADING);
  if (heading) return element(`h${Math.min(6, heading[1].length + 3)}`, {}, ...inline(heading[2]));
  if (lines.length === 1 && RULE.test(lines[0])) return element("hr");
  if (depth < MAX_DEPTH && QUOTE.test(lines[0]))
    return element(
      "blockquote",
      {},
      ...blocks(
        lines.map((line) => line.replace(QUOTE, "$1")),
        depth,
      ),
    );
  if (depth < MAX_DEPTH && ITEM.test(lines[0])) return list(lines, depth);
  if (isTable(lines, 0)) return table(lines);
  return element("p", {}, ...inline(source));
}

const blocks = (lines, depth) => splitBlocks(lines).map((source) => block(source, depth + 1));

function code(lines, fence) {
  const isClosed =
    lines.length > 1 && fenceEnd(lines, 0, fence[2]) === lines.length && lines.at(-1).trim().startsWith(fence[2]);
  const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const bar = element(
    "div",
    { class: "code-bar" },
    element("span", {}, fence[3] || "code"),
    copyButton("this code", () => text),
  );
  return element(
    "div",
    { class: "code" },
    bar,
    element("pre", { tabindex: 0, role: "group", "aria-label": "Code" }, element("code", {}, text)),
  );
}

/** Return a list. The indentation of an item decides which lines belong to it. */
function list(lines, depth) {
  const first = lines[0].match(ITEM);
  const isNumbered = /\d/.test(first[2]);
  const items = [];
  for (const line of lines) {
    const item = line.match(ITEM);
    if (item && item[1].length <= first[1].length + 1) items.push([item[3]]);
    else items.at(-1).push(line.replace(/^\s{1,4}/, ""));
  }
  const made = items.map((item) => element("li", {}, ...tight(blocks(item, depth))));
  const start = isNumbered ? parseInt(first[2], 10) : null;
  return element(isNumbered ? "ol" : "ul", { start: start === 1 ? null : start }, ...made);
}

/** Replace the first paragraph of an item by its content. */
const tight = (parts) => (parts[0]?.tagName === "P" ? [...parts[0].childNodes, ...parts.slice(1)] : parts);

function table(lines) {
  const cells = (line) =>
    line
      .trim()
      .replace(/^\||\|$/g, "")
      .split(/(?<!\\)\|/)
      .map((cell) => cell.trim().replaceAll("\\|", "|"));
  const row = (line, name) => element("tr", {}, ...cells(line).map((cell) => element(name, {}, ...inline(cell))));
  const head = element("thead", {}, row(lines[0], "th"));
  const body = element("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return element(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" },
    element("table", {}, head, body),
  );
}

// Each rule is tried at the first position where one of them matches; the earliest match wins.
const INLINE = [
  [/(`+)(?!`)([^]*?[^`])\1(?!`)/, (match) => element("code", {}, match[2].trim())],
  [/\\([\\`*_{}[\]()#+\-.!|>~])/, (match) => match[1]],
  [/\*\*(?=\S)([^]*?\S)\*\*/, (match, depth) => element("strong", {}, ...inline(match[1], depth))],
  [/(?<!\w)__(?=\S)([^]*?\S)__(?!\w)/, (match, depth) => element("strong", {}, ...inline(match[1], depth))],
  [/~~(?=\S)([^]*?\S)~~/, (match, depth) => element("s", {}, ...inline(match[1], depth))],
  [/\*(?=[^\s*])([^]*?[^\s*])\*(?!\*)/, (match, depth) => element("em", {}, ...inline(match[1], depth))],
  [/(?<!\w)_(?=\S)([^]*?\S)_(?!\w)/, (match, depth) => element("em", {}, ...inline(match[1], depth))],
  [
    /!?\[([^\]\n]*)\]\(\s*<?([^\s)>]*)>?(?:\s+["'][^"'\n]*["'])?\s*\)/,
    (match, depth) => link(match[2], inline(match[1], depth), match[0]),
  ],
  [/\bhttps?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]]/, (match) => link(match[0], [match[0]], match[0])],
  [/ {2,}\n/, () => element("br")],
];

/** Return the nodes of a text inside a block. */
function inline(text, depth = 0) {
  if (depth > MAX_DEPTH || text.length > MAX_INLINE) return [text];
  const nodes = [];
  while (text) {
    const [match, build] = earliest(text);
    if (!match) break;
    if (match.index) nodes.push(text.slice(0, match.index));
    nodes.push(build(match, depth + 1));
    text = text.slice(match.index + match[0].length);
  }
  if (text) nodes.push(text);
  return nodes;
}

function earliest(text) {
  let best = [null, null];
  for (const [pattern, build] of INLINE) {
    const match = text.match(pattern);
    if (match && (!best[0] || match.index < best[0].index)) best = [match, build];
  }
  return best;
}

/** Return a link to a web or mail address, or the source as text. */
function link(address, content, source) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return source;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return source;
  return element("a", { href: url.href, rel: "noopener noreferrer", target: "_blank", title: url.href }, ...content);
}
