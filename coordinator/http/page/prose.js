// Answers as people read them: Markdown as models write it. Built as elements of a fixed set, never as HTML.

import { codeBlock, h, say } from "./dom.js";

const DEPTH_MAX = 8; // of lists and quotes in each other; what is deeper stays plain text
const SPAN = "{1,2000}?"; // of bold text and the like: a mark whose end is farther away is plain text

const FENCE = /^(\s*)(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const CELLS = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const LINK = /https?:\/\/[^\s<>"`|\\^{}]+/.source;
const INLINE = new RegExp(
  [
    /\\([*_`~|#])/.source,
    `(?<!\`)(\`{1,3})(?!\`)([^]${SPAN})(?<!\`)\\2(?!\`)`,
    `\\*\\*(?=\\S)([^]${SPAN})(?<=\\S)\\*\\*(?!\\*)`,
    `(?<![\\w*])\\*(?=[^\\s*])([^]${SPAN})(?<=\\S)\\*(?![\\w*])`,
    `(?<!\\w)_(?=[^\\s_])([^]${SPAN})(?<=\\S)_(?!\\w)`,
    `~~(?=\\S)([^]${SPAN})(?<=\\S)~~`,
    `(!?)\\[([^\\[\\]\\n]{1,500})\\]\\(<?(https?:\\/\\/(?:[^\\s()<>]|\\([^\\s()<>]*\\))+)>?(?:\\s+"[^"\\n]{0,500}")?\\)`,
    `(${LINK})`,
  ].join("|"),
  "g",
);

// A link of an answer: it says where it leads, since its text may say anything.
function linkTo(url, ...text) {
  return h("a", { href: url, title: url, target: "_blank", rel: "noopener noreferrer nofollow" }, text);
}

// The full stop after an address ends the sentence, and a bracket is part of it only where it was opened in it.
function addressIn(found) {
  let url = found.replace(/[.,;:!?'*_~\]]+$/, "");
  while (url.endsWith(")") && url.split(")").length > url.split("(").length) url = url.slice(0, -1).replace(/[.,;:!?]+$/, "");
  return url;
}

function inline(text, depth = 0) {
  if (depth > DEPTH_MAX) return [text];
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    const [all, escaped, , code, strong, em, em2, gone, image, label, target, address] = found;
    parts.push(text.slice(at, found.index));
    at = found.index + all.length;
    if (escaped) parts.push(escaped);
    else if (code) parts.push(h("code", { dir: "ltr" }, code.replace(/^ (.*\S.*) $/s, "$1")));
    else if (strong) parts.push(h("strong", null, inline(strong, depth + 1)));
    else if (em || em2) parts.push(h("em", null, inline(em || em2, depth + 1)));
    else if (gone) parts.push(h("s", null, inline(gone, depth + 1)));
    else if (target) parts.push(image ? linkTo(target, `image: ${label}`) : linkTo(target, inline(label, depth + 1)));
    else {
      const url = addressIn(address);
      parts.push(linkTo(url, url));
      at = found.index + url.length;
    }
  }
  parts.push(text.slice(at));
  return parts;
}

function cellsOf(line) {
  const cells = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);
  return cells.map((cell) => cell.trim());
}

function table(lines) {
  const sides = cellsOf(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "mid" : "n") : ""));
  const row = (kind, line) => h("tr", null, cellsOf(line).slice(0, sides.length).map((cell, at) => h(sides[at] ? `${kind}.${sides[at]}` : kind, { dir: "auto" }, inline(cell))));
  return h(".scroll", { tabindex: "0", role: "region", "aria-label": "Table" }, h("table", null, h("thead", null, row("th", lines[0])), h("tbody", null, lines.slice(2).map((line) => row("td", line)))));
}

const indentOf = (line) => line.length - line.trimStart().length;

// Reads the blocks of some lines, one after the other: each as its lines and a function that makes its element.
class Blocks {
  constructor(lines, depth) {
    this.lines = lines;
    this.depth = depth;
    this.at = 0;
    this.found = [];
  }

  read() {
    while (this.at < this.lines.length) {
      const from = this.at;
      const block = this.next();
      if (block) this.found.push({ source: this.lines.slice(from, this.at).join("\n"), ...block });
    }
    return this.found;
  }

  next() {
    const line = this.lines[this.at];
    const heading = HEADING.exec(line);
    if (!line.trim()) {
      this.at += 1;
      return null;
    }
    if (FENCE.test(line)) return this.code();
    if (heading || RULE.test(line)) {
      this.at += 1;
      return { make: () => (heading ? h(`h${Math.min(6, heading[1].length + 2)}`, { dir: "auto" }, inline(heading[2])) : h("hr")) };
    }
    const isFlat = this.depth < DEPTH_MAX;
    if (isFlat && QUOTE.test(line)) return this.quote();
    if (isFlat && ITEM.test(line)) return this.list();
    if (this.isTable(this.at)) return this.table();
    return this.paragraph();
  }

  code() {
    const [, indent, fence, language] = FENCE.exec(this.lines[this.at]);
    const end = new RegExp(`^\\s*${fence[0]}{${fence.length},}\\s*$`);
    const inside = [];
    for (this.at += 1; this.at < this.lines.length && !end.test(this.lines[this.at]); this.at += 1) {
      const line = this.lines[this.at];
      inside.push(line.slice(Math.min(indent.length, indentOf(line))));
    }
    this.at += 1;
    const text = inside.join("\n");
    return { kind: `code ${language}`, text, make: () => codeBlock(text, language) };
  }

  quote() {
    const from = this.at;
    while (this.at < this.lines.length && QUOTE.test(this.lines[this.at])) this.at += 1;
    const inside = this.lines.slice(from, this.at).map((line) => line.replace(QUOTE, ""));
    return { make: () => h("blockquote", { dir: "auto" }, make(inside, this.depth + 1)) };
  }

  isTable(at) {
    const [line, below] = [this.lines[at], this.lines[at + 1] || ""];
    return line.includes("|") && below.includes("-") && below.includes("|") && CELLS.test(below) && cellsOf(line).length === cellsOf(below).length;
  }

  table() {
    const from = this.at;
    this.at += 2;
    while (this.at < this.lines.length && this.lines[this.at].includes("|")) this.at += 1;
    const lines = this.lines.slice(from, this.at);
    return { make: () => table(lines) };
  }

  // A list: items of one kind. What stands farther to the right than an item's mark belongs to the item.
  list() {
    const [, first, mark] = ITEM.exec(this.lines[this.at]);
    const isNumbered = /\d/.test(mark);
    const items = [];
    while (this.at < this.lines.length) {
      const found = ITEM.exec(this.lines[this.at]);
      if (!found || RULE.test(this.lines[this.at]) || /\d/.test(found[2]) !== isNumbered || found[1].length > first.length + 1) break;
      const inside = this.item(found);
      while (inside.length && !inside.at(-1).trim()) inside.pop();
      items.push(inside);
    }
    const given = isNumbered ? { start: String(Number.parseInt(mark, 10)), dir: "auto" } : { dir: "auto" };
    return { make: () => h(isNumbered ? "ol" : "ul", given, items.map((inside) => this.itemElement(inside))) };
  }

  item([all, indent]) {
    const inside = [this.lines[this.at].slice(all.length)];
    const room = Math.min(all.length, indent.length + 4);
    let isOpen = Boolean(inside[0].trim()); // a line further to the left may still go on with its paragraph
    for (this.at += 1; this.at < this.lines.length; this.at += 1) {
      const line = this.lines[this.at];
      if (!line.trim()) {
        inside.push("");
        isOpen = false;
        continue;
      }
      const own = indentOf(line);
      if (own > indent.length + (ITEM.test(line) ? 1 : 0)) inside.push(line.slice(Math.min(own, room)));
      else if (isOpen && !ITEM.test(line) && !this.begins(this.at)) inside.push(line.trim());
      else break;
      isOpen = !FENCE.test(line);
    }
    return inside;
  }

  itemElement(inside) {
    const box = /^\[([ xX])\]\s+/.exec(inside[0] || "");
    const lines = box ? [inside[0].slice(box[0].length), ...inside.slice(1)] : inside;
    const parts = make(lines, this.depth + 1);
    // A lone paragraph is the item itself.
    if (parts[0] && parts[0].tagName === "P" && parts.slice(1).every((part) => ["UL", "OL"].includes(part.tagName))) parts.splice(0, 1, ...parts[0].childNodes);
    return h("li", null, box ? (box[1] === " " ? "☐ " : "☑ ") : null, parts);
  }

  // Whether a line begins a block where a paragraph stands before it.
  begins(at) {
    const line = this.lines[at];
    const item = ITEM.exec(line);
    if (!line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || this.isTable(at)) return true;
    if (this.depth >= DEPTH_MAX) return false;
    return QUOTE.test(line) || Boolean(item && item[3] && /^(\D|\d{1,3}\D)/.test(item[2])); // a year and a full stop begin none
  }

  paragraph() {
    const from = this.at;
    this.at += 1;
    while (this.at < this.lines.length && !this.begins(this.at)) this.at += 1;
    const text = this.lines.slice(from, this.at).join("\n");
    return { make: () => h("p", { dir: "auto" }, inline(text)) };
  }
}

function make(lines, depth) {
  return new Blocks(lines, depth).read().map((block) => block.make());
}

// The text of an element while it grows: blocks that are as they were stay, with what is selected in them.
export class Prose {
  constructor(element) {
    this.element = element;
    this.shown = [];
  }

  show(text) {
    const blocks = new Blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0).read();
    const kept = [];
    blocks.forEach((block, at) => {
      const before = this.shown[at];
      if (before && before.source === block.source) kept.push(before);
      else if (before && block.kind && before.kind === block.kind) {
        say(before.element.querySelector("pre"), block.text); // it keeps its place while it grows
        kept.push({ ...block, element: before.element });
      } else {
        const entry = { ...block, element: block.make() };
        if (before) before.element.replaceWith(entry.element);
        else this.element.append(entry.element);
        kept.push(entry);
      }
    });
    for (const entry of this.shown.slice(blocks.length)) entry.element.remove();
    this.shown = kept;
  }

  clear() {
    this.shown = [];
    this.element.replaceChildren();
  }
}
