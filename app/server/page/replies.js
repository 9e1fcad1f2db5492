// The last replies: which tokens of their prompts were cached, and why the others were not.

import { bar, count, duration, element, find, percent, rate, replaceIfChanged } from "./dom.js";
import { clientName } from "./activity.js";

const SHOWN = 12;
const HEADS = ["Ended", "Model", "Client", "Prompt", "Cached", "Reply", "First token", "Total"];
const TIERS = [
  ["device_tokens", "device"],
  ["host_tokens", "RAM"],
  ["disk_tokens", "disk"],
];

const REASONS = {
  first_time: () => "no similar prompt before",
  diverged: (at) => `differs from an earlier prompt at token ${count(at)}`,
  removed: (at) => `a part was removed at token ${count(at)}`,
  evicted: (at) => `evicted from token ${count(at)} on`,
  recomputed: (at) => `computing was faster than reading from token ${count(at)} on`,
  prompt_logprobs: () => "prompt logprobs need the whole prompt",
};

export function showReplies(replies) {
  replaceIfChanged(find("replies"), replies, () => {
    if (!replies.length)
      return [element("p", { class: "quiet" }, "No reply yet. Send a message, or connect a program.")];
    return [table(replies.slice(0, SHOWN))];
  });
}

/** Return the table. Its roles are explicit, because narrow screens show each row as a block. */
function table(replies) {
  const heads = HEADS.map((title) => element("th", { scope: "col", role: "columnheader" }, title));
  const head = element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...heads));
  const body = element("tbody", { role: "rowgroup" }, ...replies.map(row));
  const caption = element("caption", { class: "unseen" }, "Recent replies, newest first");
  return element("table", { role: "table", class: "replies" }, caption, head, body);
}

function row(reply) {
  const cells = [
    element("time", { datetime: new Date(1000 * reply.ended_at).toISOString() }, clock(reply.ended_at)),
    reply.model,
    clientName(reply.client),
    `${count(reply.prompt_tokens)} tokens`,
    cached(reply),
    written(reply),
    reply.first_token_seconds == null ? "–" : duration(reply.first_token_seconds),
    reply.seconds ? duration(reply.seconds) : "–",
  ];
  return element(
    "tr",
    { role: "row" },
    ...cells.map((cell, index) => {
      const made = element("td", { role: "cell" }, cell);
      made.dataset.label = HEADS[index];
      return made;
    }),
  );
}

function cached(reply) {
  const total = TIERS.reduce((all, [key]) => all + reply[key], 0);
  if (reply.first_token_seconds == null) return "–";
  const tiers = TIERS.filter(([key, name]) => reply[key] && (name !== "device" || total > reply[key]));
  const detail = tiers.map(([key, name]) => `${count(reply[key])} ${name}`).join(", ");
  const why = reply.miss ? REASONS[reply.miss](reply.missed_at) : "";
  const text = `${count(total)} (${percent(total, reply.prompt_tokens)})`;
  const notes = [detail, why].filter(Boolean).join("; ");
  const shown = element("span", { class: "cached" }, text, bar([total / Math.max(1, reply.prompt_tokens), "used"]));
  return notes ? element("div", {}, shown, element("span", { class: "quiet note" }, notes)) : shown;
}

function written(reply) {
  if (reply.outcome && reply.first_token_seconds == null) return outcome(reply.outcome);
  const seconds = reply.seconds - (reply.first_token_seconds ?? 0);
  const speed = reply.reply_tokens > 1 && seconds > 0 ? ` at ${rate((reply.reply_tokens - 1) / seconds)}/s` : "";
  return `${count(reply.reply_tokens)} tokens${speed}${reply.outcome ? `, ${outcome(reply.outcome)}` : ""}`;
}

const outcome = (text) => (text.includes(" ") ? text : `failed: ${text}`);
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");
