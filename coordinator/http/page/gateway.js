// The page of a gateway: its pipelines as they are now, each with a link to its own page and chat.

import { Keyed, ask, count, h, heading, none, percent, plural, say, sentence } from "./dom.js";
import { askForKey } from "./key.js";
import { themed } from "./theme.js";

const EVERY_MS = 2000;
const DOTS = { ready: "ok", sleeping: "idle", dead: "bad" };
const COLUMNS = [["Pipeline", ""], ["State", ""], ["Models", ""], ["Streams", ""], ["Requests sent", "n"], ["Address", ""], ["Chat", "act"]];
const table = document.querySelector("main table");
const notice = document.getElementById("notice");
const sum = document.getElementById("sum");
let timer = 0;

const body = h("tbody");
const rows = new Keyed(body, (pipeline) => {
  const cells = COLUMNS.map(([, side]) => h(side ? `td.${side}` : "td"));
  const to = (hash) => `pipelines/${encodeURIComponent(pipeline.name)}/${hash}`;
  const dot = h("span.dot", { "aria-hidden": "true" });
  const word = h("span");
  const bar = h("i");
  const streams = h("span.num");
  cells[0].append(h("a.stage-name", { href: to(""), title: pipeline.name }, pipeline.name));
  cells[1].append(dot, word);
  cells[3].append(h("span.meter", { "aria-hidden": "true" }, bar), streams);
  cells[6].append(h("a", { href: to("#/chat"), "aria-label": `Chat with ${pipeline.name}` }, "Chat"));
  return { element: h("tr", null, cells), cells, dot, word, bar, streams };
}, ({ element, cells, dot, word, bar, streams }, pipeline) => {
  const kind = DOTS[pipeline.phase] || "warn";
  const running = pipeline.running + pipeline.others;
  element.className = kind === "bad" ? "bad-row" : "";
  dot.className = `dot ${kind}`;
  say(word, pipeline.problem ? `${pipeline.phase}: ${pipeline.problem}` : pipeline.phase);
  say(cells[2], pipeline.models.join(", "));
  const isDead = pipeline.phase === "dead" || pipeline.phase === "unknown";
  bar.parentElement.hidden = isDead;
  bar.style.width = percent(Math.min(1, running / Math.max(1, pipeline.lanes))).replace(" ", "");
  const waiting = pipeline.waiting ? `, ${count(pipeline.waiting)} waiting` : "";
  const shown = pipeline.lanes ? `${count(running)} of ${count(pipeline.lanes)} ${plural(pipeline.lanes, "lane")}` : count(running);
  say(streams, isDead ? none : shown + waiting);
  say(cells[4], count(pipeline.sent));
  say(cells[5], pipeline.url);
});

function show(state) {
  if (!body.isConnected) {
    const head = h("tr", null, COLUMNS.map(heading));
    table.replaceChildren(h("thead", null, head), body);
  }
  rows.show(state.pipelines, (pipeline) => pipeline.name);
  const models = new Set(state.pipelines.flatMap((pipeline) => pipeline.models)).size;
  const one = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
  const awake = state.awake_max ? ` At most ${one(state.awake_max, "pipeline")} awake at once: a request wakes the one that it needs.` : "";
  say(sum, `${one(models, "model")}, ${one(state.running, "running stream")}.${awake} A request's model chooses the pipeline; those of one model share its requests.`);
}

async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  let error = null;
  try {
    show(await (await ask("/v1/pipeline", { signal: AbortSignal.timeout(8000) })).json());
  } catch (caught) {
    error = caught;
    if (error.status === 401) askForKey(error.message, look);
  }
  const text = !error || error.status === 401 ? "" : error.status ? sentence(error.message) : "The gateway does not answer. This is its last known state.";
  notice.hidden = !text;
  say(notice, text);
  if (!error || error.status !== 401) timer = setTimeout(look, EVERY_MS);
}

themed(document.getElementById("theme"));
document.addEventListener("visibilitychange", look);
look();
