// What a user changes: layers, drained stages, requests, the trace level. What takes something away is asked for twice.

import { ask, frozen, h, layers, mark, none, percent, plural, say, sentence } from "./dom.js";
import { feed, pollNow } from "./feed.js";

const SHOWN_S = 120; // that a finished change of layers stays on the page
const STEPS = [
  ["cutting", "Split the model"],
  ["preparing", "Load layers"],
  ["settling", "Pause requests"],
  ["switching", "Switch"],
];
const listeners = new Set();
let latest = null; // the change of layers as the server told it last: an answer to a click is newer than the feed
let problem = ""; // why the latest click did nothing
let server = 0; // which process told it: another one counts its changes anew
let dismissed = 0; // the change that the user has seen enough of

// Whether the coordinator can free stages of their layers: they have joined it, and it knows the model.
export function canMove(state) {
  return !frozen && state.stages.some((stage) => "drained" in stage);
}

export function isMoving() {
  return Boolean(latest) && STEPS.some(([name]) => name === latest.state);
}

const title = h("h2", { id: "sure-title" });
const lines = h("div");
const no = h("button", { type: "button" }, "Leave it");
const yes = h("button.danger", { type: "submit" });
const form = h("form", { method: "dialog" }, title, lines, h(".row.end", null, no, yes));
const dialog = h("dialog", { id: "sure", "aria-labelledby": "sure-title" }, form);
let answer = () => {};

no.addEventListener("click", () => dialog.close());
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const given = answer;
  answer = () => {};
  dialog.close();
  given(true);
});
dialog.addEventListener("close", () => answer(false));

// Ask whether something is to be done; resolves to true or false. `texts` are paragraphs, `verb` names the button.
export function confirmed(question, texts, verb) {
  if (!dialog.isConnected) document.body.append(dialog);
  say(title, question);
  lines.replaceChildren(...texts.filter(Boolean).map((text) => h("p", null, text)));
  say(yes, verb);
  dialog.showModal();
  no.focus(); // nothing happens by a second Enter
  return new Promise((done) => {
    answer = done;
  });
}

export async function send(method, path, body) {
  const given = body === undefined ? { method } : { method, body: JSON.stringify(body) };
  return (await ask(path, given)).json();
}

function tell() {
  for (const listener of listeners) listener();
}

// Begin a change of layers; the panel shows how it goes, or why it does not.
async function change(path, body) {
  problem = "";
  try {
    latest = (await send("PUT", path, body)).move;
    pollNow();
  } catch (error) {
    problem = error.status ? sentence(`Not done: ${error.message}`) : "The coordinator does not answer.";
  }
  tell();
}

const stagePath = (name) => `/v1/pipeline/stages/${encodeURIComponent(name)}`;

export async function drain(stage) {
  const { name } = stage;
  const holds = stage.layers ? `Its layers ${layers(stage.layers)} move to other stages, which load them while they serve. Requests then pause for a moment and go on with the same tokens.` : "It holds no layers now.";
  const after = `${name} frees its memory and gets no layers until it is uncordoned, not even after a restart.`;
  if (await confirmed(`Drain ${name}?`, [holds, after], "Drain")) await change(stagePath(name), { drained: true });
}

export const uncordon = (name) => change(stagePath(name), { drained: false });

export async function moveLayers(cuts, texts) {
  if (await confirmed("Move the layers?", [...texts, "Stages load their new layers while they serve. Requests then pause for a moment and go on with the same tokens."], "Move")) await change("/v1/pipeline/layers", { cuts });
}

export async function cancel(item) {
  const far = item.tokens ? `It has ${item.tokens} ${plural(item.tokens, "token")} so far. ` : "";
  const text = `${far}Its client gets the error request_cancelled and no more tokens.`;
  if (!(await confirmed(`Cancel ${item.id}?`, [text], "Cancel it"))) return;
  try {
    await send("POST", `/v1/requests/${encodeURIComponent(item.id)}/cancel`);
    pollNow();
  } catch (error) {
    if (error.status !== 409) await confirmed("It was not cancelled", [sentence(error.message)], "Good");
  }
}

// The button of a stage: drain it, or let it hold layers again.
export function stageButton(stageOf) {
  const button = h("button.small", { type: "button" });
  button.addEventListener("click", () => {
    const stage = stageOf();
    if (stage.drained) uncordon(stage.name);
    else drain(stage);
  });
  return button;
}

export function showStageButton(button, stage, state) {
  button.hidden = !canMove(state) || !("drained" in stage);
  button.disabled = isMoving() || Boolean(stage.drained && stage.layers);
  button.title = isMoving() ? "Layers are being moved" : stage.drained ? "Let it hold layers again" : "Take its layers away, for maintenance";
  say(button, !stage.drained ? "Drain…" : stage.layers ? "Draining" : "Uncordon");
  button.setAttribute("aria-label", `${stage.drained ? "Uncordon" : "Drain"} ${stage.name}`);
}

// Who gets other layers by a change: [name, layers before, layers after, what it does], the layers null for none.
function changes(move) {
  const held = (side) => new Map(side.stages.map((name, at) => [name, side.layers[at]]));
  const before = held(move.before);
  const after = held(move);
  const isDone = move.state === "done";
  return [...new Set([...move.before.stages, ...move.stages])].map((name) => {
    const [from, to] = [before.get(name) || null, after.get(name) || null];
    const word = move.state === "cutting" || move.state === "failed" ? "" : move.keep.includes(name) ? "keeps its layers"
      : !to ? (isDone ? "is free" : "gives them away") : move.waiting_for.includes(name) ? loads(move.fetches?.[name]) : isDone ? "holds them" : "has loaded";
    return [name, from, to, word];
  });
}

// How far a stage is with its new layers; `fetch` is missing until it has said so.
function loads(fetch) {
  if (!fetch) return "loads";
  const far = `fetches ${percent(fetch.done_bytes / fetch.total_bytes)}`;
  return fetch.trouble ? `${far}, stalled: ${fetch.trouble}` : far;
}

function headline(move) {
  if (move.state === "failed") return `Layers were not moved, and nothing has changed: ${move.problem}`;
  const took = `${move.took_s.toFixed(1)} s`;
  if (move.state !== "done") return `Layers move, for ${took} so far. Requests go on.`;
  const tokens = move.kept_tokens || move.replayed_tokens ? ` Running requests kept ${move.kept_tokens.toLocaleString("en-US")} ${plural(move.kept_tokens, "token")} and recomputed ${move.replayed_tokens.toLocaleString("en-US")}.` : "";
  return `Layers have moved in ${took}; requests paused for ${move.paused_s.toFixed(2)} s.${tokens}`;
}

// The latest change of layers: its steps, and who gives what to whom. Empty where there is none to speak of.
export function movePanel() {
  const line = h("p", { role: "status" });
  const trouble = h("p.bad-t", { role: "alert" });
  const steps = h("ol.steps", null, STEPS.map(([, text]) => h("li", null, text)));
  const body = h("tbody");
  const table = h("table", null, h("thead", null, h("tr", null, ["Stage", "Layers before", "Layers after", "Progress"].map((name) => h("th", { scope: "col" }, name)))), body);
  const close = h("button.small", { type: "button", onclick: () => {
    dismissed = latest ? latest.number : 0;
    problem = "";
    tell();
  } }, "Dismiss");
  const element = h("section.panel.change", { "aria-label": "Change of layers", hidden: true }, h(".row", null, line, trouble, close), steps, h(".scroll", null, table));
  const known = new Map();
  let spoken = "";
  const show = () => {
    const move = latest && (isMoving() || (latest.number !== dismissed && latest.state_s < SHOWN_S)) ? latest : null;
    element.hidden = !move && !problem;
    close.hidden = isMoving() && !problem;
    say(trouble, problem);
    line.hidden = steps.hidden = table.hidden = !move;
    if (!move) return;
    const text = headline(move);
    const key = `${move.number} ${move.state}`;
    line.setAttribute("aria-live", key === spoken ? "off" : "polite"); // a clock that counts is not read aloud
    spoken = key;
    say(line, text);
    mark(line, "bad-t", move.state === "failed");
    const at = move.state === "done" ? STEPS.length : STEPS.findIndex(([name]) => name === move.state);
    steps.hidden = move.state === "failed";
    [...steps.children].forEach((step, index) => {
      mark(step, "past", index < at);
      if (index === at) step.setAttribute("aria-current", "step");
      else step.removeAttribute("aria-current");
    });
    const rows = changes(move);
    const names = rows.map(([name]) => name).join("\n");
    if (known.names !== names) {
      known.names = names;
      known.rows = rows.map(() => h("tr", null, h("td"), h("td.num"), h("td.num"), h("td.soft")));
      body.replaceChildren(...known.rows);
    }
    rows.forEach(([name, from, to, word], index) => {
      const texts = [name, from ? layers(from) : none, to ? layers(to) : none, word];
      texts.forEach((each, cell) => say(known.rows[index].children[cell], each));
      mark(known.rows[index], "soft", texts[1] === texts[2]);
    });
  };
  listeners.add(show);
  return {
    element,
    update(state) {
      const told = (state.layers && state.layers.move) || null;
      const isNewer = told && latest && (told.number > latest.number || (told.number === latest.number && told.took_s >= latest.took_s));
      if (!latest || isNewer || server !== feed.zeroUnixMs) latest = told;
      if (server !== feed.zeroUnixMs) dismissed = 0;
      server = feed.zeroUnixMs;
      show();
    },
  };
}

const LEVELS = [["off", "off"], ["summary", "summary: one trace a request"], ["batches", "batches: also each native step"], ["frames", "frames: also each frame"]];
const TIMES = [[60, "for a minute"], [600, "for ten minutes"], [3600, "for an hour"], [0, "until it is changed"]];

// How much is traced: what holds, and another level for a while.
export function tracing() {
  const level = h("select", { id: "trace-level" }, LEVELS.map(([value, text]) => h("option", { value }, text)));
  const time = h("select", { id: "trace-time" }, TIMES.map(([value, text]) => h("option", { value: String(value) }, text)));
  const told = h("p.soft", { role: "status" });
  const trouble = h("p.bad-t", { role: "alert" });
  const row = h("form.row.tracing", null,
    h("label.vh", { for: "trace-level" }, "Trace level"), level, h("label.vh", { for: "trace-time" }, "For how long"), time,
    h("button", { type: "submit" }, "Set"));
  let isTouched = false;
  level.addEventListener("change", () => {
    isTouched = true;
  });
  const show = (found) => {
    const back = found.back_to ? ` It goes back to ${found.back_to} in ${found.back_in_s < 90 ? `${found.back_in_s.toFixed(0)} s` : `${(found.back_in_s / 60).toFixed(0)} min`}.` : "";
    const apart = found.stages.filter((each) => each !== found.level).length;
    const where = found.exporting ? `${found.exported_spans.toLocaleString("en-US")} ${plural(found.exported_spans, "span was", "spans were")} sent to the collector.` : "No collector is set, so no spans are sent.";
    say(told, `Level ${found.level}.${back} ${where}${apart ? ` ${apart} of ${found.stages.length} ${plural(found.stages.length, "stage")} ${apart === 1 ? "has another level or does" : "have another level or do"} not answer.` : ""}`);
    if (!isTouched) level.value = found.level;
  };
  const look = async () => {
    if (frozen) return;
    try {
      show(await (await ask("/v1/telemetry")).json());
    } catch {
      say(told, "");
    }
  };
  row.addEventListener("submit", async (event) => {
    event.preventDefault();
    say(trouble, "");
    try {
      const for_s = Number(time.value);
      show(await send("PUT", "/v1/telemetry", { level: level.value, ...(for_s ? { for_s } : {}) }));
      isTouched = false;
    } catch (error) {
      say(trouble, sentence(error.message));
    }
  });
  const element = h("section", { "aria-label": "Tracing", hidden: Boolean(frozen) }, h(".head", null, h("h2", null, "Tracing")), row, told, trouble);
  return { element, look };
}
