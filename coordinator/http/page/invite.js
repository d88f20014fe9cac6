// A join line for one more machine, where this server lets holders of a key make one. It is shown once.

import { codeBlock, h, say, sentence } from "./dom.js";
import { send } from "./steer.js";

export function inviteForm() {
  const name = h("input", { id: "invite-name", required: true, maxlength: "63", pattern: "[a-z0-9]([a-z0-9\\-]*[a-z0-9])?", title: "lower-case letters, digits and hyphens", autocomplete: "off", spellcheck: "false", list: "invite-names" });
  const names = h("datalist", { id: "invite-names" });
  const host = h("input", { id: "invite-host", maxlength: "253", autocomplete: "off", spellcheck: "false", placeholder: "10.0.0.7" });
  const spare = h("input", { id: "invite-spare", type: "checkbox" });
  const button = h("button.first", { type: "submit" }, "Make a join line");
  const trouble = h("p.bad-t", { role: "alert" });
  const made = h("div", { role: "status" });
  const element = h("form.trial.invite", null,
    h(".row", null,
      h("div", null, h("label", { for: "invite-name" }, "Name of the stage"), name, names),
      h("div", null, h("label", { for: "invite-host" }, "Address of the machine"), host)),
    h("label.check", { for: "invite-spare" }, spare, "as a spare: it gets layers only in place of another stage"),
    h(".row", null, button), trouble, made);
  element.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    say(trouble, "");
    made.replaceChildren();
    try {
      const found = await send("POST", "/v1/pipeline/invitations", { name: name.value.trim(), host: host.value.trim(), spare: spare.checked });
      const until = new Date(found.expires_unix_s * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
      const shown = [
        h("p.soft", null, `Run this on ${found.host}. It works once, until ${until}, and is not shown again. Whoever has it can become stage ${found.name}.`),
        codeBlock(found.line)];
      if (found.code) {
        const codeUntil = new Date(found.code_expires_unix_s * 1000).toLocaleTimeString("en-GB", { timeStyle: "short" });
        shown.push(h("p.soft", null, `Or, until ${codeUntil}, this in its place:`), codeBlock(found.short));
      }
      made.replaceChildren(...shown);
    } catch (error) {
      say(trouble, error.status ? sentence(error.message) : "The coordinator does not answer.");
    }
    button.disabled = false;
  });
  return {
    element,
    update(waiting) {
      names.replaceChildren(...waiting.map((each) => h("option", { value: each })));
    },
  };
}
