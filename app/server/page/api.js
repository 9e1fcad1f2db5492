// Requests to the server, with the key that the user has entered.

const STORED_KEY = "ingle-key"; // session storage ends with the tab

/** The server requires a key, or does not know the one that was sent. */
export class KeyNeeded extends Error {}

/** The server does not answer. */
export class Unreachable extends Error {}

export const hasKey = () => sessionStorage.getItem(STORED_KEY) !== null;

export function setKey(key) {
  if (key) sessionStorage.setItem(STORED_KEY, key);
  else sessionStorage.removeItem(STORED_KEY);
}

/** Return the response to a request. Throws KeyNeeded, Unreachable, or an Error with the server's message. */
async function request(path, options = {}) {
  const key = sessionStorage.getItem(STORED_KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The server does not answer.");
  }
  if (response.status === 401) throw new KeyNeeded("The server requires an API key.");
  if (!response.ok) throw new Error(await message(response));
  return response;
}

async function message(response) {
  try {
    const { error } = await response.json();
    return error.message ?? String(error);
  } catch {
    return `The server returned status ${response.status}.`;
  }
}

export const get = async (path) => (await request(path)).json();

export function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** Yield the lines of a response while they arrive. */
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await read(reader);
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
  if (rest) yield rest;
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The server closed the connection.");
  }
}
