// Ready settings for the tools that speak to an OpenAI-compatible server.

import { codeBlock, h, home } from "./dom.js";
import { feed } from "./feed.js";

const KEY = "YOUR-KEY"; // where the server demands none, tools still want some text here

const BRIDGE = "http://127.0.0.1:4000";

// What a tool needs that this server does not speak, LiteLLM translates.
function bridge(base, model) {
  return `# a terminal of its own: pip install 'litellm[proxy]'\nlitellm --model openai/${model} --api_base ${base} --api_key ${KEY} --port 4000\n\n`;
}

function claude(root, model, isServed) {
  const note = isServed ? "It speaks Anthropic's messages, which this server has." : "It speaks Anthropic's messages; LiteLLM translates them for this server.";
  const where = `export ANTHROPIC_BASE_URL=${isServed ? root : BRIDGE}\nexport ANTHROPIC_AUTH_TOKEN=${KEY}\nexport ANTHROPIC_MODEL=${isServed ? model : `openai/${model}`}\nclaude`;
  return ["Claude Code", note, (isServed ? "" : bridge(`${root}/v1`, model)) + where];
}

function codex(base, model, isServed) {
  const note = isServed ? "In ~/.codex/config.toml." : "It speaks OpenAI's responses; LiteLLM translates them for this server. Then in ~/.codex/config.toml:";
  const at = isServed ? base : `${BRIDGE}/v1`;
  const file = `model = "${isServed ? model : `openai/${model}`}"\nmodel_provider = "relayline"\n\n[model_providers.relayline]\nname = "relayline"\nbase_url = "${at}"\nenv_key = "RELAYLINE_API_KEY"\nwire_api = "responses"`;
  return ["Codex", note, (isServed ? "" : bridge(base, model)) + file];
}

function tools(base, model, has) {
  const root = base.replace(/\/v1$/, "");
  return [
    ["curl", "From a shell.", `curl ${base}/chat/completions \\\n  -H "Content-Type: application/json" -H "Authorization: Bearer ${KEY}" \\\n  -d '{"model": "${model}", "stream": true, "messages": [{"role": "user", "content": "Hello"}]}'`],
    ["openai for Python", "The official package; the one for JavaScript takes baseURL and apiKey alike.", `from openai import OpenAI\n\nclient = OpenAI(base_url="${base}", api_key="${KEY}")\nanswer = client.chat.completions.create(\n    model="${model}",\n    messages=[{"role": "user", "content": "Hello"}],\n)\nprint(answer.choices[0].message.content)`],
    ["LangChain", "pip install langchain-openai", `from langchain_openai import ChatOpenAI\n\nllm = ChatOpenAI(base_url="${base}", api_key="${KEY}", model="${model}")\nprint(llm.invoke("Hello").content)`],
    ["Open WebUI", "As environment of its container; or Settings, Connections, OpenAI API.", `docker run -p 3000:8080 \\\n  -e OPENAI_API_BASE_URL=${base} \\\n  -e OPENAI_API_KEY=${KEY} \\\n  ghcr.io/open-webui/open-webui:main`],
    ["aider", "Pair programming in a terminal.", `export OPENAI_API_BASE=${base}\nexport OPENAI_API_KEY=${KEY}\naider --model openai/${model}`],
    ["Continue", "In ~/.continue/config.yaml.", `models:\n  - name: ${model}\n    provider: openai\n    model: ${model}\n    apiBase: ${base}\n    apiKey: ${KEY}\n    roles: [chat, edit, apply]`],
    claude(root, model, has("/v1/messages")),
    codex(base, model, has("/v1/responses")),
  ];
}

export function connectView() {
  const list = h(".tools-list");
  let shown = "";
  return {
    element: h("section", null, h(".head", null, h("h2", null, "Connect your tool"), h("p", null, "This is the address of this page. Replace the key; if the server requires none, leave it.")), list),
    update() {
      const base = `${location.origin}${home}v1`;
      const model = feed.facts.model_id || "MODEL";
      if (shown === base + model) return;
      shown = base + model;
      list.replaceChildren(...tools(base, model, (path) => (feed.facts.routes || []).includes(path)).map(([name, note, text]) => h("div", null, h("h3", null, name), h("p", null, note), codeBlock(text))));
    },
  };
}
