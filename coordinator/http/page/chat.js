// A chat with the model, over the same API that every tool uses. It outlives a reload, for as long as its tab does.

import { ApiError, apiKey, ask, count, fixed, h, home, ms, say, sentence } from "./dom.js";
import { Attachments, blobOf } from "./attach.js";
import { feed } from "./feed.js";
import { Turn } from "./turn.js";

const TOP = 5; // rival tokens that are asked for beside each
const MODEL = "relayline.chat.model";
const SETTINGS = "relayline.chat";
const TURNS = `relayline.chat ${home}`; // behind a gateway each pipeline has its own
const KEPT_MAX = 4_000_000; // characters of a chat that a reload brings back; browsers take about five million
const TOO_LONG = "context_length_exceeded";
const NEAR = 160; // px: who has scrolled up by more than that reads, and is not scrolled
const SAMPLING = { temperature: 0.7, top_p: 1 }; // where the model recommends nothing
const ENDS = { length: "cut at the longest answer or the end of the context", tool_calls: "calls a tool", stopped: "stopped by you", failed: "broke off", content_filter: "held back" };

function field(name, label, given, kind = "input") {
  const input = h(kind, { id: `chat-${name}`, ...given });
  return { input, element: h("div", null, h("label", { for: `chat-${name}` }, label), input) };
}

// Reads server-sent events of a reply: the data of each, until [DONE].
async function* events(reply) {
  const reader = reply.body.getReader(); // not through a pipe: that drops what came last before an error
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const parts = text.split(/\r?\n\r?\n/);
    text = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

// Why there is no answer, or no whole one, in words.
function reasonOf(error, hasBegun) {
  if (error.status === 401) return apiKey() ? sentence(error.message) : "This server asks for a key.";
  if (error instanceof ApiError) return sentence(error.message);
  return hasBegun ? "The connection ended before the answer did." : "The coordinator does not answer.";
}

class Settings {
  constructor() {
    this.fields = {
      system: field("system", "System prompt", { rows: "3", placeholder: "None", dir: "auto" }, "textarea"),
      temperature: field("temperature", "Temperature", { type: "number", min: "0", max: "2", step: "0.1" }),
      top_p: field("top_p", "Top-p", { type: "number", min: "0", max: "1", step: "0.05" }),
      max_tokens: field("max_tokens", "Longest answer", { type: "number", min: "1", step: "1", placeholder: "Any" }),
      seed: field("seed", "Seed", { type: "number", min: "0", step: "1", placeholder: "Random" }),
      tools: field("tools", "Tools (JSON list)", { rows: "3", spellcheck: "false", placeholder: '[{"type": "function", …}]' }, "textarea"),
    };
    this.wantsTokens = h("input", { type: "checkbox", id: "chat-probs" });
    this.model = field("model", "Model", {}, "select");
    this.model.element.hidden = true;
    this.model.input.addEventListener("change", () => sessionStorage.setItem(MODEL, this.model.input.value));
    const kept = JSON.parse(sessionStorage.getItem(SETTINGS) || "{}");
    for (const [name, each] of Object.entries(this.fields)) {
      if (kept[name] !== undefined) each.input.value = kept[name];
      each.input.addEventListener("change", () => this.keep());
    }
    const { system, temperature, top_p: topP, max_tokens: most, seed, tools } = this.fields;
    this.element = h("details.settings", { open: !matchMedia("(max-width: 760px)").matches }, h("summary", null, "Settings"), h(".stack", null,
      this.model.element, system.element, h(".two", null, temperature.element, topP.element, most.element, seed.element), tools.element,
      h("label.check", null, this.wantsTokens, "Token probabilities")));
  }

  // Names of LoRA adapters are models too; without any there is nothing to choose.
  update() {
    const { model_id: model, adapters = [], recommended = {} } = feed.facts;
    for (const [name, usual] of Object.entries(SAMPLING)) this.fields[name].input.placeholder = recommended[name] ?? usual;
    const names = [model, ...adapters];
    const { input, element } = this.model;
    if (!model || names.join() === [...input.options].map((each) => each.value).join()) return;
    const chosen = input.value || sessionStorage.getItem(MODEL);
    input.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    if (names.includes(chosen)) input.value = chosen;
    element.hidden = !adapters.length;
  }

  keep() {
    sessionStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(Object.entries(this.fields).map(([key, item]) => [key, item.input.value]))));
  }

  value(name) {
    return this.fields[name].input.value;
  }

  // The body of a request for these messages. Throws ApiError for tools that are no JSON list.
  body(messages) {
    const system = this.value("system").trim() ? [{ role: "system", content: this.value("system") }] : [];
    const asked = { model: this.model.input.value || feed.facts.model_id, messages: [...system, ...messages], stream: true, stream_options: { include_usage: true } };
    if (feed.facts.recommended?.temperature === undefined) asked.temperature = SAMPLING.temperature;
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
      if (this.value(name) !== "") asked[name] = Number(this.value(name));
    }
    if (this.value("tools").trim()) {
      try {
        asked.tools = JSON.parse(this.value("tools"));
      } catch {
        throw new ApiError(400, "the tools are no JSON list");
      }
    }
    if (this.wantsTokens.checked) Object.assign(asked, { logprobs: true, top_logprobs: TOP });
    return JSON.stringify(asked);
  }
}

// What came of one answer: its text goes to its turn, times and counts stay here.
class Answer {
  constructor(turn) {
    Object.assign(this, { turn, began: performance.now(), first: 0, last: 0, tokens: 0, usage: null, reason: "" });
  }

  take(event) {
    const { turn } = this;
    turn.request = event.id || turn.request;
    if (event.usage) this.usage = event.usage;
    const choice = event.choices[0];
    if (!choice) return;
    const { delta } = choice;
    if (choice.finish_reason) this.reason = choice.finish_reason;
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      this.last = performance.now();
      this.first = this.first || this.last;
      this.tokens += 1;
    }
    turn.text += delta.content || "";
    turn.thought += delta.reasoning_content || "";
    for (const part of delta.tool_calls || []) {
      const call = (turn.calls[part.index] = turn.calls[part.index] || { id: "", name: "", arguments: "", result: "" });
      call.id += part.id || "";
      call.name += part.function.name || "";
      call.arguments += part.function.arguments || "";
    }
    if (choice.logprobs) turn.tokens.push(...choice.logprobs.content);
  }

  get numbers() {
    if (!this.first) return [this.reason ? ENDS[this.reason] || this.reason : "waits for its first token"];
    const n = this.usage ? this.usage.completion_tokens : this.tokens;
    const rate = n > 1 && this.last > this.first ? ((n - 1) * 1000) / (this.last - this.first) : null;
    const parts = [`${fixed(rate, 1)} tok/s`, `first after ${ms(this.first - this.began)}`, `${count(n)} token${n === 1 ? "" : "s"}`];
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details.cached_tokens;
      parts.push(`prompt of ${count(this.usage.prompt_tokens)}${cached ? `, ${count(cached)} cached` : ""}`);
    }
    const known = feed.state && feed.state.requests.find((each) => each.id === this.turn.request);
    if (known && known.drafted_tokens) parts.push(`${count(known.accepted_tokens)} of ${count(known.drafted_tokens)} drafts right`);
    if (this.reason && this.reason !== "stop") parts.push(ENDS[this.reason] || this.reason);
    return parts;
  }
}

class Chat {
  constructor() {
    this.turns = [];
    this.running = null;
    this.editing = null; // the turn that a message replaces, with all after it
    this.isSending = false; // images are still being read
    this.settings = new Settings();
    const button = (text, action, given = {}) => h("button", { type: "button", onclick: action, ...given }, text);
    this.log = h(".log", { role: "log", "aria-label": "Conversation" });
    this.hint = h("p.empty", null, "What you write here goes to the model over this server's API, like any client's request. Watch it form batches in the Pipeline view meanwhile.");
    this.input = h("textarea", { rows: "2", dir: "auto", placeholder: "Message; Enter sends, Shift+Enter adds a line", "aria-label": "Message" });
    this.send = h("button.first", { type: "submit" }, "Send");
    this.stop = button("Stop", () => this.running.abort(), { hidden: true, title: "Escape does the same" });
    this.again = button("Regenerate", () => this.regenerate(), { disabled: true });
    this.wrong = h("p.bad", { role: "alert" });
    this.status = h("p.vh", { role: "status" });
    this.seen = null; // the first turn that the model sees, where the chat is longer than its context; null: all
    this.limit = h("p.limit", null, "The model no longer sees what is above: the chat is longer than its context.");
    this.note = h(".editing", { hidden: true }, h("span", null, "Sending this replaces the message that you edit, and all after it."), button("Cancel", () => this.edit(null)));
    this.clear = button("New chat", () => this.begin(), { disabled: true });
    this.attached = new Attachments(this.input, () => this.turns.reduce((sum, turn) => sum + turn.images.length, 0), (text) => say(this.wrong, text));
    this.compose = h("form.compose", null, this.wrong, this.note, this.attached.element, this.input, h(".row", null, this.attached.button, this.again, this.stop, this.send), this.status);
    const talk = h(".talk", null, h(".head", null, h("h2", null, "Chat"), h(".tools", null, this.clear)), this.log, this.compose);
    this.attached.dropOn(talk);
    this.element = h(".chat", null, this.settings.element, talk);
    this.listen();
    this.restore();
  }

  listen() {
    this.settings.wantsTokens.addEventListener("change", () => this.turns.forEach((turn) => turn.draw(turn === this.current, this.showsTokens)));
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.compose.requestSubmit();
      } else if (event.key === "Escape" && this.running) this.running.abort();
      else if (event.key === "Escape" && this.editing) this.edit(null);
    });
    this.compose.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    addEventListener("pagehide", () => this.keep());
  }

  get showsTokens() {
    return this.settings.wantsTokens.checked;
  }

  get current() {
    return this.running && this.turns.at(-1);
  }

  // --- what is kept ---

  restore() {
    let kept = [];
    try {
      kept = JSON.parse(sessionStorage.getItem(TURNS) || "[]");
    } catch {
      kept = []; // not ours
    }
    for (const each of kept) this.add(Turn.from(each, this.acts)).draw(false, false);
    this.shown();
  }

  keep() {
    const text = JSON.stringify(this.turns.filter((turn) => !turn.isEmpty || turn.images.length).map((turn) => turn.kept));
    try {
      if (text.length > KEPT_MAX) throw new Error("too long");
      sessionStorage.setItem(TURNS, text);
    } catch {
      sessionStorage.removeItem(TURNS); // half a chat would be taken for a whole one
    }
  }

  // --- turns ---

  get acts() {
    return { edit: (turn) => this.edit(turn), results: (turn) => this.giveResults(turn) };
  }

  add(turn) {
    this.hint.remove();
    this.turns.push(turn);
    this.log.append(turn.element);
    return turn;
  }

  // Takes this turn and all after it out.
  cut(from) {
    for (const turn of this.turns.splice(from)) turn.forget();
    if (!this.turns.includes(this.seen)) this.seen = null;
    this.marked();
  }

  shown() {
    this.again.disabled = Boolean(this.running) || !this.turns.length;
    this.clear.disabled = !this.turns.length;
    this.stop.hidden = !this.running;
    this.send.disabled = Boolean(this.running);
    if (!this.turns.length) this.log.replaceChildren(this.hint);
  }

  begin() {
    if (this.running) this.running.abort();
    this.cut(0);
    this.edit(null);
    say(this.wrong, "");
    this.keep();
    this.shown();
    this.input.focus();
  }

  edit(turn) {
    if (turn && this.running) return;
    if (turn || this.editing) this.input.value = turn ? turn.text : "";
    if (turn) this.attached.replace(turn.images.map((image) => ({ ...image, shown: URL.createObjectURL(blobOf(image.url)) })));
    else if (this.editing) this.attached.replace([]);
    this.editing = turn;
    this.note.hidden = !turn;
    this.input.focus();
  }

  // Answers with what the called tools returned.
  giveResults(turn) {
    if (this.running) return;
    if (turn !== this.turns.at(-1)) this.cut(this.turns.indexOf(turn) + 1);
    this.answer();
  }

  async submit() {
    if (this.running || this.isSending) return;
    this.isSending = true;
    await this.attached.reading;
    this.isSending = false;
    const text = this.input.value.trim();
    if (!text && !this.attached.images.length) return;
    if (this.editing) this.cut(this.turns.indexOf(this.editing));
    this.editing = null;
    this.note.hidden = true;
    this.input.value = "";
    const turn = new Turn("user", this.acts);
    turn.text = text;
    turn.shows(this.attached.sent());
    turn.draw(false, false);
    this.add(turn);
    this.answer();
  }

  regenerate() {
    if (this.running || !this.turns.length) return;
    const last = this.turns.at(-1);
    if (last.role === "user") this.answer();
    else {
      this.turns.pop();
      last.element.remove();
      this.answer(last);
    }
  }

  // Asks for an answer to the turns; `before` is one that it replaces, and that comes back if there is none.
  async answer(before = null) {
    const turns = [...this.turns];
    const turn = this.add(new Turn("assistant", this.acts));
    const answer = new Answer(turn);
    this.running = new AbortController();
    say(this.wrong, "");
    say(this.status, "The model answers");
    this.shown();
    let frame = 0;
    const draw = () => {
      frame = 0;
      this.draw(answer);
    };
    draw();
    this.follow(true);
    let error = null;
    try {
      const reply = await this.reply(turns, this.running.signal);
      for await (const event of events(reply)) {
        if (event.error) throw new ApiError(200, event.error.message, event.error.code);
        answer.take(event);
        if (!frame) frame = requestAnimationFrame(draw);
      }
      if (!answer.reason) throw new TypeError("no end");
    } catch (caught) {
      error = caught;
    }
    cancelAnimationFrame(frame);
    this.end(answer, error, before);
  }

  // Asks with as many of the last turns as the model's context holds. Those before `seen` were too many.
  async reply(turns, signal) {
    const before = this.seen;
    for (;;) {
      const seen = turns.slice(Math.max(0, turns.indexOf(this.seen)));
      try {
        return await ask("/v1/chat/completions", { method: "POST", body: this.settings.body(seen.flatMap((turn) => turn.messages)), signal });
      } catch (error) {
        const questions = seen.filter((turn) => turn.role === "user");
        this.seen = error.code === TOO_LONG && questions.length > 1 ? questions[Math.ceil((questions.length - 1) / 2)] : before;
        this.marked();
        if (this.seen === before) throw error;
      }
    }
  }

  // A line above the first turn that the model still sees.
  marked() {
    if (this.seen && this.turns.includes(this.seen)) this.seen.element.before(this.limit);
    else this.limit.remove();
  }

  end(answer, error, before) {
    const { turn } = answer;
    this.running = null;
    const isStopped = error && error.name === "AbortError";
    if (error) answer.reason = isStopped ? "stopped" : "failed";
    if (this.turns.at(-1) !== turn) {
      this.shown(); // a new chat has begun meanwhile
      return;
    }
    if (error && !isStopped) say(this.wrong, reasonOf(error, Boolean(answer.first)));
    if (turn.isEmpty && error) this.undo(before);
    else {
      if (before) before.forget();
      this.draw(answer);
    }
    say(this.status, error ? "" : "The answer is complete");
    this.keep();
    this.shown();
    this.follow();
  }

  // Nothing came: all is as before the request, and what was to be sent can be sent again.
  undo(before) {
    this.cut(this.turns.length - 1);
    const last = this.turns.at(-1);
    if (before) this.add(before);
    else if (last && last.role === "user") {
      this.turns.pop();
      last.element.remove();
      this.attached.restore(last.images);
      this.input.value = [last.text, this.input.value].filter(Boolean).join("\n");
    }
  }

  draw(answer) {
    answer.turn.numbers = answer.numbers;
    answer.turn.says();
    answer.turn.draw(Boolean(this.running), this.showsTokens);
    this.follow();
  }

  // A chat that a reload brought back is drawn before the model's name is known.
  update() {
    this.attached.update();
    this.settings.update();
    if (this.model === feed.facts.model_id) return;
    this.model = feed.facts.model_id;
    for (const turn of this.turns) turn.says();
  }

  // The newest stays in view unless somebody has scrolled up to read.
  follow(isSent = false) {
    const page = document.documentElement;
    if (this.log.isConnected && (isSent || page.scrollHeight - page.scrollTop - innerHeight < NEAR)) page.scrollTop = page.scrollHeight;
  }
}

export function chatView() {
  const chat = new Chat();
  return {
    element: chat.element,
    show() {
      chat.follow(true);
      if (matchMedia("(pointer: fine)").matches) chat.input.focus({ preventScroll: true }); // else a keyboard would cover the page
    },
    update: () => chat.update(),
  };
}
