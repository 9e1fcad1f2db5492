// The list of models: their states, and the buttons that load and unload them.

import { lines, post } from "./api.js";
import { announce, count, duration, element, find, percent, setText, size } from "./dom.js";

const SHOWN = 6; // models that are listed before the user asks for all of them
const STATES = {
  loaded: ["●", "Loaded"],
  loading: ["◐", "Loading"],
  waiting: ["◌", "Waiting"],
  unloading: ["◑", "Unloading"],
  unloaded: ["○", "Stored"],
  failed: ["✕", "Failed"],
};

const rows = new Map(); // name -> Row
let showsAll = false;
let latest = [];

/** Show the models of a report, those in use first. */
export function showModels(models) {
  latest = [...models].sort((a, b) => (a.state === "unloaded") - (b.state === "unloaded"));
  const used = latest.filter((model) => model.state !== "unloaded").length;
  const listed = showsAll ? latest : latest.slice(0, Math.max(SHOWN, used));
  for (const name of rows.keys()) {
    if (!listed.some((model) => model.name === name)) {
      rows.get(name).item.remove();
      rows.delete(name);
    }
  }
  listed.forEach((model, index) => place(model, index));
  showButton(latest.length);
}

/** Update the row of a model, and move it to its index. A row that is right already is not moved, to keep the focus. */
function place(model, index) {
  const list = find("models");
  if (!rows.has(model.name)) rows.set(model.name, new Row(model.name));
  const row = rows.get(model.name);
  row.update(model);
  if (list.children[index] !== row.item) {
    const focused = document.activeElement;
    list.insertBefore(row.item, list.children[index] ?? null);
    if (row.item.contains(focused)) focused.focus();
  }
}

function showButton(total) {
  const button = find("all-models");
  button.hidden = total <= SHOWN;
  setText(button, showsAll ? "Show fewer" : `Show all ${total} models`);
  button.onclick = () => {
    showsAll = !showsAll;
    showModels(latest);
  };
}

/** One model. The row keeps its elements, so that an update does not move the focus. */
class Row {
  constructor(name) {
    this.name = name;
    this.load = null; // the AbortController of a load that this page started
    this.error = "";
    this.chip = element("span", { class: "chip" });
    this.facts = element("p", { class: "quiet" });
    this.progress = element("progress", { max: 1, "aria-label": `Progress of ${name}`, hidden: true });
    this.problem = element("p", { class: "error", role: "alert", hidden: true });
    this.action = element("button", { type: "button", class: "small", click: () => this.act() });
    const head = element("div", { class: "row" }, element("h3", {}, name), this.chip, this.action);
    this.item = element("li", {}, head, this.facts, this.progress, this.problem);
    this.item.dataset.model = name;
  }

  update(model) {
    this.model = model;
    this.state = model.state;
    const [sign, word] = STATES[model.state] ?? ["", model.state];
    const done = model.state === "loading" && model.progress ? ` ${percent(model.progress, 1)}` : "";
    setText(this.chip, `${sign} ${word}${done}`);
    this.chip.dataset.state = model.state;
    setText(this.facts, facts(model));
    this.progress.hidden = model.state !== "loading" && model.state !== "waiting";
    if (model.progress) this.progress.value = model.progress;
    else this.progress.removeAttribute("value");
    this.showAction();
    const problem = this.error || model.problem || "";
    setText(this.problem, problem);
    this.problem.hidden = !problem;
  }

  showAction() {
    const isUsed = ["loaded", "unloading"].includes(this.state);
    const isLoading = ["loading", "waiting"].includes(this.state);
    const verb = isUsed ? "Unload" : isLoading || this.load ? "Cancel" : this.state === "failed" ? "Try again" : "Load";
    setText(this.action, verb);
    this.action.setAttribute("aria-label", `${verb === "Cancel" ? "Cancel loading" : verb} ${this.name}`);
    this.action.disabled = this.state === "unloading" || (isLoading && !this.load);
    this.action.hidden = isLoading && !this.load; // another client started this load
  }

  act() {
    if (this.load) this.load.abort();
    else if (this.state === "loaded") this.unloadModel();
    else this.loadModel();
  }

  /** Load the model. The response reports progress until the load ends; closing it stops the load. */
  async loadModel() {
    this.load = new AbortController();
    this.error = "";
    this.showAction();
    try {
      const response = await post("/inglenook/load", { model: this.name }, this.load.signal);
      for await (const line of lines(response)) {
        const report = line ? JSON.parse(line) : {};
        if (report.error) throw new Error(report.error.message);
        this.update({ ...this.model, ...report, progress: report.total ? report.done / report.total : null });
      }
      announce(`${this.name} is loaded`);
    } catch (error) {
      if (error.name !== "AbortError") this.error = error.message;
    } finally {
      this.load = null;
      this.changed();
    }
  }

  async unloadModel() {
    this.error = "";
    this.action.disabled = true;
    try {
      await post("/inglenook/unload", { model: this.name });
      announce(`${this.name} is unloaded`);
    } catch (error) {
      this.error = error.message;
    } finally {
      this.changed();
    }
  }

  changed() {
    document.dispatchEvent(new Event("server-changed"));
  }
}

function facts(model) {
  const held = Object.values(model.memory);
  const cache = sum(held, "cache") + sum(held, "host_pool");
  const known = [
    model.kind === "embedding" ? "embeddings" : "",
    model.size ? size(model.size) : "",
    model.context_length ? `context ${count(model.context_length)}` : "",
    cache ? `cache ${size(sum(held, "touched"))} of ${size(cache)}` : "",
    model.parked ? `parked cache ${size(model.parked)}` : "",
    model.pinned ? "pinned" : "",
    model.expires_in != null && model.state === "loaded"
      ? `unloads in ${duration(model.expires_in)} without requests`
      : "",
    model.load_seconds && model.state === "loaded" ? `loaded in ${duration(model.load_seconds)}` : "",
    ["loading", "waiting"].includes(model.state) && model.stage ? model.stage : "",
    model.names.length > 1 ? `also ${model.names.slice(1).join(", ")}` : "",
  ];
  return known.filter(Boolean).join(" · ");
}

export const sum = (items, key) => items.reduce((total, item) => total + (item[key] ?? 0), 0);
