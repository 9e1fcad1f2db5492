// The five cases for clients of Node; the same as tests/clients/cases.py. Runs beside the client's node_modules.
//
// A driver calls `main` with a function that takes the server's URL and the dialect and returns a client:
//   reply(model, prompt)    promise of the whole text
//   pieces(model, prompt)   async iterable of the pieces of a stream
//   call(model, prompt)     promise of {name, args}
//   wrongModel, tooLong     functions that say whether an error is the one that the client has for this

import { readFileSync } from "node:fs";

const asked = JSON.parse(readFileSync(new URL("cases.json", import.meta.url)));
export const REPLY_TOKENS = asked.reply_tokens;
export const TOOL_TOKENS = asked.tool_tokens;
export const TOOL = asked.tool;
const WRONG_MODEL = asked.wrong_model;
const LONG_PROMPT = "word ".repeat(asked.long_prompt_words);

class Wrong extends Error {}

const runs = {
  turn: async (client, model) => text([await client.reply(model, asked.question)]),
  stream: async (client, model) => {
    const pieces = [];
    for await (const piece of client.pieces(model, asked.question)) if (piece) pieces.push(piece);
    if (pieces.length < 2) throw new Wrong(`the stream has ${pieces.length} pieces of text`);
    return text(pieces);
  },
  tool: async (client, model) => {
    const { name, args } = await client.call(model, asked.tool_question);
    const shown = `${name}(${JSON.stringify(args)})`;
    if (name !== TOOL.name || typeof args?.city !== "string") throw new Wrong(`called ${shown}`);
    return shown;
  },
  "wrong model": async (client) => {
    const said = await refused(() => client.reply(WRONG_MODEL, asked.question), client.wrongModel);
    if (!said.includes(WRONG_MODEL)) throw new Wrong(`the error does not name the model: ${said}`);
    return said;
  },
  "too long": async (client, model) => {
    const said = await refused(() => client.reply(model, LONG_PROMPT), client.tooLong);
    if (!/context|too long/.test(said)) throw new Wrong(`the error does not say that the prompt is too long: ${said}`);
    return said;
  },
};

export async function main(connect) {
  const [url, model, dialect, ...cases] = process.argv.slice(2);
  const client = connect(url, dialect);
  for (const name of cases) {
    const outcome = await outcomeOf(client, model, name);
    console.log(JSON.stringify({ case: name, ...outcome }));
  }
  process.exit(0); // some clients keep connections open
}

async function outcomeOf(client, model, name) {
  try {
    return { ok: true, saw: await runs[name](client, model) };
  } catch (error) {
    return { ok: false, saw: error instanceof Wrong ? error.message : shown(error) };
  }
}

function text(pieces) {
  const whole = pieces.join("");
  if (!whole.trim()) throw new Wrong("the reply is empty");
  return whole;
}

async function refused(ask, isExpected) {
  let reply;
  try {
    reply = await ask();
  } catch (error) {
    if (!isExpected(error)) throw new Wrong(`not the client's own error for this: ${shown(error)}`);
    return shown(error);
  }
  throw new Wrong(`no error; the reply is ${JSON.stringify(reply)}`);
}

function shown(error) {
  const cause = error?.cause?.message ? ` (${error.cause.message})` : "";
  return `${error?.name ?? typeof error}: ${error?.message ?? error}${cause}`;
}
