// Requests in progress, token rates, the KV cache by tier, and the memory of all models.

import { bar, count, duration, element, find, percent, rate, replaceIfChanged, setText, size } from "./dom.js";
import { sum } from "./models.js";

const POINTS = 120; // points of the chart, one a second
const WINDOW = 3; // seconds over which rates are averaged
const SVG = "http://www.w3.org/2000/svg";
const PHASES = { waiting: "waits", reading: "reads its prompt", writing: "writes", preempted: "is preempted" };
const PURPOSES = [
  ["weights", "Weights"],
  ["steps", "Steps"],
  ["cache", "KV cache"],
  ["host_pool", "Swapped blocks"],
  ["tokenizer", "Tokenizer"],
];

const samples = []; // [seconds, tokens of prompts, tokens of replies] since the page was opened
const counters = new Map(); // model -> its last counters
const history = []; // [prompt tokens/s, reply tokens/s] of the last seconds
let totals = [0, 0];

/** Show the requests and the rates, given the engine reports of the loaded models. */
export function showActivity(engines, now = performance.now() / 1000) {
  const requests = engines[0]?.requests ?? [];
  const waiting = requests.filter((one) => one.phase === "waiting" || one.phase === "preempted").length;
  setText(find("running"), count(requests.length - waiting));
  setText(find("waiting"), count(waiting));
  const [reading, writing] = rates(engines, now);
  setText(find("reading-rate"), rate(reading));
  setText(find("writing-rate"), rate(writing));
  history.push([reading, writing]);
  history.splice(0, history.length - POINTS);
  drawHistory();
  showRequests(requests);
}

/** Return the tokens per second of prompts and of replies. Counters restart when a model is loaded again. */
function rates(engines, now) {
  for (const engine of engines) {
    const last = counters.get(engine.model) ?? engine;
    const restarted = engine.computed_tokens < last.computed_tokens;
    const written = engine.generated_tokens - (restarted ? 0 : last.generated_tokens);
    const computed = engine.computed_tokens - (restarted ? 0 : last.computed_tokens);
    totals = [totals[0] + Math.max(0, computed - written), totals[1] + written];
    counters.set(engine.model, engine);
  }
  samples.push([now, ...totals]);
  while (samples.length > 2 && samples[0][0] < now - WINDOW) samples.shift();
  const [then, ...before] = samples[0];
  const seconds = Math.max(now - then, 0.1);
  return totals.map((total, index) => (total - before[index]) / seconds);
}

function drawHistory() {
  const peak = Math.max(1, ...history.flat());
  const lines = [0, 1].map((which) => {
    const points = history.map((pair, index) => {
      const x = 120 - (history.length - 1 - index) * (120 / (POINTS - 1));
      return `${x.toFixed(1)},${(31 - (30 * pair[which]) / peak).toFixed(1)}`;
    });
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("points", points.join(" "));
    line.setAttribute("class", which ? "writing" : "reading");
    return line;
  });
  find("history").replaceChildren(...lines);
  setText(find("peak"), peak > 1 ? `highest ${rate(peak)}/s` : "");
}

function showRequests(requests) {
  replaceIfChanged(find("requests"), requests, () => {
    if (!requests.length) return [element("li", { class: "quiet" }, "No request is in progress.")];
    return requests.map((one) => {
      const done = one.phase === "reading" ? `${count(one.prompt_done)} of ${count(one.prompt_total)} tokens` : "";
      const written = one.reply_tokens ? `${count(one.reply_tokens)} tokens` : "";
      const known = [PHASES[one.phase], done || written, duration(one.seconds)].filter(Boolean).join(" · ");
      return element(
        "li",
        {},
        element("span", {}, clientName(one.client)),
        element("span", { class: "quiet" }, ` ${one.model} · ${known}`),
      );
    });
  });
}

/** Return a short name of a client, given its user agent. */
export function clientName(agent) {
  if (!agent) return "unknown program";
  if (agent.startsWith("Mozilla/")) return "web browser";
  return agent.split(" ")[0];
}

/** Show the tiers of each loaded model, and the disk, which all models share. */
export function showCache(engines) {
  const shown = engines.filter((engine) => engine.tiers.length);
  const disk = engines[0]?.disk;
  const key = [shown.map((engine) => [engine.model, engine.tiers, engine.block_bytes]), disk];
  replaceIfChanged(find("tiers"), key, () => {
    const parts = shown.map((engine) => tiersOf(engine, shown.length > 1));
    if (!shown.length) parts.push(element("p", { class: "quiet" }, "No model is loaded."));
    if (disk)
      parts.push(
        element("dl", { class: "tiers" }, tier("Disk", size(disk.used), size(disk.total), disk.used / disk.total)),
      );
    return parts;
  });
}

function tiersOf(engine, isOneOfSeveral) {
  const list = element("dl", { class: "tiers" });
  for (const one of engine.tiers.filter((one) => one.total)) {
    const bytes = (blocks) => (engine.block_bytes ? size(blocks * engine.block_bytes) : `${count(blocks)} blocks`);
    list.append(
      tier(one.name === "device" ? "Device" : one.name, bytes(one.used), bytes(one.total), one.used / one.total),
    );
  }
  return isOneOfSeveral ? element("div", {}, element("h3", {}, engine.model), list) : list;
}

function tier(name, used, total, share) {
  const figures = element(
    "dd",
    {},
    `${used} of ${total}`,
    element("span", { class: "quiet" }, ` ${percent(share, 1)}`),
    bar([share, "used"]),
  );
  return element("div", {}, element("dt", {}, name), figures);
}

/** Show what each model may use of each memory. */
export function showMemory({ models, memory }) {
  const holders = models.filter((model) => Object.keys(model.memory).length || model.parked);
  const key = [holders.map((model) => [model.name, model.memory, model.parked]), memory];
  replaceIfChanged(find("memory"), key, () =>
    Object.entries(memory).map(([name, amounts]) => oneMemory(name, amounts, holders)),
  );
}

function oneMemory(name, amounts, holders) {
  const held = holders.map((model) => [model, amountsIn(model, name)]).filter(([, amounts]) => amounts);
  const total = amounts.promised + amounts.free;
  const kinds = PURPOSES.filter(([purpose]) => held.some(([, amounts]) => amounts[purpose]));
  const shares = kinds.map(([purpose]) => [
    sum(
      held.map(([, amounts]) => amounts),
      purpose,
    ) / total,
    purpose,
  ]);
  const summary = `${size(amounts.promised)} promised to models, ${size(amounts.free)} free for others`;
  const parts = [
    element("h3", {}, name === "host" ? "RAM" : `GPU ${name}`),
    element("p", { class: "quiet" }, summary),
    bar(...shares),
  ];
  return element("div", { class: "memory" }, ...parts, ...(held.length ? [memoryTable(name, kinds, held)] : []));
}

function amountsIn(model, name) {
  if (model.memory[name]) return model.memory[name];
  return name === "host" && model.parked ? { cache: model.parked, touched: model.parked, isParked: true } : null;
}

function memoryTable(name, kinds, held) {
  const heads = ["Model", ...kinds.map(([, title]) => title), "Total"];
  const head = heads.map((title, index) => {
    const mark =
      index && index < heads.length - 1
        ? [element("span", { class: `mark ${kinds[index - 1][0]}`, "aria-hidden": "true" })]
        : [];
    return element("th", { scope: "col" }, ...mark, title);
  });
  const body = held.map(([model, amounts]) => {
    const label = amounts.isParked ? element("span", { class: "quiet" }, " parked") : "";
    const cells = kinds.map(([purpose]) => element("td", {}, amounts[purpose] ? size(amounts[purpose]) : "–"));
    const total = kinds.reduce((all, [purpose]) => all + (amounts[purpose] ?? 0), 0);
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, model.name, label),
      ...cells,
      element("td", {}, size(total)),
    );
  });
  const caption = element("caption", { class: "unseen" }, `Bytes of ${name} that each model may use`);
  return element(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": `Memory ${name} by model` },
    element("table", {}, caption, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)),
  );
}
