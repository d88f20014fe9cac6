// Native steps as they form: one lane a stage, one block a step. Time in which nothing ran, or of which nothing was
// fetched, is folded into a narrow gap that says so; within a stretch every lane has the same scale.

import { colour, fitCanvas, forgetColours, h, inkOn, ms, plural, stillness } from "./dom.js";
import { feed, isLate } from "./feed.js";

const AXIS = 22; // px below the lanes
const GAP = 34; // px of a fold
const STEP_MIN = 1.2; // px of a step of median length, unless zoomed by hand
const STEP_MAX = 30;
const SHARE = 0.55; // of the width, that one look may fill
const STEPS_KEPT = 6000;
const BREATH = 1.6; // by how much the scale may be off
const FOLD = 14; // times the median step: a pause as long as this is folded
const CATCH_UP = 1.1; // seconds in which a look scrolls in

// What a step's array holds, in order; see coordinator/observe/step_looks.py.
export function stepOf(row) {
  const [stage, number, start, duration, rows, padded, group, reason, wait, predicted, before, after, bytes, members, flat, granted = 0] = row;
  const streams = [];
  for (let at = 0; at < flat.length; at += 2) streams.push({ stream: flat[at], rows: Math.abs(flat[at + 1]), isPrompt: flat[at + 1] < 0 });
  return { stage, number, start, duration, rows, padded, group, reason, wait, predicted, before, after, bytes, members, granted, streams, end: start + duration };
}

function median(values) {
  const sorted = [...values].sort((left, right) => left - right);
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}

export class Timeline {
  constructor(canvas, onPick) {
    this.canvas = canvas;
    this.onPick = onPick;
    this.laneHeight = 52;
    this.nStages = 0;
    this.stretches = []; // {t0, t1, label, steps}
    this.rowsMost = 1;
    this.zoom = 1;
    this.base = 0.01; // px per µs, before zoom
    this.right = 0; // px of content at the right edge of the canvas
    this.speed = 0;
    this.isPaused = false;
    this.isShown = false;
    this.picked = null;
    this.hovered = null;
    this.byRequest = false;
    this.hasGrants = false; // a step was seen whose rows the last stage sent back
    this.onPause = () => {};
    this.frame = 0;
    this.lastMs = 0;
    this.lastLook = 0;
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  show() {
    this.isShown = true;
    this.draw();
  }

  hide() {
    this.isShown = false;
    cancelAnimationFrame(this.frame);
    this.frame = 0;
  }

  recolour() {
    forgetColours();
    this.draw();
  }

  setStages(stages) {
    const height = stages.length > 16 ? 22 : stages.length > 8 ? 30 : stages.length > 4 ? 40 : 52;
    if (height !== this.laneHeight || stages.length !== this.nStages) {
      this.laneHeight = height;
      this.nStages = stages.length;
    }
    this.bad = stages.map((stage) => stage.health === "bad");
    this.draw();
  }

  take(looks) {
    if (looks.length && looks[0].number <= this.lastLook) this.clear();
    for (const look of looks) {
      this.lastLook = look.number;
      this.add(look);
    }
    if (!looks.length) return;
    this.forget();
    const total = this.total();
    if (this.isPaused) return;
    const behind = total - this.right;
    if (!this.right || behind > 2.5 * this.width() || looks.length > 1 || stillness.matches) {
      this.right = total;
      this.speed = 0;
    } else this.speed = behind / CATCH_UP;
    this.run();
  }

  // The oldest stretches go, and what is in view stays where it is.
  forget() {
    let n = this.stretches.reduce((sum, stretch) => sum + stretch.steps.length, 0);
    if (n <= STEPS_KEPT) return;
    const before = this.total();
    while (n > STEPS_KEPT && this.stretches.length > 1) n -= this.stretches.shift().steps.length;
    this.right -= before - this.total();
  }

  clear() {
    this.stretches = [];
    this.right = 0;
    this.picked = null;
  }

  add(look) {
    const steps = look.steps.map(stepOf);
    let skipped = look.skipped;
    if (!steps.length) return;
    const middle = Math.max(1, median(steps.map((step) => step.duration)));
    const from = Math.min(...steps.map((step) => step.start));
    const until = Math.max(...steps.map((step) => step.end));
    this.scaleFor(middle, until - from);
    // Steps so short that a look of them would rush by: the newest of it are shown.
    const room = (this.width() * SHARE * BREATH) / this.base;
    const start = until - from > room ? until - room : from;
    const seen = start > from ? steps.filter((step) => step.start >= start) : steps;
    skipped += steps.length - seen.length;
    let last = this.stretches.at(-1);
    if (last && skipped) last = null;
    for (const step of seen) {
      const pause = last ? step.start - last.t1 : 0;
      if (!last || pause > Math.max(FOLD * middle, 110 / this.base)) {
        const label = skipped ? `${skipped} ${skipped === 1 ? "step" : "steps"}` : pause ? `${ms(pause / 1000)} idle` : "";
        skipped = 0;
        last = { t0: step.start, t1: step.end, label, steps: [], firstOfLook: look.number };
        this.stretches.push(last);
      }
      last.t1 = Math.max(last.t1, step.end);
      last.steps.push(step);
      this.hasGrants = this.hasGrants || step.granted > 0;
      this.rowsMost = Math.max(step.rows + step.padded, this.rowsMost * 0.9995);
    }
  }

  scaleFor(middle, span) {
    const wanted = Math.min(STEP_MAX / middle, Math.max(STEP_MIN / middle, (this.width() * SHARE) / Math.max(1, span)));
    // It stays while it is about right: a scale that breathes can't be read.
    if (wanted > this.base * BREATH || wanted < this.base / BREATH) {
      this.base = wanted;
      this.right = this.total(); // what was there until now ends where it did
    }
  }

  scale() {
    return this.base * this.zoom;
  }

  width() {
    return this.canvas.clientWidth || 900;
  }

  total() {
    let x = 0;
    for (const stretch of this.stretches) {
      stretch.x = x + (stretch.label ? GAP : 0);
      x = stretch.x + (stretch.t1 - stretch.t0) * this.scale();
    }
    return x;
  }

  run() {
    if (this.frame || !this.isShown) return;
    this.lastMs = 0;
    const turn = (now) => {
      this.frame = 0;
      const passed = this.lastMs ? Math.min(0.1, (now - this.lastMs) / 1000) : 0;
      this.lastMs = now;
      const total = this.total();
      if (!this.isPaused && this.right < total && this.speed > 0) this.right = Math.min(total, this.right + this.speed * passed);
      this.draw();
      if (!this.isPaused && this.right < total && this.speed > 0 && this.isShown) this.frame = requestAnimationFrame(turn);
    };
    this.frame = requestAnimationFrame(turn);
  }

  pause(is) {
    this.isPaused = is;
    if (!is) {
      this.picked = null;
      this.onPick(null);
      this.right = Math.max(this.right, this.total() - this.width() * SHARE);
      this.speed = (this.total() - this.right) / CATCH_UP;
      this.run();
    }
    this.onPause(is);
    this.draw();
  }

  setZoom(zoom) {
    this.zoom = Math.min(16, Math.max(0.125, zoom));
    this.right = this.total();
    this.draw();
  }

  draw() {
    if (!this.isShown) return;
    const width = this.width();
    const height = this.nStages * this.laneHeight + AXIS;
    const pen = fitCanvas(this.canvas, width, height);
    pen.clearRect(0, 0, width, height);
    for (let stage = 0; stage < this.nStages; stage += 1) {
      pen.fillStyle = colour(this.bad && this.bad[stage] ? "bad-bg" : "lane");
      pen.fillRect(0, stage * this.laneHeight, width, this.laneHeight - 1);
      pen.fillStyle = colour("line");
      pen.fillRect(0, (stage + 1) * this.laneHeight - 1, width, 1);
    }
    const total = this.total();
    if (!this.isPaused && this.right > total) this.right = total;
    this.boxes = [];
    this.written = 0; // up to where the axis has labels
    const left = this.right - width;
    pen.font = '11px system-ui, "Liberation Sans", sans-serif';
    for (const stretch of this.stretches) {
      const x0 = stretch.x - left;
      const x1 = x0 + (stretch.t1 - stretch.t0) * this.scale();
      if (x1 < -GAP || x0 - GAP > width) continue;
      if (stretch.label) this.fold(pen, x0 - GAP, stretch.label);
      this.ticks(pen, stretch, x0, x1, width);
      for (const step of stretch.steps) this.block(pen, step, x0 + (step.start - stretch.t0) * this.scale(), width);
    }
    if (!this.stretches.length) this.words(pen, width);
  }

  words(pen, width) {
    pen.fillStyle = colour("soft");
    pen.font = '13px system-ui, "Liberation Sans", sans-serif';
    pen.textAlign = "center";
    const phase = isLate() || !feed.state ? "" : feed.state.phase;
    const whole = !phase ? "" : phase === "ready" ? "No step yet. Send a request, or open Chat." : phase === "sleeping" ? "No step since it fell asleep. A request wakes it." : "No step yet.";
    const text = pen.measureText(whole).width > width - 2 * GAP ? whole.slice(0, whole.indexOf(".") + 1) : whole;
    const middle = (this.nStages * this.laneHeight) / 2;
    const room = pen.measureText(text).width / 2 + 12;
    pen.fillStyle = colour("lane"); // the line between two lanes does not go through the words
    if (text && this.nStages % 2 === 0) pen.fillRect(width / 2 - room, middle - 12, 2 * room, 24);
    pen.fillStyle = colour("soft");
    pen.fillText(text, width / 2, middle + 4);
    pen.textAlign = "left";
  }

  fold(pen, x, label) {
    const bottom = this.nStages * this.laneHeight;
    pen.fillStyle = colour("panel");
    pen.fillRect(x + 3, 0, GAP - 6, bottom);
    pen.save();
    pen.translate(x + GAP / 2 + 4, bottom / 2);
    pen.rotate(-Math.PI / 2);
    pen.textAlign = "center";
    pen.fillStyle = colour("soft");
    pen.fillText(label === "" ? "" : /steps?$/.test(label) ? `${label} not shown` : label, 0, 0, bottom - 6);
    pen.restore();
    pen.textAlign = "left";
  }

  ticks(pen, stretch, x0, x1, width) {
    const bottom = this.nStages * this.laneHeight;
    const wanted = 90 / this.scale(); // µs
    const power = 10 ** Math.floor(Math.log10(wanted));
    const every = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted);
    pen.fillStyle = colour("soft");
    for (let t = 0; t <= stretch.t1 - stretch.t0; t += every) {
      const x = x0 + t * this.scale();
      if (x < 0 || x > width) continue;
      pen.fillRect(Math.round(x), bottom, 1, 4);
      const text = t === 0 ? this.clock(stretch.t0) : `+${this.short(t)}`;
      if (x < this.written || (t && x + 34 > x1)) continue;
      pen.fillText(text, x + 3, bottom + 15);
      this.written = x + pen.measureText(text).width + 10;
    }
  }

  short(us) {
    return us >= 1e6 ? `${us / 1e6} s` : us >= 1000 ? `${us / 1000} ms` : `${us} µs`;
  }

  clock(us) {
    const at = new Date(feed.zeroUnixMs + us / 1000);
    return `${at.toLocaleTimeString("en-GB")}.${String(at.getMilliseconds()).padStart(3, "0")}`;
  }

  block(pen, step, x, width) {
    if (step.stage >= this.nStages) return;
    const wide = Math.max(1.5, step.duration * this.scale() - 1);
    if (x + wide < 0 || x > width) return;
    const lane = this.laneHeight - 1;
    const share = 0.34 + 0.66 * Math.sqrt(step.rows / Math.max(1, this.rowsMost));
    const tall = Math.max(6, Math.round((lane - 8) * Math.min(1, share)));
    const y = step.stage * this.laneHeight + lane - 4 - tall;
    this.boxes.push({ step, x, y: step.stage * this.laneHeight, wide, tall: lane });
    const pointed = this.hovered || this.picked;
    pen.globalAlpha = pointed && pointed !== step && !this.related(step, pointed) ? 0.28 : 1;
    if (this.byRequest) this.stripes(pen, step, x, y, wide, tall);
    else {
      const nPrompt = step.streams.reduce((sum, each) => sum + (each.isPrompt ? each.rows : 0), 0);
      const prompt = step.group < 0 ? tall : Math.round((tall * nPrompt) / Math.max(1, step.rows));
      pen.fillStyle = colour(step.group < 0 ? "prompt" : `g${step.group % 8}`);
      pen.fillRect(x, y + prompt, wide, tall - prompt);
      if (prompt) this.hatch(pen, x, y, wide, prompt);
    }
    if (!this.byRequest && wide >= 15 && tall >= 15) {
      pen.fillStyle = inkOn(step.group < 0 ? "prompt" : `g${step.group % 8}`);
      pen.textAlign = "center";
      pen.font = '11px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace';
      pen.fillText(String(step.rows), x + wide / 2, y + tall / 2 + 4, wide);
      pen.font = '11px system-ui, "Liberation Sans", sans-serif';
      pen.textAlign = "left";
    }
    if (step.granted) {
      pen.fillStyle = colour("ink");
      pen.fillRect(x, y + tall + 1, wide, 2);
    }
    if (step === this.picked) {
      pen.strokeStyle = colour("ink");
      pen.lineWidth = 2;
      pen.strokeRect(x - 1, y - 1, wide + 2, tall + 2);
    }
    pen.globalAlpha = 1;
  }

  hatch(pen, x, y, wide, tall) {
    pen.save();
    pen.beginPath();
    pen.rect(x, y, wide, tall);
    pen.clip();
    pen.strokeStyle = colour("prompt");
    pen.strokeRect(x + 0.5, y + 0.5, wide - 1, tall - 1);
    pen.beginPath();
    for (let at = -tall; at < wide; at += 4) {
      pen.moveTo(x + at, y + tall);
      pen.lineTo(x + at + tall, y);
    }
    pen.lineWidth = 1.2;
    pen.stroke();
    pen.restore();
  }

  stripes(pen, step, x, y, wide, tall) {
    const shown = step.streams.reduce((sum, each) => sum + each.rows, 0) || 1;
    let at = y;
    for (const each of step.streams) {
      const part = (tall * each.rows) / shown;
      if (each.isPrompt) this.hatch(pen, x, at, wide, Math.max(1, part));
      pen.fillStyle = colour(`g${each.stream % 8}`);
      if (!each.isPrompt) pen.fillRect(x, at, wide, Math.max(1, part - (part > 3 ? 0.7 : 0)));
      at += part;
    }
  }

  related(step, pointed) {
    return step.streams.some((each) => pointed.streams.some((other) => other.stream === each.stream));
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    return (this.boxes || []).find((each) => x >= each.x - 1 && x <= each.x + each.wide + 1 && y >= each.y && y <= each.y + each.tall) || null;
  }

  hover(event) {
    if (this.drag) {
      const moved = event.clientX - this.drag.x;
      if (Math.abs(moved) > 3) {
        if (!this.isPaused) this.pause(true);
        this.right = Math.min(this.total(), Math.max(this.width() * 0.3, this.drag.right - moved));
        this.draw();
      }
      return;
    }
    const found = this.at(event);
    this.point(found ? found.step : null);
  }

  point(step) {
    if (step === this.hovered) return;
    this.hovered = step;
    this.onPick(step || this.picked);
    this.draw();
  }

  press(event) {
    this.canvas.focus({ preventScroll: true });
    this.drag = { x: event.clientX, right: this.right };
    this.canvas.setPointerCapture(event.pointerId);
    const up = (ended) => {
      this.canvas.removeEventListener("pointerup", up);
      this.canvas.removeEventListener("pointercancel", up);
      const isClick = Math.abs(ended.clientX - this.drag.x) <= 3;
      this.drag = null;
      if (!isClick) return;
      const found = this.at(ended);
      this.pick(found ? found.step : null);
    };
    this.canvas.addEventListener("pointerup", up);
    this.canvas.addEventListener("pointercancel", up);
  }

  pick(step) {
    this.picked = step;
    if (step && !this.isPaused) this.pause(true);
    this.onPick(step);
    this.draw();
  }

  wheel(event) {
    if (Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
    event.preventDefault();
    if (!this.isPaused) this.pause(true);
    this.right = Math.min(this.total(), Math.max(this.width() * 0.3, this.right + event.deltaX));
    this.draw();
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: 0, ArrowDown: 0 };
    if (event.key === " ") this.pause(!this.isPaused);
    else if (event.key === "+" || event.key === "=") this.setZoom(this.zoom * 1.5);
    else if (event.key === "-") this.setZoom(this.zoom / 1.5);
    else if (event.key === "End") this.pause(false);
    else if (event.key === "Escape") this.pick(null);
    else if (event.key in move) this.step(event.key);
    else if (event.key === "Enter" && this.picked && this.picked.streams.length) {
      const id = feed.streams.get(this.picked.streams[0].stream);
      if (id) location.hash = `#/requests/${encodeURIComponent(id)}`;
    } else return;
    event.preventDefault();
  }

  step(key) {
    const all = this.stretches.flatMap((stretch) => stretch.steps);
    if (!all.length) return;
    const from = this.picked || (this.boxes.length ? this.boxes.at(-1).step : all.at(-1));
    let found = null;
    if (key === "ArrowUp" || key === "ArrowDown") {
      const stage = Math.min(this.nStages - 1, Math.max(0, from.stage + (key === "ArrowDown" ? 1 : -1)));
      const lane = all.filter((each) => each.stage === stage);
      found = lane.reduce((best, each) => (!best || Math.abs(each.start - from.start) < Math.abs(best.start - from.start) ? each : best), null);
    } else {
      const lane = all.filter((each) => each.stage === from.stage);
      found = this.picked ? lane[lane.indexOf(from) + (key === "ArrowRight" ? 1 : -1)] : from;
    }
    if (!found) return;
    this.pick(found);
    this.reveal(found);
  }

  reveal(step) {
    this.total();
    const stretch = this.stretches.find((each) => each.steps.includes(step));
    const x = stretch.x + (step.start - stretch.t0) * this.scale();
    if (x < this.right - this.width() + 20 || x > this.right - 20) this.right = Math.min(this.total(), x + this.width() / 2);
    this.draw();
  }
}

export function describeStep(line, step) {
  const key = step ? `${step.stage}:${step.number}` : "none";
  if (line.dataset.step === key) return; // said once: screen readers would say it again
  line.dataset.step = key;
  if (!step) {
    const hint = matchMedia("(pointer: coarse)").matches ? "Tap a block to see its streams." : "Point at a block to see its streams. Arrow keys move, space pauses, + and − zoom, Enter opens its request.";
    line.replaceChildren(h("span.soft", null, hint));
    return;
  }
  const part = (name, value) => h("span", null, h("span", null, name), h("span.num", null, value));
  const off = step.predicted ? ` of ${ms(step.predicted / 1000)} predicted` : "";
  line.replaceChildren(
    part("stage", `${step.stage}`),
    part("step", `${step.number}`),
    part("rows", `${step.rows}${step.padded ? ` + ${step.padded} padding` : ""}`),
    part("took", `${ms(step.duration / 1000)}${off}`),
    step.granted ? part("under grants", `${step.granted} row${step.granted === 1 ? "" : "s"}, not from the coordinator`) : "",
    part("longest wait", ms(step.wait / 1000)),
    part("queued", `${step.before} → ${step.after}`),
    part("closed by", step.reason || "–"),
    part("out", step.bytes >= 1024 ? `${(step.bytes / 1024).toFixed(1)} KiB` : `${step.bytes} B`),
    h("span", null, h("span", null, step.members === 1 ? "request" : `${step.members} frames`), ...step.streams.slice(0, 8).map(link), step.members > 8 ? ` and ${step.members - 8} more` : ""),
  );
}

function link(each) {
  const id = feed.streams.get(each.stream);
  const text = `${id ? short(id) : `#${each.stream}`}${each.isPrompt ? ` (${each.rows} prompt ${plural(each.rows, "row")})` : each.rows > 1 ? ` (${each.rows} rows)` : ""}`;
  return id ? h("a.num", { href: `#/requests/${encodeURIComponent(id)}` }, text, " ") : h("span.num", null, text, " ");
}

export function short(id) {
  const [, kind, rest] = /^(cmpl|chatcmpl)-(.*)$/.exec(id) || [null, "", id];
  const choice = /-(\d+)$/.exec(rest);
  return `${kind ? `${kind === "cmpl" ? "cmpl" : "chat"}-` : ""}${rest.slice(0, 6)}${choice && choice[1] !== "0" ? `·${choice[1]}` : ""}`;
}
