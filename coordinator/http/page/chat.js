// A chat with the model, over the same API that every tool uses.

import { apiKey, ask, count, fixed, h, ms, say } from "./dom.js";
import { Attachments, thumbs } from "./attach.js";
import { feed } from "./feed.js";
import { prose } from "./prose.js";

const TOP = 5; // rival tokens that are asked for beside each
const SETTINGS = "relayline.chat";

function field(name, label, given, kind = "input") {
  const input = h(kind, { id: `chat-${name}`, ...given });
  return { input, element: h("div", null, h("label", { for: `chat-${name}` }, label), input) };
}

// Reads server-sent events of a reply: the data of each, until [DONE].
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split(/\r?\n\r?\n/);
    text = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

class Turn {
  constructor(role) {
    this.role = role;
    this.text = "";
    this.images = []; // as attach.js makes them
    this.thought = "";
    this.calls = [];
    this.tokens = [];
    this.by = h(".by");
    this.thinking = h("div");
    this.fold = h("details", { hidden: true }, h("summary", null, "Thoughts"), this.thinking);
    this.seen = h(".seen", { hidden: true });
    this.body = h(".text");
    this.called = h("div");
    this.below = h("div");
    this.element = h(".turn", null, this.by, this.fold, this.seen, this.body, this.called, this.below);
    this.says([]);
  }

  says(parts) {
    this.by.replaceChildren(h("b", null, this.role === "user" ? "You" : feed.facts.model_id || "Model"), ...parts);
  }

  shows(images) {
    this.images = images;
    this.seen.hidden = !images.length;
    this.seen.replaceChildren(...thumbs(images));
  }

  // As a message of the API.
  get message() {
    if (!this.images.length) return { role: this.role, content: this.text };
    const parts = this.images.map((image) => ({ type: "image_url", image_url: { url: image.url } }));
    if (this.text) parts.push({ type: "text", text: this.text });
    return { role: this.role, content: parts };
  }

  draw(isRunning, showTokens) {
    this.fold.hidden = !this.thought;
    say(this.thinking, this.thought);
    if (showTokens && this.tokens.length) this.body.replaceChildren(...this.tokens.map((token) => this.token(token)));
    else if (this.role === "user") say(this.body, this.text);
    else this.body.replaceChildren(...prose(this.text));
    const last = this.body.lastElementChild || this.body;
    for (const each of this.body.querySelectorAll(".caret")) each.classList.remove("caret");
    this.body.classList.remove("caret");
    if (isRunning) last.classList.add("caret");
    this.called.replaceChildren(...this.calls.map((call) => h(".call", null, `${call.name}(${call.arguments})`)));
  }

  token(token) {
    const probability = Math.exp(token.logprob);
    const kind = probability < 0.3 ? ".p3" : probability < 0.6 ? ".p2" : probability < 0.9 ? ".p1" : "";
    const show = () => this.below.replaceChildren(this.probabilities(token));
    return h(`span.tok${kind}`, { tabindex: "0", title: `${(probability * 100).toFixed(1)} %`, onfocus: show, onmouseenter: show }, token.token);
  }

  probabilities(token) {
    const rivals = token.top_logprobs.some((each) => each.token === token.token) ? token.top_logprobs : [token, ...token.top_logprobs];
    return h(".probs", null, rivals.flatMap((each) => {
      const share = Math.exp(each.logprob);
      const bar = h("i");
      bar.style.width = `${Math.max(1, share * 90)}px`;
      return [h("span", null, JSON.stringify(each.token).slice(1, -1)), bar, h("span", null, `${(share * 100).toFixed(1)} %`)];
    }));
  }
}

export function chatView() {
  const kept = JSON.parse(sessionStorage.getItem(SETTINGS) || "{}");
  const system = field("system", "System prompt", { rows: "3", placeholder: "None" }, "textarea");
  const temperature = field("temperature", "Temperature", { type: "number", min: "0", max: "2", step: "0.1", value: "0.7" });
  const topP = field("top_p", "Top-p", { type: "number", min: "0", max: "1", step: "0.05", value: "1" });
  const most = field("max_tokens", "Longest answer", { type: "number", min: "1", step: "1", value: "512" });
  const seed = field("seed", "Seed", { type: "number", min: "0", step: "1", placeholder: "Random" });
  const tools = field("tools", "Tools (JSON list)", { rows: "3", spellcheck: "false", placeholder: '[{"type": "function", …}]' }, "textarea");
  const wantsTokens = h("input", { type: "checkbox", id: "chat-probs" });
  const fields = { system, temperature, top_p: topP, max_tokens: most, seed, tools };
  for (const [name, each] of Object.entries(fields)) {
    if (kept[name] !== undefined) each.input.value = kept[name];
    each.input.addEventListener("change", () => {
      sessionStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(Object.entries(fields).map(([key, item]) => [key, item.input.value]))));
    });
  }
  const turns = [];
  let running = null;
  const log = h(".log", { role: "log", "aria-label": "Conversation" });
  const hint = h("p.empty", null, "What you write here goes to the model over this server's API, like any client's request. Watch it form batches in the Pipeline view meanwhile.");
  log.append(hint);
  const input = h("textarea", { rows: "2", placeholder: "Message; Enter sends, Shift+Enter adds a line", "aria-label": "Message" });
  const send = h("button.first", { type: "submit" }, "Send");
  const stop = h("button", { type: "button", hidden: true, onclick: () => running && running.abort() }, "Stop");
  const again = h("button", { type: "button", disabled: true, onclick: () => regenerate() }, "Regenerate");
  const wrong = h("p.bad", { role: "alert" });
  const clear = h("button.quiet", { type: "button", onclick: () => {
    if (running) running.abort();
    for (const turn of turns.splice(0)) turn.images.forEach((image) => URL.revokeObjectURL(image.shown));
    log.replaceChildren(hint);
    again.disabled = true;
    say(wrong, "");
  } }, "New chat");
  const attached = new Attachments(input, () => turns.reduce((sum, turn) => sum + turn.images.length, 0), (text) => say(wrong, text));
  const compose = h("form.compose", null, attached.element, input, h(".row", null, attached.button, stop, again, send));
  let isSending = false; // images are still being read
  wantsTokens.addEventListener("change", () => {
    for (const turn of turns) turn.draw(false, wantsTokens.checked);
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      compose.requestSubmit();
    }
  });
  compose.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running || isSending) return;
    isSending = true;
    await attached.reading;
    isSending = false;
    const text = input.value.trim();
    if (!text && !attached.images.length) return;
    input.value = "";
    const turn = new Turn("user");
    turn.text = text;
    turn.shows(attached.sent());
    turn.draw(false, false);
    if (!turns.length) log.replaceChildren();
    turns.push(turn);
    log.append(turn.element);
    answer();
  });

  function regenerate() {
    if (running || !turns.length) return;
    if (turns.at(-1).role === "assistant") turns.pop().element.remove();
    answer();
  }

  function body() {
    const messages = turns.map((turn) => turn.message);
    if (system.input.value.trim()) messages.unshift({ role: "system", content: system.input.value });
    const asked = { model: feed.facts.model_id, messages, stream: true, stream_options: { include_usage: true } };
    const numbers = { temperature, top_p: topP, max_tokens: most, seed };
    for (const [name, each] of Object.entries(numbers)) {
      if (each.input.value !== "") asked[name] = Number(each.input.value);
    }
    if (tools.input.value.trim()) asked.tools = JSON.parse(tools.input.value);
    if (wantsTokens.checked) Object.assign(asked, { logprobs: true, top_logprobs: TOP });
    return JSON.stringify(asked);
  }

  async function answer() {
    const turn = new Turn("assistant");
    running = new AbortController();
    say(wrong, "");
    stop.hidden = false;
    send.disabled = again.disabled = true;
    const began = performance.now();
    const seen = { first: 0, tokens: 0, usage: null, id: "", reason: "" };
    let frame = 0;
    const draw = () => {
      frame = 0;
      turn.draw(true, wantsTokens.checked);
      turn.says(numbers(seen, began));
      follow();
    };
    try {
      const sent = body();
      log.append(turn.element);
      turns.push(turn);
      draw();
      const reply = await ask("/v1/chat/completions", { method: "POST", body: sent, signal: running.signal });
      for await (const event of events(reply)) {
        if (event.error) throw new Error(event.error.message);
        take(turn, event, seen);
        if (!frame) frame = requestAnimationFrame(draw);
      }
    } catch (error) {
      if (error.name === "AbortError") seen.reason = "stopped";
      else {
        seen.reason = "failed";
        const text = error instanceof SyntaxError ? "The tools are not a JSON list" : error.message;
        say(wrong, error.status === 401 && !apiKey() ? "The server asks for a key; reload the page to give one." : text);
      }
    }
    cancelAnimationFrame(frame);
    running = null;
    stop.hidden = true;
    send.disabled = false;
    again.disabled = !turns.length;
    if (!turn.text && !turn.thought && !turn.calls.length && seen.reason === "failed") {
      turn.element.remove();
      if (turns.at(-1) === turn) turns.pop();
      return;
    }
    seen.ended = performance.now();
    turn.draw(false, wantsTokens.checked);
    turn.says(numbers(seen, began));
    follow();
  }

  function take(turn, event, seen) {
    seen.id = event.id || seen.id;
    if (event.usage) seen.usage = event.usage;
    const choice = event.choices[0];
    if (!choice) return;
    const { delta } = choice;
    if (choice.finish_reason) seen.reason = choice.finish_reason;
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      seen.first = seen.first || performance.now();
      seen.last = performance.now();
      seen.tokens += 1;
    }
    turn.text += delta.content || "";
    turn.thought += delta.reasoning_content || "";
    for (const part of delta.tool_calls || []) {
      const call = (turn.calls[part.index] = turn.calls[part.index] || { name: "", arguments: "" });
      call.name += part.function.name || "";
      call.arguments += part.function.arguments || "";
    }
    if (choice.logprobs) turn.tokens.push(...choice.logprobs.content);
  }

  function numbers(seen, began) {
    if (!seen.first) return [h("span", null, seen.reason || "waits for its first token")];
    const n = seen.usage ? seen.usage.completion_tokens : seen.tokens;
    const rate = n > 1 && seen.last > seen.first ? ((n - 1) * 1000) / (seen.last - seen.first) : null;
    const parts = [`${fixed(rate, 1)} tok/s`, `first after ${ms(seen.first - began)}`, `${count(n)} tokens`];
    if (seen.usage) {
      const cached = seen.usage.prompt_tokens_details.cached_tokens;
      parts.push(`${count(seen.usage.prompt_tokens)} of prompt${cached ? `, ${count(cached)} cached` : ""}`);
    }
    const known = feed.state && feed.state.requests.find((each) => each.id === seen.id);
    if (known && known.drafted_tokens) parts.push(`${count(known.accepted_tokens)} of ${count(known.drafted_tokens)} drafts right`);
    if (seen.reason && seen.reason !== "stop") parts.push(seen.reason === "length" ? "cut at its longest" : seen.reason);
    const spans = parts.map((text) => h("span.num", null, text));
    if (seen.id) spans.push(h("a", { href: `#/requests/${encodeURIComponent(seen.id)}` }, "its batches"));
    return spans;
  }

  // The newest stays in view unless somebody has scrolled up to read.
  function follow() {
    const page = document.documentElement;
    if (log.isConnected && page.scrollHeight - page.scrollTop - innerHeight < 160) page.scrollTop = page.scrollHeight;
  }

  const settings = h("details.settings", { open: !matchMedia("(max-width: 760px)").matches }, h("summary", null, "Settings"), h(".stack", null,
    system.element, h(".two", null, temperature.element, topP.element, most.element, seed.element), tools.element,
    h("label.check", null, wantsTokens, "Token probabilities"), h("div", null, clear)));
  const talk = h("div", null, log, wrong, compose);
  attached.dropOn(talk);
  return {
    element: h(".chat", null, settings, talk),
    show: () => matchMedia("(pointer: fine)").matches && input.focus({ preventScroll: true }), // else a keyboard would cover the page
    update: () => attached.update(),
  };
}
