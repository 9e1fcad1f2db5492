// Commands and code that connect programs to this server, with its real address and model.

import { hasKey } from "./api.js";
import { copyButton, element, find, replaceIfChanged } from "./dom.js";

const KEY = "INGLE_API_KEY";

const SNIPPETS = {
  "OpenAI Python": ({ base, model }) => `${importOs()}from openai import OpenAI

client = OpenAI(base_url=${quoted(`${base}/v1`)}, api_key=${pythonKey()})
stream = client.chat.completions.create(
    model=${quoted(model)},
    messages=[{"role": "user", "content": "Hello"}],
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)`,
  curl: ({ base, model }) => `curl ${base}/v1/chat/completions \\
  -H "Content-Type: application/json" \\${shellKey("Authorization: Bearer ")}
  -d ${shellQuoted(JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }] }))}`,
  Anthropic: ({ base, model }) => `${importOs()}from anthropic import Anthropic

client = Anthropic(base_url=${quoted(base)}, api_key=${pythonKey()})
message = client.messages.create(
    model=${quoted(model)},
    max_tokens=1024,
    messages=[{"role": "user", "content": "Hello"}],
)
print(message.content[0].text)`,
  Ollama: ({ base, model }) => `${importOs()}from ollama import Client

${ollamaKey()}client = Client(host=${quoted(base)}${hasKey() ? ", headers=headers" : ""})
reply = client.chat(
    model=${quoted(model)},
    messages=[{"role": "user", "content": "Hello"}],
)
print(reply.message.content)`,
};

const quoted = (text) => JSON.stringify(text);
const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const pythonKey = () => (hasKey() ? `os.environ["${KEY}"]` : '"none"');
const shellKey = (start) => (hasKey() ? `\n  -H "${start}$${KEY}" \\` : "");
const importOs = () => (hasKey() ? "import os\n" : "");
const ollamaKey = () => (hasKey() ? `headers = {"Authorization": f"Bearer {os.environ['${KEY}']}"}\n` : "");

let chosen = Object.keys(SNIPPETS)[0];
let model = "";

/** Show the commands for a model. */
export function showConnect(name) {
  model = name;
  draw();
}

function draw() {
  const names = Object.keys(SNIPPETS);
  replaceIfChanged(find("tabs"), [names, chosen], () => names.map(tab));
  replaceIfChanged(find("panel"), [chosen, model, hasKey()], () => [snippet(SNIPPETS[chosen])]);
  find("panel").setAttribute("aria-labelledby", `tab-${names.indexOf(chosen)}`);
}

function tab(name, index, names) {
  const isChosen = name === chosen;
  const attributes = { id: `tab-${index}`, role: "tab", type: "button", "aria-selected": String(isChosen), "aria-controls": "panel" };
  return element("button", { ...attributes, tabindex: isChosen ? 0 : -1, click: () => choose(name), keydown: (event) => move(event, index, names) }, name);
}

function choose(name) {
  chosen = name;
  draw();
  find("tabs").querySelector("[aria-selected=true]").focus();
}

function move(event, index, names) {
  const steps = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: names.length - 1 };
  if (!(event.key in steps)) return;
  event.preventDefault();
  choose(names.at(steps[event.key] % names.length));
}

function snippet(write) {
  const text = write({ base: location.origin, model });
  const bar = element("div", { class: "code-bar" }, element("span", {}, chosen), copyButton(`the code for ${chosen}`, () => text));
  return element("div", { class: "code" }, bar, element("pre", { tabindex: 0, role: "group", "aria-label": `Code for ${chosen}` }, element("code", {}, text)));
}
