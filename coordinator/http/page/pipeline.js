// The pipeline: figures over the last minutes, steps as they form, machines and links.

import { Keyed, ago, bytes, count, fixed, frozen, h, heading, layers, mark, ms, none, percent, plural, say, stageName, svg } from "./dom.js";
import { feed } from "./feed.js";
import { Timeline, describeStep } from "./timeline.js";
import { showLog } from "./logs.js";
import { requestRows } from "./requests.js";
import { movePanel, showStageButton, stageButton } from "./steer.js";

const SILENT_S = 2.5; // since a stage was heard, from which on it is marked

// How a stage is: ok, warn or bad, and the word for it.
export function healthOf(stage, state) {
  const word = stage.state || "";
  if (state.loss && state.loss.stage === stage.index) return ["bad", "lost"];
  if (["lost", "failed"].includes(word)) return ["bad", word];
  if (word === "waiting") return [state.phase === "loading" ? "warn" : "bad", "not here"];
  // Once a stage is lost nobody asks the others either: their silence accuses none of them.
  const isAccused = state.phase === "ready" || (state.loss && state.loss.stage === null);
  if (isAccused && (stage.silent || word === "silent")) return ["bad", "silent"];
  if (word === "sleeping") return ["idle", "sleeps"];
  if (["starting", "fetching", "loading"].includes(word)) return ["warn", progress(stage, word)];
  if (!stage.up) return state.phase === "ready" ? ["bad", "no answer"] : ["warn", "waits"];
  if (state.phase === "ready" && stage.last_heard_s > SILENT_S) return ["warn", `silent ${stage.last_heard_s.toFixed(0)} s`];
  return ["ok", "serves"];
}

function progress(stage, word) {
  const done = stage.fetched_bytes ?? stage.loaded_bytes;
  const total = stage.fetch_total_bytes ?? stage.load_total_bytes;
  return total ? `${word} ${percent(done / total)}${stage.fetch_trouble ? ", stalled" : ""}` : word;
}

class Figure {
  constructor(what) {
    this.what = h("span", null, what);
    this.side = h("span", null, "");
    this.value = h(".value", null, none);
    this.chart = svg("svg", { viewBox: "0 0 300 30", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.element = h(".figure", null, h(".what", null, this.what, this.side), this.value, this.chart);
  }

  // `hasLine`: a second line of the chart shows what the side says.
  show(value, unit, side, hasLine = false) {
    mark(this.side, "second", hasLine);
    const text = `${value}|${unit}`;
    if (this.text !== text) {
      this.text = text;
      this.value.replaceChildren(value, unit ? h("small", null, unit) : "");
    }
    say(this.side, side);
  }

  // Lines over the last five minutes, by seconds; where nobody looked there is no line.
  draw(series, most) {
    const now = feed.points.length ? feed.points.at(-1)[0] : 0;
    const top = most || Math.max(1e-9, ...series.flatMap((each) => each.values.filter((value) => value !== null))) * 1.08;
    const parts = [svg("line", { x1: 0, x2: 300, y1: 29.5, y2: 29.5, class: "base" })];
    for (const { values, name, gap = 6 } of series) {
      let path = "";
      let isDown = false;
      let lastAt = 0;
      let first = null;
      let area = "";
      feed.points.forEach((point, index) => {
        const value = values[index];
        const x = 300 - (now - point[0]);
        if (value === null || value === undefined || x < 0) {
          isDown = isDown && x - lastAt <= gap;
          return;
        }
        const y = 29 - (27 * Math.min(value, top)) / top;
        const goes = isDown && x - lastAt <= gap;
        if (!goes && first !== null) area += `L${lastAt} 29.5L${first} 29.5Z`;
        if (!goes) first = x;
        path += `${goes ? "L" : "M"}${x} ${y.toFixed(1)}`;
        area += `${goes ? "L" : "M"}${x} ${y.toFixed(1)}`;
        isDown = true;
        lastAt = x;
      });
      if (first !== null && name === "stroke") parts.push(svg("path", { d: `${area}L${lastAt} 29.5L${first} 29.5Z`, class: "area" }));
      parts.push(svg("path", { d: path, class: name }));
    }
    this.chart.replaceChildren(...parts);
  }
}

const column = (at) => feed.points.map((point) => point[at]);

function latest(at, within = 6) {
  const now = feed.points.length ? feed.points.at(-1)[0] : 0;
  for (let index = feed.points.length - 1; index >= 0; index -= 1) {
    if (now - feed.points[index][0] > within) return null;
    if (feed.points[index][at] !== null) return feed.points[index][at];
  }
  return null;
}

class Figures {
  constructor() {
    this.rate = new Figure("Tokens per second");
    this.overlap = new Figure("Overlap");
    this.ttft = new Figure("First token");
    this.itl = new Figure("Between tokens");
    this.streams = new Figure("Streams");
    this.kv = new Figure("KV cells");
    const all = [this.rate, this.overlap, this.ttft, this.itl, this.streams, this.kv];
    this.element = h(".figures", { role: "group", "aria-label": "Figures of the last five minutes" }, all.map((each) => each.element));
  }

  update(state) {
    const rate = latest(1, 3);
    this.rate.show(rate === null ? none : fixed(rate, rate < 100 ? 1 : 0), "tok/s", `${count(state.generated_tokens)} so far`);
    this.rate.draw([{ values: column(1), name: "stroke" }]);
    const overlap = latest(5, 10);
    this.overlap.show(percent(overlap), "", "two stages or more");
    this.overlap.draw([{ values: column(5), name: "stroke" }], 1);
    const ttft = latest(6, 300);
    this.ttft.show(...split(ms(ttft)), "median");
    this.ttft.draw([{ values: column(6), name: "stroke", gap: 60 }]);
    const itl = latest(7, 10);
    const p95 = latest(8, 10);
    this.itl.show(...split(ms(itl)), p95 === null ? "mean" : `p95 ${ms(p95)}`, p95 !== null);
    this.itl.draw([{ values: column(7), name: "stroke" }, { values: column(8), name: "stroke2" }]);
    const lanes = state.ctx_tokens ? `of ${state.lanes} ${plural(state.lanes, "lane")}` : ""; // known once the stages have loaded
    this.streams.show(`${state.running}`, lanes, state.waiting ? `${state.waiting} in line` : "none in line", true);
    this.streams.draw([{ values: column(2), name: "stroke" }, { values: column(3), name: "stroke2" }], Math.max(state.lanes || 1, ...column(3)));
    const kv = latest(4);
    this.kv.show(kv === null ? none : (kv * 100).toFixed(kv < 0.1 ? 1 : 0), "%", `${count(state.kv_tokens)} ${plural(state.kv_tokens, "token")}`);
    this.kv.draw([{ values: column(4), name: "stroke" }], 1);
  }
}

function split(text) {
  const [value, unit] = text.split(" ");
  return [value, unit || ""];
}

const MACHINES = [
  ["Stage", ""],
  ["Host", ""],
  ["Layers", "n"],
  ["Memory", "", "What the stage holds, and what its host has left"],
  ["Busy", "", "Share of its time inside native steps"],
  ["Steps/s", "n"],
  ["Rows/step", "n", "Rows of one native step, on average"],
  ["Padding", "n", "Share of rows that are computed for speed alone"],
  ["Wait", "n", "Median wait of rows for their step"],
  ["Queued", "n", "Rows that wait now"],
  ["Lanes", "n", "Streams and kept prefixes, of all that have room"],
  ["Heard", "n", "When the stage last answered"],
  ["Actions", "act"],
];

// What a stage without layers does, and how it is.
const IDLE = {
  spare: ["", "spare", "Takes over the layers of a stage that is drained, or lost for long"],
  drained: ["", "drained", "Holds no layers until it is uncordoned"],
};

function machineRow() {
  const cells = MACHINES.map(([, kind]) => h(kind ? `td.${kind}` : "td"));
  const dot = h("span.dot", { "aria-hidden": "true" });
  const name = h("b.stage-name");
  const word = h("span.soft");
  cells[0].append(dot, name, " ", word);
  const host = h("span.host");
  cells[1].append(host);
  const bar = h("i");
  const meter = h("span.meter", { "aria-hidden": "true" }, bar);
  const busy = h("span.num");
  cells[4].append(meter, busy);
  const row = { element: h("tr", null, cells), cells, dot, name, host, word, bar, busy, stage: null };
  row.act = stageButton(() => row.stage);
  row.log = h("button.small", { type: "button", hidden: true, onclick: () => showLog(stageName(row.stage), row.stage.index) }, "Log");
  cells.at(-1).append(row.log, row.act);
  return row;
}

// A stage that holds no layers: a spare, a drained one, or one that is waited for.
function showIdle(row, stage, state) {
  row.stage = stage;
  const isHere = stage.here !== false;
  const isLost = stage.state === "lost";
  const [kind, word, meaning] = isHere && IDLE[stage.state] ? IDLE[stage.state] : ["warn", isHere || isLost ? stage.state : `${stage.state}, not here`, ""];
  row.dot.className = `dot ${kind}`;
  row.element.className = "idle-row";
  say(row.name, stage.name);
  say(row.word, word);
  row.word.title = meaning || "";
  showHost(row, hostText(stage) || (stage.state === "waiting" ? "not here yet" : "gone"));
  say(row.cells[2], none);
  row.cells[4].replaceChildren();
  say(row.cells[11], isLost ? ago(stage.state_s) : "");
  showStageButton(row.act, stage, state);
}

function hostText(stage) {
  const host = stage.host || {};
  const relayed = host.is_relayed ? " · through the relay" : "";
  return host.hostname ? `${host.hostname} · ${stage.address || host.address}${relayed}` : stage.address || "";
}

function showHost(row, text) {
  say(row.host, text);
  row.host.title = text;
}

function showMachine(row, stage, state) {
  const [health, word] = healthOf(stage, state);
  row.dot.className = `dot ${health}`;
  row.element.className = health === "bad" ? "bad-row" : health === "warn" ? "warn-row" : "";
  say(row.name, `${stage.index} ${stage.name || ""}`.trim());
  row.name.title = row.name.textContent;
  say(row.word, health === "ok" ? "" : word);
  row.stage = stage;
  showHost(row, hostText(stage) || (health === "bad" ? "gone" : "not here yet"));
  say(row.cells[2], layers(stage.layers));
  say(row.cells[3], memoryText(stage));
  row.cells[3].title = stage.memory_bytes ? `The host has ${bytes(stage.memory_bytes)}` : "";
  row.bar.style.width = percent(stage.busy_share || 0, 1).replace(" ", "");
  say(row.busy, percent(stage.busy_share));
  say(row.cells[5], fixed(stage.steps_per_s, stage.steps_per_s < 100 ? 1 : 0));
  say(row.cells[6], fixed(stage.rows_per_step, 1));
  say(row.cells[7], percent(stage.padding_share));
  say(row.cells[8], ms(stage.wait_p50_ms));
  say(row.cells[9], count(stage.queued_rows));
  say(row.cells[10], stage.lanes_total ? `${stage.lanes_used + (stage.lanes_kept || 0)}/${stage.lanes_total}` : none);
  say(row.cells[11], ago(stage.last_heard_s));
  row.log.hidden = Boolean(frozen);
  row.log.setAttribute("aria-label", `Log of ${stageName(stage)}`);
  showStageButton(row.act, stage, state);
}

function memoryText(stage) {
  const tier = stage.tier && stage.tier.memory_bytes ? ` (${bytes(stage.tier.memory_bytes)} of it stored prefixes)` : "";
  if (stage.state === "sleeping") return `freed: ${bytes(stage.artifact_bytes)} of weights`;
  const own = stage.resident_bytes ? bytes(stage.resident_bytes) + tier : `${bytes(stage.artifact_bytes)} of weights`;
  return stage.memory_free_bytes ? `${own}, ${bytes(stage.memory_free_bytes)} free` : own;
}

function linkRow() {
  const text = h("td", { colspan: MACHINES.length });
  return { element: h("tr.link-row", null, text), text };
}

function showLink(row, stage, next) {
  const number = (text) => h("span.num", null, text);
  const parts = ["↓ ", next ? `to stage ${next.index}: ` : "tokens to the coordinator"];
  if (next) parts.push(number(`${bytes(stage.bytes_out_per_s)}/s`));
  if (stage.row_bytes) parts.push(", a row ", number(bytes(stage.row_bytes)));
  if (stage.envelopes_per_s) parts.push(", ", number(fixed(stage.envelopes_per_s, 0)), " messages/s");
  if (next && next.hop_ms !== undefined && next.hop_ms !== null) parts.push(", on the way ", number(ms(next.hop_ms)));
  if (stage.round_trip_ms !== null && stage.round_trip_ms !== undefined) parts.push(" · coordinator and back ", number(ms(stage.round_trip_ms)));
  const key = parts.map((part) => (part.textContent === undefined ? part : part.textContent)).join("");
  if (row.key !== key) {
    row.key = key;
    row.text.replaceChildren(...parts);
  }
}

function laneLabel() {
  const name = h("b");
  const second = h("span");
  const dot = h("span.dot", { "aria-hidden": "true" });
  return { element: h(".lanelabel", null, h("b", null, dot, name), second), name, second, dot };
}

export function pipelineView() {
  const figures = new Figures();
  const canvas = h("canvas", { tabindex: "0", role: "application", "aria-label": "Time line of native steps by stage" });
  const inspect = h(".inspect", { "aria-live": "polite" });
  const line = new Timeline(canvas, (step) => describeStep(inspect, step));
  describeStep(inspect, null);
  const lanes = h(".lanes");
  const labels = new Keyed(lanes, laneLabel, (row, stage) => {
    const [health, word] = healthOf(stage, feed.state);
    row.dot.className = `dot ${health}`;
    mark(row.element, "bad", health === "bad");
    say(row.name, stageName(stage));
    row.element.style.height = `${line.laneHeight}px`;
    row.element.title = stageName(stage);
    row.second.hidden = line.laneHeight < 36;
    const busy = stage.busy_share === undefined ? "" : ` · ${percent(stage.busy_share)} busy`;
    say(row.second, health === "ok" ? `${layers(stage.layers)}${busy}` : word);
  });
  const pause = h("button", { type: "button", "aria-pressed": "false", onclick: () => line.pause(!line.isPaused) }, "Pause");
  line.onPause = (is) => {
    say(pause, is ? "Resume" : "Pause");
    pause.setAttribute("aria-pressed", String(is));
  };
  const legend = h(".legend");
  const kinds = h(".seg", { role: "group", "aria-label": "Colour by" });
  const kind = (text, byRequest) =>
    h("button", { type: "button", "aria-pressed": String(line.byRequest === byRequest), onclick: () => {
      line.byRequest = byRequest;
      for (const each of kinds.children) each.setAttribute("aria-pressed", String(each.textContent === text));
      tellLegend();
      line.draw();
    } }, text);
  let knowsGrants = false;
  const tellLegend = () => {
    const prompt = h("span", null, h("i.kp"), "prompt rows");
    const grants = line.hasGrants ? h("span", null, h("i.kg"), "rows under grants: the stages went on by themselves") : "";
    if (line.byRequest) legend.replaceChildren(h("span", null, "a stripe per request"), prompt, grants);
    else legend.replaceChildren(h("span", null, h("i.k0"), h("i.k1"), "groups of streams"), prompt, h("span", null, "height and number: rows"), grants);
    knowsGrants = line.hasGrants;
  };
  kinds.append(kind("Groups", false), kind("Requests", true));
  tellLegend();
  const body = h("tbody");
  const head = h("thead", null, h("tr", null, MACHINES.map(heading)));
  const machines = new Keyed(
    body,
    (item) => (item.stage || item.idle ? machineRow() : linkRow()),
    (row, item) => (item.stage ? showMachine(row, item.stage, feed.state) : item.idle ? showIdle(row, item.idle, feed.state) : showLink(row, item.from, item.to)),
  );
  const entry = h("p");
  const moving = movePanel();
  const stored = h("p", { title: "KV cells of prompts whose lane another stream has taken. A prompt that begins with one computes only the rest." });
  const requests = requestRows((id) => {
    location.hash = `#/requests/${encodeURIComponent(id)}`;
  });
  const element = h("div", null,
    figures.element,
    h("section", { "aria-label": "Time line" },
      h(".head", null, h("h2", null, "Native steps"), legend,
        h(".tools", null, kinds,
          h(".seg", { role: "group", "aria-label": "Zoom" },
            h("button", { type: "button", "aria-label": "Zoom out", onclick: () => line.setZoom(line.zoom / 1.5) }, "−"),
            h("button", { type: "button", "aria-label": "Zoom in", onclick: () => line.setZoom(line.zoom * 1.5) }, "+")),
          pause)),
      h(".panel.time", null, lanes, canvas, inspect)),
    h("section", { "aria-label": "Machines and links" },
      h(".head", null, h("h2", null, "Machines and links"), entry, stored,
        h(".tools", null, h("button", { type: "button", hidden: Boolean(frozen), onclick: () => showLog("the coordinator") }, "Coordinator's log"))),
      moving.element,
      h(".panel.scroll", { tabindex: "0", role: "region", "aria-label": "Table of machines" }, h("table", null, head, body))),
    h("section", { "aria-label": "Requests" },
      h(".head", null, h("h2", null, "Requests"), h("p", null, h("a", { href: "#/requests" }, "all of them"))),
      requests.element));
  const view = {
    element,
    show() {
      line.show();
      line.take(feed.looks.filter((look) => look.number > line.lastLook));
    },
    hide: () => line.hide(),
    recolour: () => line.recolour(),
    update(fresh) {
      const { state } = feed;
      figures.update(state);
      const stages = state.stages.map((stage) => ({ ...stage, health: healthOf(stage, state)[0] }));
      line.setStages(stages);
      labels.show(state.stages, (stage) => stage.index);
      line.take(fresh);
      if (line.hasGrants !== knowsGrants) tellLegend();
      if (!line.isPaused && !line.picked && !line.hovered) describeStep(inspect, null);
      const items = state.stages.flatMap((stage, at) => [{ stage }, { from: stage, to: state.stages[at + 1] }]);
      items.push(...(state.idle || []).map((idle) => ({ idle })));
      moving.update(state);
      machines.show(items, (item) => (item.stage ? `s${item.stage.index}` : item.idle ? `i${item.idle.name}` : `l${item.from.index}`));
      say(entry, linkText(state));
      say(stored, storedText(state));
      requests.update(state.requests, 12);
      canvas.setAttribute("aria-label", `Time line of native steps: ${state.stages.length} ${plural(state.stages.length, "stage")}, ${state.running} running ${plural(state.running, "stream")}, overlap ${percent(latest(5, 10))}`);
    },
  };
  return view;
}

// Return what the stages have stored of prompts, bytes of all of them together; empty where they store none.
function storedText(state) {
  const { prefixes, tokens, restored } = state.stored_prefixes || {};
  if (!prefixes && !restored) return "";
  const held = [["memory_bytes", "in memory"], ["disk_bytes", "on disk"]]
    .map(([key, place]) => [state.stages.reduce((sum, stage) => sum + ((stage.tier || {})[key] || 0), 0), place])
    .filter(([size]) => size)
    .map(([size, place]) => `${bytes(size)} ${place}`);
  const size = held.length ? `: ${held.join(", ")}` : "";
  return `${count(prefixes)} stored ${plural(prefixes, "prefix", "prefixes")} of ${count(tokens)} ${plural(tokens, "token")}${size} · ${count(restored)} restored so far`;
}

function batchesText(state) {
  const { running, waiting, requests_done: done, requests_waiting: left } = state.batches || {};
  return running || waiting ? `${running + waiting} ${plural(running + waiting, "batch", "batches")}: ${count(done)} of ${count(done + left)} ${plural(done + left, "request")} done` : "";
}

function linkText(state) {
  const { link, plan } = state;
  if (!state.running && !state.waiting) return ["no stream runs", batchesText(state)].filter(Boolean).join(" · ");
  const groups = plan && plan.n_groups ? `${plan.n_groups} ${plural(plan.n_groups, "group")} of up to ${plan.group_rows} ${plural(plan.group_rows, "row")} under way` : "";
  return [groups, link && link.window_bytes ? `${bytes(link.in_flight_bytes)} in flight to stage 0` : "", batchesText(state)].filter(Boolean).join(" · ");
}
