// Requests, and the life of one: its way through the stages, batch by batch.

import { Keyed, ApiError, ask, colour, count, fitCanvas, fixed, forgetColours, frozen, h, heading, inkOn, mark, ms, none, percent, plural, say, sentence } from "./dom.js";
import { feed } from "./feed.js";
import { cancel, tracing } from "./steer.js";
import { short } from "./timeline.js";

const REFRESH_MS = 2000; // of a running request that is shown
const ROWS_SHOWN = 120; // batches in the table at once
const LANE = 34;
const TOKENS_AROUND = 5; // on each side of an answer's middle, in what is enlarged at first

const COLUMNS = [
  ["Request", ""], ["State", ""], ["Prompt", "n"], ["Cached", "n"], ["Tokens", "n"], ["Drafts accepted", "n"], ["Queue", "n"], ["First token", "n"], ["tok/s", "n"], ["Took", "n"], ["Actions", "act"],
];
const ROOMY = [3, 5, 6]; // columns for a wide page
const SPARE = [7, 8, 9]; // columns that a list beside a request leaves to it, on a page that is not wide

const isEnded = (item) => ["done", "failed"].includes(item.state);

// `wide`: with the columns that only a whole page has room for.
export function requestRows(open, wide = true) {
  const body = h("tbody");
  const empty = h("p.empty.pad", null, "No request is remembered yet.");
  const table = h("table", null, h("thead", null, h("tr", null, COLUMNS.map(heading))), body);
  const fold = (cells) => {
    ROOMY.forEach((at) => (wide ? cells[at].classList.add("roomy") : (cells[at].hidden = true)));
    if (!wide) SPARE.forEach((at) => cells[at].classList.add("spare"));
  };
  fold(table.tHead.rows[0].cells);
  table.hidden = empty.hidden = true; // until something is known
  let selected = "";
  const rows = new Keyed(
    body,
    (item) => {
      const button = h("button.link", { type: "button", onclick: () => open(item.id) }, short(item.id));
      button.title = item.id;
      const cells = COLUMNS.map(([, side]) => h(side ? `td.${side}` : "td"));
      cells[0].append(button);
      fold(cells);
      const element = h("tr.pick", { onclick: (event) => event.target === button || open(item.id) }, cells);
      const bar = h("i");
      const meter = h("span.meter", { "aria-hidden": "true", hidden: true }, bar);
      const dot = h("span.dot", { "aria-hidden": "true" });
      const word = h("span");
      cells[1].append(dot, word, " ", meter);
      const row = { element, cells, dot, word, bar, meter, item };
      row.stop = h("button.small", { type: "button", hidden: true, "aria-label": `Cancel ${short(item.id)}`, onclick: (event) => {
        event.stopPropagation();
        cancel(row.item);
      } }, "Cancel…");
      cells.at(-1).append(row.stop);
      return row;
    },
    (row, item) => {
      const { cells } = row;
      const isRunning = !isEnded(item);
      row.item = item;
      row.stop.hidden = !isRunning || Boolean(frozen);
      row.dot.className = `dot ${item.state === "failed" || item.state === "paused" ? "bad" : isRunning ? "ok" : ""}`;
      say(row.word, item.error ? item.error.replaceAll("_", " ") : item.choices > 1 ? `${item.state}, ${item.choices} choices` : item.state);
      row.meter.hidden = item.state !== "prefill";
      if (item.state === "prefill") row.bar.style.width = `${(100 * item.read_tokens) / Math.max(1, item.prompt_tokens)}%`;
      say(cells[2], item.state === "prefill" ? `${count(item.read_tokens)} of ${count(item.prompt_tokens)}` : count(item.prompt_tokens));
      say(cells[3], item.cached_tokens ? count(item.cached_tokens) : none);
      say(cells[4], count(item.tokens));
      say(cells[5], item.drafted_tokens ? `${count(item.accepted_tokens)} of ${count(item.drafted_tokens)}` : none);
      say(cells[6], ms(item.queue_ms));
      say(cells[7], ms(item.ttft_ms));
      say(cells[8], fixed(item.tokens_per_s, 1));
      say(cells[9], ms(item.took_ms));
      row.element.setAttribute("aria-selected", String(item.id === selected));
    },
  );
  return {
    element: h(".panel.scroll", { tabindex: "0", role: "region", "aria-label": "Table of requests" }, table, empty),
    update(requests, most) {
      const items = requests.slice(0, most);
      table.hidden = !items.length;
      empty.hidden = Boolean(items.length);
      mark(table, "no-acts", frozen || items.every(isEnded));
      rows.show(items, (item) => item.id);
    },
    select(id) {
      selected = id;
    },
  };
}

// Where the page is one column, what was chosen in a list would stay below the window.
function reveal(element) {
  const { top, bottom } = element.getBoundingClientRect();
  if (top > innerHeight / 2 || bottom < 0) element.scrollIntoView();
}

export function requestsView() {
  let wanted = "";
  let found = null;
  let timer = 0;
  let asked = 0;
  let isChosen = false; // by a person, since its trace was last shown
  const list = requestRows((id) => {
    location.hash = `#/requests/${encodeURIComponent(id)}`;
  }, false);
  const input = h("input", { id: "find", type: "search", placeholder: "id or x-request-id", autocomplete: "off", spellcheck: "false" });
  const form = h("form.row.find", { role: "search" }, h("label.vh", { for: "find" }, "Request id"), input, h("button", { type: "submit" }, "Open"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (input.value.trim()) location.hash = `#/requests/${encodeURIComponent(input.value.trim())}`;
  });
  const detail = h("div");
  const traced = tracing();
  const life = new Life();
  const element = h("section", null,
    h(".split", null,
      h("div", null, h(".head", null, h("h2", null, "Requests"), h(".tools", null, form)), list.element, traced.element),
      detail));

  async function load() {
    clearTimeout(timer);
    if (!wanted || document.hidden) return;
    const mine = (asked += 1);
    try {
      const reply = await ask(`/v1/traces/${encodeURIComponent(wanted)}`);
      const trace = await reply.json();
      if (mine !== asked) return;
      found = trace;
      if (!life.element.isConnected) detail.replaceChildren(life.element);
      life.update(found);
      if (isChosen) reveal(detail);
      isChosen = false;
      if (found.is_running) timer = setTimeout(load, REFRESH_MS);
    } catch (error) {
      if (mine !== asked) return;
      const text = error instanceof ApiError ? error.message : "The coordinator does not answer.";
      detail.replaceChildren(h("p.empty", null, sentence(text)));
    }
  }

  function placeholder() {
    detail.replaceChildren(h("p.empty", null, "Choose a request to see its way through the stages: its batches, the other requests in them, how long it waited, and the time of each step compared with the prediction."));
  }

  placeholder();
  return {
    element,
    show(id) {
      if (id && id !== wanted) {
        wanted = id;
        found = null;
        isChosen = true;
        life.fresh();
      }
      list.select(wanted);
      if (!wanted && feed.state && feed.state.requests.length) wanted = feed.state.requests[0].id;
      list.select(wanted);
      load();
      traced.look();
    },
    hide() {
      clearTimeout(timer);
      asked += 1;
    },
    recolour() {
      forgetColours();
      life.draw();
    },
    update() {
      if (!wanted && feed.state.requests.length) this.show("");
      list.update(feed.state.requests, 104);
    },
  };
}

const BATCHES = [
  ["At", "n", "Since the request came"],
  ["Stage", "n"],
  ["Phase", ""],
  ["Position", "n", "Of its first row in the context"],
  ["Rows", "n", "Its rows of all rows of the native step, and rows of padding"],
  ["Wait", "n", "Of its rows, from their arrival at the stage to the step"],
  ["Step", "n", "Time of the native step"],
  ["Predicted", "n", "Time of the step as the cost curve gives it, and by how much the step took more or less"],
  ["Closed by", "", "Why the batch took no more rows"],
  ["Upstream", "n", "Wait at the sender of the rows, a stage or the coordinator. Granted: the last stage sent the token back, and the coordinator was not waited for"],
  ["Queue", "n", "Rows that waited at the stage before and after the step"],
  ["Mates", "", "Other requests with rows in the step"],
];

// Where the time of an answer went: a name, the parts of it that the trace states, and a colour.
const TIMES = [
  ["stages computing", ["compute"], "0"],
  ["on the way to the stages", ["hop"], "1"],
  ["in the stages' queues", ["queue"], "6"],
  ["placing, encoding, sampling", ["handle"], "2"],
  ["on the way back", ["back"], "4"],
  ["the coordinator", ["deciding", "taking"], "3"],
  ["waiting for its group", ["group"], "5"],
  ["paused", ["paused"], "p"],
  ["not known", ["earlier", "rest"], "7"],
];

function timesOf(decode) {
  const of = (part) => [decode[`${part}_ms`] ?? 0].flat().reduce((sum, each) => sum + each, 0);
  const whole = Math.max(1e-9, decode.took_ms);
  return TIMES.map(([name, parts, shade]) => ({ name, shade, share: parts.reduce((sum, part) => sum + of(part), 0) / whole })).filter(({ share }) => share >= 0.005);
}

// One request: phases and batches over its whole time, a part of that enlarged, and the batches of the part as a table.
class Life {
  constructor() {
    this.title = h("h2");
    this.jaeger = h("a", { target: "_blank", rel: "noreferrer", hidden: true }, "Open in Jaeger");
    this.sub = h("p");
    this.facts = h("dl.facts");
    this.timesBar = h(".cutbar.slim", { "aria-hidden": "true" });
    this.timesList = h(".legend");
    this.times = h(".pad", { hidden: true }, h(".head", null, h("h3", null, "Where the time of its tokens went"), this.timesList), this.timesBar);
    this.whole = h("canvas", { tabindex: "0", role: "slider", "aria-label": "Part of the request that is enlarged", "aria-valuemin": "0", "aria-valuemax": "100" });
    this.close = h("canvas", { role: "img" });
    this.choice = h(".seg", { role: "group", "aria-label": "Choice" });
    this.events = h("ul.events", { hidden: true });
    this.body = h("tbody");
    this.note = h("p");
    this.picked = null;
    const head = h("thead", null, h("tr", null, BATCHES.map(heading)));
    this.element = h("div", null,
      h(".head", null, this.title, this.sub, h(".tools", null, this.choice, this.jaeger)),
      h(".panel", null, this.facts, this.times,
        h(".pad.water", null, h(".head", null, h("h3", null, "Whole"), h("p", null, "drag or use the arrow keys to choose what is enlarged below")), this.whole),
        h(".pad.water", null, h(".head", null, h("h3", null, "Enlarged"), h(".legend", null, h("span", null, h("i.k0"), "with its rows"), h("span", null, h("i.kp"), "its prompt"), h("span", null, "thin line: its wait"))), this.close),
        this.events),
      h("section", null, h(".head", null, h("h2", null, "Batches"), this.note),
        h(".panel.tall", { tabindex: "0", role: "region", "aria-label": "Table of batches" }, h("table", null, head, this.body))));
    this.fresh();
    const seek = (event) => {
      if (!event.buttons || !this.bars) return;
      const box = this.whole.getBoundingClientRect();
      this.centre(((event.clientX - box.left - 52) / (box.width - 52)) * this.length);
    };
    this.whole.addEventListener("pointerdown", (event) => {
      this.whole.setPointerCapture(event.pointerId);
      seek(event);
    });
    this.whole.addEventListener("pointermove", seek);
    this.whole.addEventListener("keydown", (event) => {
      const span = this.window[1] - this.window[0];
      const moves = { ArrowLeft: -0.5, ArrowRight: 0.5, PageDown: 3, PageUp: -3 };
      if (event.key in moves) this.centre((this.window[0] + this.window[1]) / 2 + moves[event.key] * span);
      else if (event.key === "Home") this.centre(0);
      else if (event.key === "End") this.centre(this.length);
      else if (event.key === "+") this.zoom(0.67);
      else if (event.key === "-") this.zoom(1.5);
      else return;
      event.preventDefault();
    });
    new ResizeObserver(() => this.draw()).observe(this.whole);
  }

  fresh() {
    this.window = null;
    this.stream = 0;
    this.bars = null;
  }

  centre(at) {
    const span = this.window[1] - this.window[0];
    const from = Math.max(0, Math.min(this.length - span, at - span / 2));
    this.window = [from, from + span];
    this.isChosen = true;
    this.draw();
    this.list();
  }

  zoom(by) {
    const middle = (this.window[0] + this.window[1]) / 2;
    const span = Math.min(this.length, Math.max(1, (this.window[1] - this.window[0]) * by));
    this.window = [middle, middle];
    this.window = [Math.max(0, middle - span / 2), Math.min(this.length, middle + span / 2)];
    this.draw();
    this.list();
  }

  update(trace) {
    this.trace = trace;
    const stream = trace.streams[Math.min(this.stream, trace.streams.length - 1)];
    say(this.title, short(trace.id || trace.request_id));
    this.title.title = trace.id || trace.request_id;
    const state = trace.is_running ? "running" : trace.error || `${trace.status || "no answer"}`;
    say(this.sub, `${trace.route} · ${state} · x-request-id ${trace.request_id}`);
    const base = feed.facts.jaeger_url;
    this.jaeger.hidden = !(base && trace.trace_id);
    if (!this.jaeger.hidden) this.jaeger.href = `${base}/trace/${trace.trace_id}`;
    this.choice.hidden = trace.streams.length < 2;
    this.choice.replaceChildren(...(trace.streams.length > 1 ? trace.streams : []).map((each, index) =>
      h("button", { type: "button", "aria-pressed": String(index === this.stream), onclick: () => {
        this.stream = index;
        this.window = null;
        this.update(this.trace);
      } }, `choice ${index}`)));
    if (!stream) {
      this.facts.replaceChildren(h("div", null, h("dt", null, "Nothing left"), h("dd", null, trace.error || "not admitted yet")));
      return;
    }
    const gaps = stream.itl_ms;
    const right = stream.drafted_tokens ? `${stream.accepted_tokens} of ${stream.drafted_tokens}` : none;
    const fact = (name, value, more) => h("div", null, h("dt", null, name), h("dd", null, value, more ? h("small", null, ` ${more}`) : ""));
    const files = trace.media || [];
    const kept = files.filter((file) => file.kept).length;
    this.facts.replaceChildren(
      ...(files.length ? [fact("Media", ms(trace.media_ms), kept ? `${kept} of ${files.length} kept` : `${files.length} ${plural(files.length, "file")}`)] : []),
      fact("Queue", ms(stream.queue_ms)),
      fact("Prompt", count(stream.prompt_tokens), stream.copied_tokens ? `${count(stream.copied_tokens)} cached` : "tokens"),
      fact("First token", ms(stream.ttft_ms)),
      fact("Answer", count(stream.tokens), stream.finish_reason || "so far"),
      fact("Each token", gaps ? ms(gaps.p50) : none, gaps ? `p95 ${ms(gaps.p95)}` : ""),
      fact("Drafts", right, stream.drafted_tokens ? "accepted" : ""),
      fact("Took", ms(trace.duration_ms)),
    );
    const times = stream.time && stream.time.decode ? timesOf(stream.time.decode) : [];
    this.times.hidden = !times.length;
    this.timesList.replaceChildren(...times.map(({ name, shade, share }) => h("span", null, h(`i.k${shade}`), `${name} ${percent(share)}`)));
    this.timesBar.replaceChildren(...times.map(({ shade, share }) => {
      const part = h(`div.k${shade}`);
      part.style.flex = `${share} 0 0`;
      return part;
    }));
    this.events.hidden = !stream.events.length && !stream.shared_with;
    this.events.replaceChildren(
      ...(stream.shared_with ? [h("li", null, `Shares the session of ${short(stream.shared_with)}: the same request, computed once.`)] : []),
      ...stream.events.map((event) => h("li", null, `${event.name} at ${ms(event.at_ms)}${event.detail ? `: ${event.detail}` : ""}`)));
    this.shown = stream;
    this.length = Math.max(1, trace.duration_ms);
    this.bars = stream.stages.flatMap((stage) => (stage.batches || []).map((batch) => ({ ...batch, stage: stage.stage, end_ms: batch.at_ms + batch.decode_ms })));
    this.bars.sort((left, right2) => left.at_ms - right2.at_ms || left.stage - right2.stage);
    const most = this.bars.filter((bar) => bar.phase === "decode").map((bar) => bar.rows);
    this.most = Math.max(1, ...most);
    if (!this.window || (trace.is_running && !this.isChosen)) this.window = this.firstWindow();
    this.draw();
    this.list();
  }

  firstWindow() {
    const [first] = this.bars;
    const steps = this.bars.filter((bar) => bar.phase === "decode" && bar.stage === first.stage);
    if (!steps.length) return [0, this.length];
    const middle = steps.length >> 1;
    const from = steps[Math.max(0, middle - TOKENS_AROUND)].at_ms;
    const to = Math.max(...this.bars.filter((bar) => bar.at_ms <= steps[Math.min(steps.length - 1, middle + TOKENS_AROUND)].end_ms).map((bar) => bar.end_ms));
    const room = Math.max(1, (to - from) * 0.04);
    return [Math.max(0, from - room), Math.min(this.length, to + room)];
  }

  draw() {
    if (!this.bars || !this.element.isConnected) return;
    const nStages = this.shown.stages.length;
    this.lane(this.whole, [0, this.length], 20, nStages, true);
    this.lane(this.close, this.window, LANE, nStages, false);
    this.close.setAttribute("aria-label", `Batches of the request from ${ms(this.window[0])} to ${ms(this.window[1])}`);
    this.whole.setAttribute("aria-valuenow", String(Math.round((100 * this.window[0]) / this.length)));
    this.whole.setAttribute("aria-valuetext", `${ms(this.window[0])} to ${ms(this.window[1])} of ${ms(this.length)}`);
  }

  lane(canvas, [from, to], tall, nStages, isWhole) {
    const width = canvas.clientWidth || 600;
    const top = isWhole ? tall + 4 : 0;
    const height = top + nStages * tall + 20;
    const pen = fitCanvas(canvas, width, height);
    const left = 52;
    const scale = (width - left) / (to - from);
    const x = (at) => left + (at - from) * scale;
    pen.clearRect(0, 0, width, height);
    pen.font = '11px system-ui, "Liberation Sans", sans-serif';
    pen.fillStyle = colour("soft");
    if (isWhole) pen.fillText("phase", 0, 14);
    for (let stage = 0; stage < nStages; stage += 1) {
      pen.fillStyle = colour("lane");
      pen.fillRect(left, top + stage * tall, width - left, tall - 2);
      pen.fillStyle = colour("soft");
      pen.fillText(`stage ${stage}`, 0, top + stage * tall + tall / 2 + 4);
    }
    if (isWhole) this.phases(pen, x, tall);
    for (const bar of this.bars) {
      if (bar.end_ms < from || bar.at_ms - bar.wait_ms > to) continue;
      const share = isWhole ? 1 : 0.4 + 0.6 * Math.sqrt(Math.min(1, bar.rows / this.most));
      const high = Math.round((tall - (isWhole ? 2 : 8)) * share);
      const y = top + bar.stage * tall + tall - 2 - high - (isWhole ? 0 : 3);
      const x0 = Math.max(left, x(bar.at_ms));
      const wide = Math.max(isWhole ? 0.7 : 1.5, x(bar.end_ms) - x0 - (isWhole ? 0 : 0.8));
      if (!isWhole && bar.wait_ms > 0) {
        pen.fillStyle = colour("bad");
        pen.fillRect(Math.max(left, x(bar.at_ms - bar.wait_ms)), top + bar.stage * tall + tall / 2, Math.max(0, x0 - Math.max(left, x(bar.at_ms - bar.wait_ms))), 2);
      }
      pen.fillStyle = colour(bar.phase === "prefill" ? "prompt" : "g0");
      pen.fillRect(x0, y, wide, high);
      if (!isWhole && wide > 16) {
        pen.fillStyle = inkOn(bar.phase === "prefill" ? "prompt" : "g0");
        pen.textAlign = "center";
        pen.fillText(String(bar.rows), x0 + wide / 2, y + high / 2 + 4);
        pen.textAlign = "left";
      }
    }
    if (isWhole) {
      pen.strokeStyle = colour("accent");
      pen.lineWidth = 1.5;
      pen.strokeRect(x(this.window[0]), top - 2, Math.max(3, x(this.window[1]) - x(this.window[0])), nStages * tall + 2);
    } else this.hops(pen, x, top, tall, from, to);
    this.axis(pen, x, from, to, top + nStages * tall, width);
  }

  phases(pen, x, tall) {
    const { shown, trace } = this;
    const began = shown.admitted_at_ms;
    const grammared = began - (trace.grammar_ms || 0);
    const read = grammared - (trace.media_ms || 0);
    const parts = [["tokenise", Math.max(0, read - trace.tokenize_ms), read, "g7"], ["queue", began, began + shown.queue_ms, "g6"]];
    if (trace.media_ms) parts.push(["media", Math.max(0, read), grammared, "g4"]);
    if (trace.grammar_ms) parts.push(["grammar", Math.max(0, grammared), began, "g5"]);
    if (shown.prefill_ms !== null) parts.push(["prefill", began + shown.queue_ms, began + shown.queue_ms + shown.prefill_ms, "prompt"]);
    if (shown.decode_ms !== null) parts.push(["decode", began + shown.queue_ms + shown.prefill_ms, began + shown.queue_ms + shown.prefill_ms + shown.decode_ms, "g0"]);
    for (const [name, from, to, shade] of parts) {
      const wide = Math.max(1, x(to) - x(from));
      pen.fillStyle = colour(shade);
      pen.fillRect(x(from), 2, wide, tall - 4);
      if (wide > 52) {
        pen.fillStyle = inkOn(shade);
        pen.fillText(name, x(from) + 6, 14);
      }
    }
  }

  // Grey lines: the way of the request's rows from one stage to the next.
  hops(pen, x, top, tall, from, to) {
    const places = new Map(this.bars.map((bar) => [`${bar.stage}:${bar.position}`, bar]));
    pen.strokeStyle = colour("soft");
    pen.lineWidth = 0.8;
    pen.beginPath();
    for (const bar of this.bars) {
      const next = places.get(`${bar.stage + 1}:${bar.position}`);
      if (!next || next.at_ms < from || bar.end_ms > to) continue;
      pen.moveTo(Math.max(52, x(bar.end_ms)), top + bar.stage * tall + tall - 6);
      pen.lineTo(Math.max(52, x(next.at_ms - next.wait_ms)), top + next.stage * tall + tall / 2 + 1);
    }
    pen.stroke();
  }

  axis(pen, x, from, to, y, width) {
    const wanted = ((to - from) * 100) / (width - 52);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const every = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted);
    pen.fillStyle = colour("soft");
    for (let at = Math.ceil(from / every) * every; at <= to; at += every) {
      pen.fillRect(Math.round(x(at)), y, 1, 4);
      const text = at >= 1000 ? `${Number((at / 1000).toFixed(3))} s` : `${Number(at.toFixed(3))} ms`;
      if (x(at) + 40 < width) pen.fillText(text, x(at) + 3, y + 14);
    }
  }

  list() {
    const [from, to] = this.window;
    const inside = this.bars.filter((bar) => bar.end_ms >= from && bar.at_ms <= to);
    const shown = inside.slice(0, ROWS_SHOWN);
    const forgotten = this.shown.stages.some((stage) => stage.up && !(stage.batches || []).length) && this.shown.prefill_ms !== null ? "; the stages have forgotten some of them" : "";
    say(this.note, !this.bars.length && !forgotten ? "none yet" : `${shown.length} of ${count(this.bars.length)}: those enlarged above${inside.length > shown.length ? ", the first of them" : ""}${forgotten}`);
    this.body.replaceChildren(...shown.map((bar) => {
      const off = bar.predicted_ms ? bar.decode_ms / bar.predicted_ms : 1;
      const rows = `${bar.own_rows} of ${bar.rows}${bar.padded_rows ? ` + ${bar.padded_rows}` : ""}`;
      const values = [ms(bar.at_ms), bar.stage, bar.phase, count(bar.position), rows, ms(bar.wait_ms), ms(bar.decode_ms), bar.predicted_ms ? `${ms(bar.predicted_ms)} ${off >= 1 ? "+" : "−"}${percent(Math.abs(off - 1))}` : none, bar.close_reason];
      const queue = `${bar.queued_rows_before} → ${bar.queued_rows_after}`;
      const mates = bar.mates.slice(0, 6).flatMap((mate, index) => [index ? " " : "", h("a.num", { href: `#/requests/${encodeURIComponent(mate)}` }, short(mate).replace(/^(cmpl|chat)-/, ""))]);
      if (bar.mates.length > 6) mates.push(` +${bar.mates.length - 6}`);
      return h("tr", null, values.map((value, index) => h(BATCHES[index][1] ? `td.${BATCHES[index][1]}` : "td", null, String(value))), h("td.n", null, bar.granted ? "granted" : ms(bar.upstream_wait_ms)), h("td.n", null, queue), h("td", null, mates.length ? mates : h("span.soft", null, "alone")));
    }));
  }
}
