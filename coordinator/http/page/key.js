// The question for an API key, where a server asks for one.

import { apiKey, h, keepKey, say, sentence } from "./dom.js";

const wrong = h("p.bad", { id: "key-wrong", role: "alert" });
const text = h("input", { id: "key-text", type: "password", autocomplete: "off", spellcheck: "false", required: true });
const form = h("form", { id: "key-form" },
  h("h2", { id: "key-title" }, "This server asks for a key"),
  h("p", null, "It goes with every request of this tab and is forgotten when the tab closes."),
  h("label", { for: "key-text" }, "API key"), text, wrong,
  h(".row.end", null, h("button.first", { type: "submit" }, "Use key")));
const dialog = h("dialog", { id: "key", "aria-labelledby": "key-title" }, form);
let given = () => {};

form.addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(text.value.trim());
  text.value = "";
  say(wrong, "");
  dialog.close();
  given();
});

// Asks, unless it is being asked; `why` is what the server said to the key that it got, `then` is called with a new one.
export function askForKey(why, then) {
  given = then;
  if (!dialog.isConnected) document.body.append(dialog);
  if (apiKey()) say(wrong, sentence(why));
  if (!dialog.open) dialog.showModal();
}
