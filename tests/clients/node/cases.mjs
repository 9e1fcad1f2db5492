// The five cases for Node clients, like tests/clients/cases.py. Runs in the folder with the client's node_modules.
//
// A driver calls `main` with a function that takes the server's URL and the dialect and returns a client:
//   reply(model, prompt)    promise of the complete text
//   pieces(model, prompt)   async iterable of the pieces of a stream
//   call(model, prompt)     promise of {name, args} of a tool call
//   wrongModel, tooLong     functions that return whether an error is the client's error for this case

import { readFileSync } from "node:fs";

const data = JSON.parse(readFileSync(new URL("cases.json", import.meta.url)));
export const REPLY_TOKENS = data.reply_tokens;
export const TOOL_TOKENS = data.tool_tokens;
export const TOOL = data.tool;
const WRONG_MODEL = data.wrong_model;
const LONG_PROMPT = "word ".repeat(data.long_prompt_words);

class CaseFailed extends Error {}

const runs = {
  turn: async (client, model) => text([await client.reply(model, data.question)]),
  stream: async (client, model) => {
    const pieces = [];
    for await (const piece of client.pieces(model, data.question)) if (piece) pieces.push(piece);
    if (pieces.length < 2) throw new CaseFailed(`the stream has ${pieces.length} pieces of text`);
    return text(pieces);
  },
  tool: async (client, model) => {
    const { name, args } = await client.call(model, data.tool_question);
    const shown = `${name}(${JSON.stringify(args)})`;
    if (name !== TOOL.name || typeof args?.city !== "string") throw new CaseFailed(`called ${shown}`);
    return shown;
  },
  "wrong model": async (client) => {
    const message = await expectedError(() => client.reply(WRONG_MODEL, data.question), client.wrongModel);
    if (!message.includes(WRONG_MODEL)) throw new CaseFailed(`the error does not name the model: ${message}`);
    return message;
  },
  "too long": async (client, model) => {
    const message = await expectedError(() => client.reply(model, LONG_PROMPT), client.tooLong);
    if (!/context|too long/.test(message)) {
      throw new CaseFailed(`the error does not say that the prompt is too long: ${message}`);
    }
    return message;
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
    return { ok: true, detail: await runs[name](client, model) };
  } catch (error) {
    return { ok: false, detail: error instanceof CaseFailed ? error.message : describe(error) };
  }
}

function text(pieces) {
  const whole = pieces.join("");
  if (!whole.trim()) throw new CaseFailed("the reply is empty");
  return whole;
}

async function expectedError(request, isExpected) {
  let reply;
  try {
    reply = await request();
  } catch (error) {
    if (!isExpected(error)) throw new CaseFailed(`not the client's own error for this: ${describe(error)}`);
    return describe(error);
  }
  throw new CaseFailed(`no error; the reply is ${JSON.stringify(reply)}`);
}

function describe(error) {
  const cause = error?.cause?.message ? ` (${error.cause.message})` : "";
  return `${error?.name ?? typeof error}: ${error?.message ?? error}${cause}`;
}
