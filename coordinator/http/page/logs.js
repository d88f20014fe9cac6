// The latest lines of a process's log: of a stage, or of the coordinator.

import { ask, h, say, sentence } from "./dom.js";

const title = h("h2", { id: "log-title" });
const list = h("div.loglines", { tabindex: "0", role: "log", "aria-labelledby": "log-title" });
const trouble = h("p.bad-t", { role: "alert" });
const again = h("button", { type: "button", onclick: () => load() }, "Look again");
const close = h("button.first", { type: "button", onclick: () => dialog.close() }, "Close");
const dialog = h("dialog.wide", { id: "log", "aria-labelledby": "log-title" }, title, trouble, list, h(".row.end", null, again, close));
let path = "";

async function load() {
  say(trouble, "");
  try {
    const { lines } = await (await ask(path)).json();
    list.replaceChildren(...lines.map(({ unix_ms, level, text }) =>
      h(`p.${level}`, null, h("time", null, new Date(unix_ms).toLocaleTimeString("en-GB")), h("b", null, level === "info" ? "" : level), text)));
    if (!lines.length) list.replaceChildren(h("p.soft", null, "Nothing has been logged yet."));
    list.scrollTop = list.scrollHeight;
  } catch (error) {
    list.replaceChildren();
    say(trouble, error.status ? sentence(error.message) : "The coordinator does not answer.");
  }
}

// `stage`: its index, or null for the coordinator.
export function showLog(name, stage = null) {
  if (!dialog.isConnected) document.body.append(dialog);
  say(title, `Log of ${name}`);
  path = stage === null ? "/v1/pipeline/logs" : `/v1/pipeline/logs?stage=${stage}`;
  list.replaceChildren();
  dialog.showModal();
  close.focus();
  load();
}
