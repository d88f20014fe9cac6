// The plan that runs: who holds what, how streams are grouped, what other plans would give.

import { Keyed, ask, bytes, codeBlock, count, fixed, h, heading, inkOn, layers, mark, ms, none, percent, plural, say, sentence, stageName } from "./dom.js";
import { feed } from "./feed.js";
import { inviteForm } from "./invite.js";
import { canMove, isMoving, movePanel, moveLayers } from "./steer.js";

const BY_SPEED = "layers by measured speed";
const AGAIN_MS = [1000, 6000]; // after layers have moved; the server keeps a plan for five seconds
const WAIT_MS = 250; // after a change, before it is asked what it would give

// Other layers for the same stages: what they would give, and the move to them.
class Trial {
  constructor(changed) {
    this.changed = changed;
    this.inputs = [];
    this.names = "";
    this.runs = ""; // the cuts that are served
    this.asked = ""; // those whose speed is known
    this.fields = h(".row");
    this.told_ = h("p", { role: "status" });
    this.button = h("button.first", { type: "submit" }, "Move layers…");
    this.reset = h("button", { type: "button", onclick: () => this.write(this.runs) }, "As it runs");
    const form = h("form.trial", null, this.fields, h(".row", null, this.button, this.reset), this.told_);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const cuts = this.read();
      if (!cuts) return;
      const edges = [0, ...cuts, this.n];
      const parts = this.stages.map((name, at) => `${name} ${layers([edges[at], edges[at + 1]])}`);
      moveLayers(cuts, [`Layers: ${parts.join(", ")}.`, this.told_.textContent]);
    });
    this.element = h("section", { "aria-label": "Other layers", hidden: true }, h(".head", null, h("h2", null, "Try other layers"), h("p", null, "At which layer does each stage begin?")), form);
    this.timer = 0;
  }

  get isShown() {
    return !this.element.hidden;
  }

  read() {
    const cuts = this.inputs.map((input) => input.valueAsNumber);
    const edges = [0, ...cuts, this.n];
    return edges.every((edge, at) => Number.isInteger(edge) && (at === 0 || edge > edges[at - 1])) ? cuts : null;
  }

  // What is to be asked for; empty where it is what runs already, or cannot be.
  cuts() {
    const cuts = this.isShown && this.read();
    const text = cuts ? cuts.join() : "";
    this.asked = text;
    return text === this.runs ? "" : text;
  }

  isStale() {
    const cuts = this.isShown && this.read();
    return Boolean(cuts) && cuts.join() !== this.asked;
  }

  write(text) {
    text.split(",").forEach((cut, at) => (this.inputs[at].value = cut));
    this.touched();
  }

  take(edges) {
    this.write(edges.slice(1).map(([start]) => start).join());
    this.inputs[0].focus();
  }

  touched() {
    const cuts = this.read();
    const isSame = Boolean(cuts) && cuts.join() === this.runs;
    this.button.disabled = !cuts || isSame || isMoving();
    this.reset.hidden = isSame;
    say(this.told_, cuts ? (isSame ? "" : "Computing…") : `Each stage needs one layer or more, and there are ${this.n}.`);
    clearTimeout(this.timer);
    if (cuts && !isSame) this.timer = setTimeout(this.changed, WAIT_MS);
  }

  told(computed) {
    const found = computed.plans.find((plan) => plan.name === "these layers");
    const [base] = computed.plans;
    if (!found || this.isStale()) return;
    const parts = computed.streams.map((n, at) => {
      const [new_, old] = [found.tokens_per_s[at], base.tokens_per_s[at]];
      return old ? `${fixed(new_, new_ < 100 ? 1 : 0)} tok/s with ${n} stream${n === 1 ? "" : "s"} (${new_ >= old ? "+" : "−"}${percent(Math.abs(new_ / old - 1))})` : "";
    });
    say(this.told_, `Predicted: ${parts.filter(Boolean).join(", ")}.`);
  }

  update(state) {
    const { stages } = state;
    this.element.hidden = !canMove(state) || stages.length < 2;
    if (!this.isShown) return;
    this.stages = stages.map(stageName);
    const names = this.stages.join();
    const runs = stages.slice(1).map((stage) => stage.layers[0]).join();
    this.n = stages.at(-1).layers[1];
    if (names !== this.names) {
      this.names = names;
      this.inputs = stages.slice(1).map((stage) => h("input", { type: "number", min: "1", max: String(this.n - 1), step: "1", required: true, inputmode: "numeric", id: `cut-${stage.index}`, oninput: () => this.touched() }));
      this.fields.replaceChildren(...stages.slice(1).map((stage, at) => h("div", null, h("label", { for: `cut-${stage.index}` }, stageName(stage)), this.inputs[at])));
      this.runs = "";
    }
    if (runs !== this.runs) {
      const isFirst = !this.runs;
      this.runs = runs;
      this.write(runs);
      if (!isFirst) for (const after of AGAIN_MS) setTimeout(this.changed, after);
    } else this.button.disabled = !this.read() || this.read().join() === runs || isMoving();
  }
}

export function planView() {
  const bar = h(".cutbar", { role: "img" });
  const body = h("tbody");
  const COLUMNS = [["Stage", ""], ["Layers", "n"], ["Planned", "n", "The layers that the latest plan gave it"], ["Weights", "n"], ["Memory held", "n"], ["Memory free", "n"], ["Step of one row", "n"], ["of 8 rows", "n"], ["of 32 rows", "n"], ["Lanes", "n"]];
  const head = h("thead", null, h("tr", null, COLUMNS.map(heading)));
  const facts = h("dl.facts");
  const ifs = h("tbody");
  const plans = h(".panel.scroll", { tabindex: "0", role: "region", "aria-label": "Plans", hidden: true }, h("table", null, ifs));
  const note = h("p");
  const warning = h("p.warn-t", { role: "status" });
  const idle = h("p.soft", { role: "status" });
  const next = h(".advice");
  let computed = null;
  let asking = false;
  let shown = "";
  const moving = movePanel();
  const invite = inviteForm();
  const trial = new Trial(() => look());
  const rows = new Keyed(body, () => {
    const cells = COLUMNS.map(([, side]) => h(side ? `td.${side}` : "td"));
    return { element: h("tr", null, cells), cells };
  }, ({ cells }, stage, index) => {
    const steps = computed && computed.stages[index] ? computed.stages[index].step_ms : {};
    const values = [`${stage.index} ${stage.name || ""}`, layers(stage.layers), plannedOf(stage), bytes(stage.artifact_bytes), bytes(stage.resident_bytes), bytes(stage.memory_free_bytes), ms(steps["1"]), ms(steps["8"]), ms(steps["32"]), count(stage.lanes_total)];
    values.forEach((value, at) => say(cells[at], value));
    mark(cells[2], "warn-t", ![none, layers(stage.layers)].includes(plannedOf(stage)));
  });

  function plannedOf(stage) {
    const found = ((computed && computed.planned) || []).find((each) => each.name === stage.name);
    return found && found.layers ? layers(found.layers) : none;
  }

  async function look() {
    if (asking) return;
    asking = true;
    try {
      const cuts = trial.cuts();
      computed = await (await ask(cuts ? `/v1/pipeline/plan?cuts=${cuts}` : "/v1/pipeline/plan")).json();
      if (feed.state) rows.show(feed.state.stages, (stage) => stage.index);
      showIfs();
      trial.told(computed);
    } catch (error) {
      say(note, sentence(error.message));
    }
    asking = false;
    if (trial.isStale()) look();
  }

  function showIfs() {
    const counts = computed.streams;
    const base = computed.plans[0];
    say(note, computed.is_known ? "Predicted from each stage's measured steps, with the formula of the running scheduler. Memory is not checked here, but by the last command below." : "The stages have not measured their steps yet.");
    plans.hidden = false;
    ifs.replaceChildren(
      h("tr", null, h("th", { scope: "col" }, "Plan"), h("th", { scope: "col" }, "Layers"), counts.map((n) => h("th.n", { scope: "col" }, `${n} stream${n === 1 ? "" : "s"}`))),
      ...computed.plans.map((plan) => h("tr", null, h("td", null, plan === base ? h("b", null, plan.name) : plan.name), h("td.num", null, plan.layers.map(layers).join("  "), plan.name === BY_SPEED && trial.isShown ? h("button.small", { type: "button", onclick: () => trial.take(plan.layers) }, "Try") : ""),
        plan.tokens_per_s.map((rate, at) => {
          const gain = plan === base || !base.tokens_per_s[at] ? null : rate / base.tokens_per_s[at] - 1;
          return h("td.n", null, rate ? `${fixed(rate, rate < 100 ? 1 : 0)} tok/s` : none, gain === null ? "" : h(gain > 0.02 ? "span.ok-t" : gain < -0.02 ? "span.bad-t" : "span.soft", null, ` ${gain >= 0 ? "+" : "−"}${percent(Math.abs(gain))}`));
        }))));
  }

  function showNext(state) {
    // What listens everywhere is reached where this page was.
    const join = (feed.facts.join || "").replace(/^(0\.0\.0\.0|\[::\]):/, `${location.hostname}:`);
    const key = JSON.stringify([join, feed.facts.enrol, feed.facts.invites, state.missing]);
    if (key === shown) return;
    shown = key;
    const waiting = state.missing || [];
    const lines = [];
    const isHereAlone = /^(127\.|localhost:|\[::1\])/.test(feed.facts.join || "");
    invite.update(waiting);
    if (feed.facts.invites) lines.push(h("p.soft", null, waiting.length ? `Waiting for: ${waiting.join(", ")}.` : "No stage is awaited."), invite.element);
    else if (feed.facts.enrol) {
      const soft = waiting.length ? `Waiting for: ${waiting.join(", ")}. On the machine that started the pipeline, this prints its line:` : "No stage is awaited. On the machine that started the pipeline, this prints the line of one more:";
      lines.push(h("p.soft", null, soft), codeBlock(waiting.length ? waiting.map((name) => `relayline invite ${name}`).join("\n") : "relayline invite NAME --host ADDRESS"));
    } else if (isHereAlone) lines.push(h("p.soft", null, "Stages join on this machine alone. For others, name their stages in a manifest. The last of these commands prints the line for each machine:"), codeBlock("relayline init --model MODEL.gguf --hosts THIS-HOST,OTHER-HOST\nrelayline plan pipeline.yaml\nrelayline up pipeline.yaml"));
    else if (join) {
      const names = waiting.length ? waiting : ["NAME"];
      lines.push(h("p.soft", null, waiting.length ? `Waiting for: ${waiting.join(", ")}. On that machine:` : "No stage is awaited. To move a stage to another machine, end it and run there:"));
      for (const name of names) lines.push(codeBlock(`relayline stage --join ${join} --name ${name} --tls DIRECTORY`));
      lines.push(h("p.soft", null, "DIRECTORY holds the stage's certificate and token, made on the machine with the CA:"));
      lines.push(codeBlock(`relayline certs issue CA-DIRECTORY HOST --stage ${names[0]}`));
    } else lines.push(h("p.soft", null, "This coordinator was started with the addresses of its stages. To let machines join by themselves, put them into a manifest and start it on the first one. It prints the line for each other machine:"), codeBlock("relayline init --model MODEL.gguf --hosts THIS-HOST,OTHER-HOST\nrelayline plan pipeline.yaml\nrelayline up pipeline.yaml"));
    lines.push(h("p.soft", null, "Other lanes or another context need a new start. This shows the memory that they need:"), codeBlock("relayline plan pipeline.yaml"));
    next.replaceChildren(...lines);
  }

  return {
    element: h("div", null,
      h("section", null, h(".head", null, h("h2", null, "The plan that runs")), h(".panel", null, facts, h(".pad", null, bar, warning, idle), h(".scroll", { tabindex: "0", role: "region", "aria-label": "Stages" }, h("table", null, head, body)))),
      trial.element,
      moving.element,
      h("section", null, h(".head", null, h("h2", null, "Predicted speed of other plans"), note, h(".tools", null, h("button", { type: "button", onclick: look }, "Compute again"))), plans),
      h("section", null, h(".head", null, h("h2", null, "The next machine")), next)),
    show() {
      look();
    },
    recolour() {
      [...bar.children].forEach((part, at) => (part.style.color = inkOn(`g${at % 8}`)));
    },
    update() {
      const { state } = feed;
      const plan = state.plan || {};
      const fact = (name, value, more) => h("div", null, h("dt", null, name), h("dd", null, value, more ? h("small", null, ` ${more}`) : ""));
      const period = plan.period_ns ? plan.period_ns / 1e6 : null;
      facts.replaceChildren(
        fact("Model", state.model),
        fact("Lanes", state.ctx_tokens ? count(state.lanes) : none, state.ctx_tokens ? `of ${count(state.ctx_tokens)} tokens` : "not known yet"),
        fact("Groups", count(plan.n_groups), `of ${plan.group_rows} ${plural(plan.group_rows, "row")}`),
        fact("A token every", ms(period), "predicted"),
        fact("Overhead", ms(plan.overhead_ns / 1e6), "per round trip"),
        ...(state.grants && state.grants.rows ? [fact("Granted rows", count(state.grants.rows), "not waited for the coordinator")] : []),
        fact("Prompt chunk", count(plan.chunk_rows), plan.chunk_rows === 1 ? "row" : "rows"),
      );
      const unequal = state.imbalance;
      say(warning, unequal ? `${stageName(state.stages[unequal.slowest])} has slowed the pipeline down for ${unequal.for_s.toFixed(0)} s: layers ${unequal.layers.map(layers).join(", ")} would give ${percent(unequal.gain)} more tokens.` : "");
      const away = state.stages.filter((stage) => typeof stage.takeover_in_s === "number").map((stage) => `Others take over the layers of ${stageName(stage)} in ${stage.takeover_in_s.toFixed(0)} s.`);
      const without = (state.idle || []).map((entry) => `${entry.name} (${entry.state})`);
      say(idle, [...away, ...(without.length ? [`Without layers: ${without.join(", ")}.`] : [])].join(" "));
      const total = Math.max(1, ...state.stages.map((stage) => stage.layers[1]));
      bar.setAttribute("aria-label", state.stages.map((stage) => `${stageName(stage)}: layers ${layers(stage.layers)}`).join(", "));
      if (bar.children.length !== state.stages.length) {
        bar.replaceChildren(...state.stages.map((stage, at) => {
          const part = h(`div.k${at % 8}`, { title: `${stageName(stage)}: layers ${layers(stage.layers)}` }, h("span.name", null, `${stageName(stage)} · `), layers(stage.layers));
          part.style.color = inkOn(`g${at % 8}`);
          part.style.flexGrow = String((stage.layers[1] - stage.layers[0]) / total);
          part.style.flexBasis = "0";
          return part;
        }));
      }
      rows.show(state.stages, (stage) => stage.index);
      moving.update(state);
      trial.update(state);
      showNext(state);
    },
  };
}
