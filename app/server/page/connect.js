// Commands and code that connect programs to this server, with its real address and model.

import { get, hasKey } from "./api.js";
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

const PROGRAMS = "Programs"; // the tab of the commands of `ingle`

let chosen = PROGRAMS;
let model = "";
let clients = null; // the programs that `ingle` knows; null: not read yet

/** Show the commands and the code for a model. */
export async function showConnect(name) {
  model = name;
  clients ??= (await get("/inglenook/clients")).clients;
  draw();
}

function draw() {
  const names = [PROGRAMS, ...Object.keys(SNIPPETS)];
  replaceIfChanged(find("tabs"), [names, chosen], () => names.map(tab));
  if (chosen === PROGRAMS) replaceIfChanged(find("panel"), chosen, () => [programs()]);
  else replaceIfChanged(find("panel"), [chosen, model, hasKey()], () => [snippet(SNIPPETS[chosen])]);
  find("panel").setAttribute("aria-labelledby", `tab-${names.indexOf(chosen)}`);
}

function tab(name, index, names) {
  const isChosen = name === chosen;
  const attributes = {
    id: `tab-${index}`,
    role: "tab",
    type: "button",
    "aria-selected": String(isChosen),
    "aria-controls": "panel",
  };
  return element(
    "button",
    {
      ...attributes,
      tabindex: isChosen ? 0 : -1,
      click: () => choose(name),
      keydown: (event) => move(event, index, names),
    },
    name,
  );
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

/** Return the choice of a program, and the commands for it. */
function programs() {
  const options = clients.map((client) => element("option", { value: client.name }, client.title));
  const select = element("select", { id: "program" }, ...options);
  const commands = element("div", { class: "program", "aria-live": "polite" });
  const show = () => commands.replaceChildren(...commandsOf(clients.find((client) => client.name === select.value)));
  select.addEventListener("change", show);
  show();
  const choice = element("div", { class: "row" }, element("label", { for: "program" }, "Program"), select);
  return element("div", { class: "program" }, choice, commands);
}

function* commandsOf(client) {
  if (client.launches)
    yield code(
      `ingle with ${client.name}`,
      `Run ${client.title} with a model of this machine; its settings stay as they are`,
    );
  yield code(`ingle connect ${client.name}`, `Set up ${client.title} until ingle disconnect ${client.name}`);
}

function snippet(write) {
  return code(write({ base: location.origin, model }), chosen);
}

function code(text, title) {
  const bar = element(
    "div",
    { class: "code-bar" },
    element("span", {}, title),
    copyButton(`the code: ${title}`, () => text),
  );
  return element(
    "div",
    { class: "code" },
    bar,
    element("pre", { tabindex: 0, role: "group", "aria-label": title }, element("code", {}, text)),
  );
}
