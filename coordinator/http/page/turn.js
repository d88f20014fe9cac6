// One turn of a chat: what a person or the model said, with its images, thoughts, calls and token probabilities.

import { copyButton, h, say } from "./dom.js";
import { feed } from "./feed.js";
import { blobOf, partOf, thumbs } from "./attach.js";
import { Prose } from "./prose.js";

const KEPT = ["role", "text", "thought", "calls", "tokens", "numbers", "request"]; // of a turn, in what outlives a reload

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not complete yet, or never
  }
}

export class Turn {
  // `acts` are the functions edit(turn) and results(), for the buttons of a turn.
  constructor(role, acts) {
    Object.assign(this, { role, acts, text: "", thought: "", calls: [], tokens: [], numbers: [], request: "" });
    this.images = []; // as attach.js makes them
    this.by = h(".by");
    this.thinking = h("div");
    this.thinks = new Prose(this.thinking);
    this.summary = h("summary", null, "Thoughts");
    this.summary.addEventListener("click", () => (this.isFoldChosen = true));
    this.fold = h("details", { hidden: true }, this.summary, this.thinking);
    this.seen = h(".seen", { hidden: true });
    this.body = h(".text", { dir: "auto" });
    this.prose = new Prose(this.body);
    this.raw = h(".text.raw", { hidden: true, role: "group", "aria-label": "Tokens; arrow keys go from one to the next" });
    this.raw.addEventListener("keydown", (event) => this.walk(event));
    this.called = h("div");
    this.below = h(".below"); // in view while its turn is: the token may be far above the answer's end
    this.buttons = h(".acts", null, role === "user" ? h("button.quiet", { type: "button", onclick: () => acts.edit(this) }, "Edit") : null, copyButton(() => this.text, () => this.body));
    this.buttons.lastChild.className = "quiet";
    this.element = h(`.turn.${role}`, null, this.by, this.fold, this.seen, this.body, this.raw, this.called, this.below, this.buttons);
    this.says();
  }

  says() {
    const spans = this.numbers.map((text) => h("span.num", null, text));
    if (this.request) spans.push(h("a", { href: `#/requests/${encodeURIComponent(this.request)}` }, "its batches"));
    this.by.replaceChildren(h("b", null, this.role === "user" ? "You" : feed.facts.model_id || "Model"), ...spans);
  }

  shows(images) {
    this.images = images;
    this.seen.hidden = !images.length;
    this.seen.replaceChildren(...thumbs(images));
  }

  // As messages of the API: a call goes along once it has a result.
  get messages() {
    if (this.role === "user") {
      if (!this.images.length) return [{ role: "user", content: this.text }];
      const parts = this.images.map(partOf);
      if (this.text) parts.push({ type: "text", text: this.text });
      return [{ role: "user", content: parts }];
    }
    const done = this.calls.filter((call) => call.result);
    const said = { role: "assistant", content: this.text };
    if (done.length) said.tool_calls = done.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    return [said, ...done.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result }))];
  }

  get isEmpty() {
    return !this.text && !this.thought && !this.calls.length;
  }

  // What a reload brings back.
  get kept() {
    const images = this.images.map(({ name, url }) => ({ name, url }));
    return { ...Object.fromEntries(KEPT.map((name) => [name, this[name]])), images };
  }

  static from(kept, acts) {
    const turn = new Turn(kept.role === "user" ? "user" : "assistant", acts);
    for (const name of KEPT) turn[name] = kept[name];
    turn.shows(kept.images.map((image) => ({ ...image, shown: URL.createObjectURL(blobOf(image.url)) })));
    turn.says();
    return turn;
  }

  draw(isRunning, showTokens) {
    this.element.setAttribute("aria-busy", String(isRunning));
    this.foldThoughts(isRunning);
    const isRaw = showTokens && this.tokens.length > 0;
    this.raw.hidden = !isRaw;
    this.body.hidden = isRaw || !(this.text || isRunning);
    if (isRaw) this.drawTokens();
    else if (this.role === "user") say(this.body, this.text);
    else this.prose.show(this.text);
    this.caret(isRunning);
    if (this.calls.length) this.drawCalls(isRunning);
    this.buttons.hidden = isRunning || !this.text;
  }

  caret(isRunning) {
    for (const each of this.element.querySelectorAll(".caret")) each.classList.remove("caret");
    if (!isRunning) return;
    let last = this.raw.hidden ? this.body : this.raw;
    const inner = () => [...last.children].findLast((each) => !["TD", "TH", "BUTTON"].includes(each.tagName));
    while (last === this.body || /^(UL|OL|LI|BLOCKQUOTE|DIV)$/.test(last.tagName)) {
      const found = inner();
      if (!found || !/^(UL|OL|LI|BLOCKQUOTE|DIV|P|PRE|H[3-6])$/.test(found.tagName)) break;
      last = found;
    }
    last.classList.add("caret");
  }

  foldThoughts(isRunning) {
    const isThinking = isRunning && !this.text && !this.calls.length;
    this.fold.hidden = !this.thought;
    say(this.summary, isThinking ? "Thinking…" : "Thoughts");
    if (!this.isFoldChosen) this.fold.open = isThinking;
    this.thinks.show(this.thought);
  }

  drawCalls(isRunning) {
    if (!isRunning && this.called.dataset.done === "true") return; // somebody may be typing a result
    this.called.dataset.done = String(!isRunning);
    const give = h("button", { type: "button", disabled: !this.calls.some((call) => call.result), onclick: () => this.acts.results(this) }, this.calls.length > 1 ? "Send results" : "Send result");
    this.called.replaceChildren(...this.calls.map((call) => {
      const result = h("textarea", { rows: "1", dir: "auto", placeholder: "What it returned", "aria-label": `Result of ${call.name}` });
      result.value = call.result;
      result.addEventListener("input", () => {
        call.result = result.value;
        give.disabled = !this.calls.some((each) => each.result);
      });
      return h(".call", null, h("span", null, `${call.name}(${indented(call.arguments)})`), isRunning ? null : result);
    }), isRunning ? "" : give);
  }

  // Tokens that were drawn stay: an answer may have thousands.
  drawTokens() {
    for (const token of this.tokens.slice(this.raw.children.length)) this.raw.append(this.token(token));
  }

  token(token) {
    const probability = Math.exp(token.logprob);
    const kind = probability < 0.3 ? ".p3" : probability < 0.6 ? ".p2" : probability < 0.9 ? ".p1" : "";
    const show = () => this.below.replaceChildren(this.probabilities(token));
    const first = this.raw.children.length ? "-1" : "0"; // Tab goes past the tokens, arrow keys along them
    return h(`span.tok${kind}`, { tabindex: first, title: `${(probability * 100).toFixed(1)} %`, onfocus: show, onmouseenter: show }, token.token);
  }

  walk(event) {
    const at = [...this.raw.children].indexOf(document.activeElement);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.raw.children.length - 1 }[event.key];
    if (at < 0 || to === undefined || !this.raw.children[to]) return;
    event.preventDefault();
    this.raw.children[at].tabIndex = -1;
    this.raw.children[to].tabIndex = 0;
    this.raw.children[to].focus();
  }

  probabilities(token) {
    const rivals = token.top_logprobs.some((each) => each.token === token.token) ? token.top_logprobs : [token, ...token.top_logprobs];
    return h(".probs", null, rivals.flatMap((each) => {
      const share = Math.exp(each.logprob);
      const bar = h("i");
      bar.style.width = `${Math.max(1, share * 90)}px`;
      return [h("span", null, JSON.stringify(each.token)), bar, h("span", null, `${(share * 100).toFixed(1)} %`)];
    }));
  }

  forget() {
    for (const image of this.images) URL.revokeObjectURL(image.shown);
    this.element.remove();
  }
}
