// The box to try a model: it streams a reply, stops it, and reports its cost.

import { lines, post } from "./api.js";
import { announce, count, duration, element, find, percent, rate } from "./dom.js";
import { renderBlocks } from "./markdown.js";

const DRAW_MS = 80; // least time between two drawings of a growing reply

let messages = []; // of the conversation, as requests send them
let running = null; // the Turn that is running

export function startChat() {
  find("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  find("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  find("stop").addEventListener("click", () => running?.stop());
  find("new-chat").addEventListener("click", clear);
}

function clear() {
  running?.stop();
  messages = [];
  find("turns").replaceChildren();
  find("turns").hidden = true;
  find("new-chat").disabled = true;
  find("message").focus();
}

async function send() {
  const text = find("message").value.trim();
  if (!text || running || !find("model").value) return;
  find("message").value = "";
  messages.push({ role: "user", content: text });
  const conversation = messages;
  running = new Turn(find("model").value, text);
  showRunning(true);
  try {
    const reply = await running.run(conversation);
    if (reply) conversation.push({ role: "assistant", content: reply });
    else takeBack(conversation, text);
  } finally {
    running = null;
    showRunning(false);
  }
}

/** Remove a message without a reply from the conversation, and return it to the user. */
function takeBack(conversation, text) {
  conversation.pop();
  find("message").value ||= text;
}

function showRunning(isRunning) {
  const hadFocus = document.activeElement === find("stop") || document.activeElement === find("send");
  find("stop").hidden = !isRunning;
  find("send").hidden = isRunning;
  find("new-chat").disabled = messages.length === 0;
  document.dispatchEvent(new Event("server-changed"));
  if (hadFocus) (isRunning ? find("stop") : find("message")).focus();
}

/** One message and its reply. */
class Turn {
  constructor(model, text) {
    this.model = model;
    this.text = "";
    this.reasoning = "";
    this.id = ""; // of the reply; empty until its first chunk
    this.sources = [];
    this.announced = 0;
    this.drawnAt = 0;
    this.request = new AbortController();
    this.thoughts = element("pre", { class: "thoughts" });
    this.thinking = element("details", { hidden: true }, element("summary", {}, "Reasoning"), this.thoughts);
    this.body = element("div", { class: "markdown" });
    this.note = element("p", { class: "quiet cost" }, "Sent");
    this.shown = element(
      "article",
      { class: "reply", "aria-label": `Reply of ${model}`, "aria-busy": "true" },
      this.thinking,
      this.body,
      this.note,
    );
    find("turns").hidden = false;
    find("turns").append(element("article", { class: "question", "aria-label": "Your message" }, text), this.shown);
    this.scroll();
  }

  /** Stream the reply. Returns its text; empty if it failed. */
  async run(conversation) {
    let chunk = null;
    try {
      for await (const line of lines(await this.post(conversation))) {
        if (line.startsWith(":")) this.note.textContent = line.slice(1).trim();
        else if (line.startsWith("data: ") && line !== "data: [DONE]") this.take((chunk = JSON.parse(line.slice(6))));
      }
      this.end(chunk?.usage ? cost(chunk) : "");
      return this.text;
    } catch (error) {
      const isStopped = error.name === "AbortError";
      this.end(isStopped ? "Stopped before the first token" : error.message, !isStopped);
      return isStopped ? this.text : "";
    }
  }

  post(conversation) {
    const body = { model: this.model, messages: conversation, stream: true, service_class: "interactive" };
    return post("/v1/chat/completions", { ...body, stream_options: { include_usage: true } }, this.request.signal);
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    this.id = chunk.id;
    const delta = chunk.choices[0]?.delta ?? {};
    this.reasoning += delta.reasoning ?? "";
    this.text += delta.content ?? "";
    if (delta.content || delta.reasoning) this.note.textContent = "Writing";
    const wait = this.drawnAt + DRAW_MS - performance.now();
    if (wait <= 0) this.draw();
    else this.timer ??= setTimeout(() => this.draw(), wait);
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.drawnAt = performance.now();
    const isAtEnd = atEnd();
    this.sources = renderBlocks(this.body, this.text, this.sources);
    this.thinking.hidden = !this.reasoning;
    this.thoughts.textContent = this.reasoning;
    this.announceBlocks(this.sources.length - 1);
    if (isAtEnd) this.scroll();
  }

  /** Read complete blocks to screen readers, since each further token would be an interruption. */
  announceBlocks(end) {
    for (; this.announced < end; this.announced += 1) announce(this.body.children[this.announced].textContent);
  }

  end(note, isError = false) {
    this.draw();
    this.announceBlocks(this.sources.length);
    this.shown.removeAttribute("aria-busy");
    this.note.textContent = note;
    this.note.classList.toggle("error", isError);
    announce(note);
    this.scroll();
  }

  /** End the reply. The server then still reports its cost, unless the reply has not started. */
  stop() {
    if (this.id) post("/inglenook/stop", { reply: this.id }).catch(() => this.request.abort());
    else this.request.abort();
  }

  scroll() {
    const turns = find("turns");
    turns.scrollTop = turns.scrollHeight;
  }
}

function atEnd() {
  const turns = find("turns");
  return turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
}

/** Return the cost of a turn, given its last chunk. */
function cost({ usage, timings }) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const parts = [
    `${count(usage.prompt_tokens)} prompt tokens, ${count(cached)} cached (${percent(cached, usage.prompt_tokens)})`,
    `${count(usage.completion_tokens)} reply tokens`,
  ];
  if (timings?.predicted_per_second) parts.push(`${rate(timings.predicted_per_second)} tokens/s`);
  if (timings?.prompt_ms) parts.push(`first token after ${duration(timings.prompt_ms / 1000)}`);
  return parts.join(" · ");
}
