// Answers as people read them: paragraphs, lists, code. Built as elements, never as HTML.

import { h } from "./dom.js";

const INLINE = /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)/g;

function inline(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    parts.push(text.slice(at, found.index));
    parts.push(found[1] ? h("code", null, found[1].slice(1, -1)) : h("strong", null, found[2].slice(2, -2)));
    at = found.index + found[0].length;
  }
  parts.push(text.slice(at));
  return parts;
}

const FENCE = /^\s{0,3}```/;
const HEADING = /^#{1,6}\s+/;
const BULLET = /^\s*[-*]\s+/;
const NUMBER = /^\s*\d+[.)]\s+/;

export function prose(text) {
  const blocks = [];
  const lines = text.split("\n");
  let at = 0;
  const take = (is) => {
    const from = at;
    while (at < lines.length && is(lines[at])) at += 1;
    return lines.slice(from, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    if (FENCE.test(line)) {
      at += 1;
      const inside = take((each) => !FENCE.test(each));
      at += 1;
      blocks.push(h("pre", { tabindex: "0" }, h("code", null, inside.join("\n"))));
    } else if (HEADING.test(line)) {
      at += 1;
      blocks.push(h("h3", null, inline(line.replace(HEADING, ""))));
    } else if (BULLET.test(line)) blocks.push(h("ul", null, take((each) => BULLET.test(each)).map((each) => h("li", null, inline(each.replace(BULLET, ""))))));
    else if (NUMBER.test(line)) blocks.push(h("ol", null, take((each) => NUMBER.test(each)).map((each) => h("li", null, inline(each.replace(NUMBER, ""))))));
    else if (!line.trim()) at += 1;
    else blocks.push(h("p", null, inline(take((each) => each.trim() && !FENCE.test(each) && !HEADING.test(each) && !BULLET.test(each) && !NUMBER.test(each)).join("\n"))));
  }
  return blocks;
}
