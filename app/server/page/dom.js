// Elements, figures, and announcements that all parts of the page share.

export const find = (id) => document.getElementById(id);

/** Return a new element. Children that are strings become text, never HTML. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** Set the text of an element if it differs, so that a selection in it stays. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Replace the children of an element if `key` has changed since the last call. */
export function replaceIfChanged(target, key, build) {
  const shown = JSON.stringify(key);
  if (target.shown === shown) return;
  target.shown = shown;
  target.replaceChildren(...build());
}

/** Add a sentence for screen readers. */
export function announce(text) {
  const live = find("live");
  live.append(element("p", {}, text));
  while (live.childElementCount > 20) live.firstChild.remove();
}

/** Return a button that copies the text that `read` returns. `what` completes its name. */
export function copyButton(what, read) {
  const button = element(
    "button",
    { type: "button", class: "small" },
    "Copy",
    element("span", { class: "unseen" }, ` ${what}`),
  );
  return copies(button, read);
}

/** Make a button copy a text, and show for a moment that it did. */
export function copies(button, read) {
  const label = button.firstChild;
  button.addEventListener("click", async () => {
    const copied = await copy(read());
    label.textContent = copied ? "Copied" : "Not copied";
    announce(copied ? "Copied" : "The browser does not allow copying");
    setTimeout(() => (label.textContent = "Copy"), 2000);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text);
  }
}

/** Copy by a selection: pages of other machines without TLS have no clipboard. */
function copySelected(text) {
  const focused = document.activeElement;
  const field = element("textarea", { class: "unseen" });
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return copied;
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const UNITS = ["B", "kB", "MB", "GB", "TB"];

export const count = (number) => whole.format(number);
export const rate = (number) => (number > 0 && number < 10 ? number.toFixed(1) : count(number));
export const percent = (part, total) => `${total > 0 ? Math.round((100 * part) / total) : 0} %`;
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export function size(bytes) {
  let unit = 0;
  while (bytes >= 999.5 && unit < UNITS.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return `${bytes < 10 && unit > 0 ? bytes.toFixed(1) : Math.round(bytes)} ${UNITS[unit]}`;
}

export function duration(seconds) {
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 90) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

/** Return a bar for the eyes; the text next to it has the same figures. Parts are [share, class] pairs. */
export function bar(...parts) {
  const made = element("span", { class: "bar", "aria-hidden": "true" });
  for (const [share, kind] of parts) {
    const part = element("span", { class: kind });
    part.style.width = `${Math.min(100, Math.max(0, 100 * share))}%`;
    made.append(part);
  }
  return made;
}
