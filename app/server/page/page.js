// The page of a running server: it polls the server's reports, and passes them to the parts of the page.

import { get, hasKey, KeyNeeded, setKey } from "./api.js";
import { showActivity, showCache, showMemory } from "./activity.js";
import { startChat } from "./chat.js";
import { showConnect } from "./connect.js";
import { copies, element, find, replaceIfChanged, setText } from "./dom.js";
import { showModels } from "./models.js";
import { showReplies } from "./replies.js";

const POLL_MS = 1000; // while requests or loads are in progress
const IDLE_POLL_MS = 2000;
const RETRY_MS = 2000; // after a failure
const PAUSE_MS = 10 * 60_000; // time without input and requests, since polls keep a server from ending when it is idle

let timer;
let polling = null; // the poll that is running
let usedAt = Date.now(); // time of the last input or request

/** Read all reports, show them, and poll again later. A page that is hidden or not used does not poll. */
async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  if (Date.now() - usedAt > PAUSE_MS) return showState("Paused", "paused");
  let wait;
  try {
    const isBusy = await refresh();
    if (isBusy) usedAt = Date.now();
    wait = isBusy ? POLL_MS : IDLE_POLL_MS;
    showState("Running", "good");
  } catch (error) {
    if (error instanceof KeyNeeded) return askForKey();
    wait = RETRY_MS;
    showState("No answer", "bad", `${error.message} The page tries again every ${RETRY_MS / 1000} seconds.`);
  }
  clearTimeout(timer);
  timer = setTimeout(pollOnce, wait);
}

/** Poll, unless a poll is running. */
function pollOnce() {
  polling ??= poll().finally(() => (polling = null));
  return polling;
}

/** Read and show all reports. Returns whether requests or loads are in progress. */
async function refresh() {
  const [reports, { replies }] = await Promise.all([get("/inglenook/models"), get("/inglenook/replies")]);
  const loaded = reports.models.filter((model) => model.state === "loaded" && model.kind === "chat");
  const paths = loaded.length
    ? loaded.map((model) => `/inglenook/engine?model=${encodeURIComponent(model.name)}`)
    : ["/inglenook/engine"];
  const engines = await Promise.all(paths.map(get));
  find("content").hidden = false;
  find("key").hidden = true;
  showModels(reports.models);
  showActivity(engines);
  showCache(engines);
  showMemory(reports);
  showReplies(replies);
  await showChoices(reports.models);
  return (
    engines[0].requests.length > 0 ||
    reports.models.some((model) => ["loading", "waiting", "unloading"].includes(model.state))
  );
}

/** List the models that generate text, loaded ones first. The first one is chosen until the user chooses another. */
async function showChoices(models) {
  const usable = models.filter((model) => model.kind === "chat");
  const loaded = usable.filter((model) => model.state === "loaded");
  const others = usable.filter((model) => model.state !== "loaded");
  const select = find("model");
  const before = select.value;
  const names = [...loaded, ...others].map((model) => [model.name, model.state === "loaded"]);
  replaceIfChanged(select, names, () =>
    names.map(([name, isLoaded]) => element("option", { value: name }, isLoaded ? name : `${name} (loads first)`)),
  );
  if (select.isChosen && names.some(([name]) => name === before)) select.value = before;
  await showConnect(select.value);
}

function showState(text, kind, problem = "") {
  setText(find("status"), text);
  find("status").dataset.state = kind;
  setText(find("problem"), problem);
  find("problem").hidden = !problem;
}

/** Continue to poll after a pause. */
function noteInput() {
  const isPaused = Date.now() - usedAt > PAUSE_MS;
  usedAt = Date.now();
  if (isPaused) pollOnce();
}

function askForKey() {
  showState("Key needed", "bad", hasKey() ? "The server does not know this key." : "");
  setKey("");
  find("content").hidden = true;
  find("key").hidden = false;
  find("key-field").focus();
}

function start() {
  setText(find("address"), `${location.origin}/v1`);
  copies(find("copy-address"), () => `${location.origin}/v1`);
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(find("key-field").value.trim());
    find("key-field").value = "";
    pollOnce();
  });
  find("model").addEventListener("change", (event) => {
    event.target.isChosen = true;
    showConnect(event.target.value);
  });
  for (const input of ["pointermove", "pointerdown", "keydown", "wheel"])
    document.addEventListener(input, noteInput, { passive: true });
  document.addEventListener("visibilitychange", () => {
    noteInput();
    pollOnce();
  });
  document.addEventListener("server-changed", pollOnce);
  startChat();
  pollOnce();
}

start();
