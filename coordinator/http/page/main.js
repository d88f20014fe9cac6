// The frame of the page: which view is shown, how the pipeline is, the key, the theme.

import { frozen, h, home, say, sentence } from "./dom.js";
import { feed, isLate, listen, onKeyWanted, pollNow, start } from "./feed.js";
import { chatView } from "./chat.js";
import { connectView } from "./connect.js";
import { askForKey } from "./key.js";
import { pipelineView } from "./pipeline.js";
import { planView } from "./plan.js";
import { requestsView } from "./requests.js";
import { themed } from "./theme.js";

const VIEWS = { pipeline: pipelineView, requests: requestsView, chat: chatView, plan: planView, connect: connectView };
const main = document.getElementById("main");
const shown = { name: "", view: null };
const above = !frozen && /^(.*\/)pipelines\/[^/]+\/$/.test(home); // the page of one pipeline behind a gateway
const made = {}; // views stay what they were when one comes back: a chat goes on, a list keeps its place

function route() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const wanted = name in VIEWS ? name : "pipeline";
  const argument = rest.map(decodeURIComponent).join("/");
  for (const link of document.querySelectorAll(".bar nav a")) {
    if (link.getAttribute("href") === `#/${wanted}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (wanted !== shown.name) {
    if (shown.view && shown.view.hide) shown.view.hide();
    made[wanted] = made[wanted] || VIEWS[wanted]();
    shown.name = wanted;
    shown.view = made[wanted];
    main.replaceChildren(shown.view.element);
    document.title = `${wanted[0].toUpperCase()}${wanted.slice(1)} · relayline`;
    if (document.activeElement && document.activeElement.closest(".bar nav")) main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  if (shown.view.show) shown.view.show(argument);
  if (feed.state) shown.view.update([]);
}

const WAITS = {
  starting: "The pipeline starts. Requests get 503 until it is ready.",
  loading: "The stages load their layers. Requests get 503 until all are ready.",
  draining: "The pipeline ends: its running requests finish, new ones get 503.",
  sleeping: "The pipeline sleeps: its stages have freed their memory. The next request wakes it and waits for that.",
  waking: "The pipeline wakes: its stages load their layers again. Requests wait until then.",
};
const PHASES = { ready: "ok", recovering: "bad", unreachable: "bad", draining: "warn", loading: "warn", sleeping: "idle", waking: "warn" };

function frame(fresh) {
  const phase = document.getElementById("phase");
  const state = feed.state;
  const needsKey = feed.error !== null && feed.error.status === 401;
  const word = frozen ? `as of ${new Date(frozen.made_unix_ms).toLocaleString("en-GB")}` : needsKey ? "asks for a key" : isLate() ? "no answer" : state ? state.phase || "unknown" : "asking";
  const kind = isLate() && !needsKey ? "bad" : PHASES[frozen && state ? state.phase : word] || "warn";
  if (phase.dataset.word !== word) {
    phase.dataset.word = word;
    phase.replaceChildren(h(`span.dot.${kind}`, { "aria-hidden": "true" }), word);
  }
  say(document.getElementById("model"), feed.facts.model_id || "");
  document.body.classList.toggle("stale", isLate());
  notice(state);
  if (state && shown.view) shown.view.update(fresh);
}

// A stage that is not here, with the reason if it said why it had to end.
function missed(name, state) {
  const stage = state.stages.find((each) => each.name === name);
  return stage && stage.failure ? `${name} (it ended: ${stage.failure})` : name;
}

function notice(state) {
  const line = document.getElementById("notice");
  let text = "";
  let isError = false;
  if (feed.error && feed.error.status !== 401) {
    text = feed.error.status ? sentence(feed.error.message) : "The coordinator does not answer. Figures below are the last ones it gave.";
    isError = true;
  } else if (state && state.loss) {
    const stage = state.loss.stage === null ? null : state.stages[state.loss.stage];
    const others = stage && typeof stage.takeover_in_s === "number" ? ", or when others have taken over its layers" : "";
    const why = state.loss.why.replace(/^(stage \d+): /, "$1 reports that ").replace(/^stage \S+ left: /, ""); // a stage accuses its neighbour, or is named before
    text = `${stage ? `Stage ${stage.index}${stage.name ? ` (${stage.name})` : ""}` : "A stage"} is lost: ${why}. Running requests wait and go on when it is back${others}.`;
    isError = true;
  } else if (state && !frozen && state.phase in WAITS) {
    text = WAITS[state.phase];
    if (state.phase === "loading" && state.missing && state.missing.length) text += ` Not here yet: ${state.missing.map((name) => missed(name, state)).join(", ")}.`;
  } else if (state && !state.is_recording) {
    text = "The trace level is off: neither steps nor requests are remembered. Start with --trace-level summary to see them.";
  }
  line.hidden = !text;
  line.classList.toggle("err", isError);
  say(line, text);
}

addEventListener("hashchange", route);

if (frozen) {
  for (const link of document.querySelectorAll('.bar nav a[href="#/chat"], .bar nav a[href="#/connect"]')) link.remove();
}
themed(document.getElementById("theme"), () => shown.view && shown.view.recolour && shown.view.recolour());
if (above) document.querySelector(".bar nav").prepend(h("a", { href: "../../" }, "‹ All pipelines"));
onKeyWanted((why) => askForKey(why, pollNow));
listen(frame);
route();
start();
