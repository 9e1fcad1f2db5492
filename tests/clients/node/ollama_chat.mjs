// ollama for Node, with its chat API, which cannot force a call.
import { Ollama } from "ollama";
import { main, REPLY_TOKENS, TOOL, TOOL_TOKENS } from "./cases.mjs";

main((url) => {
  const client = new Ollama({ host: url });
  const body = (model, prompt) => ({
    model,
    messages: [{ role: "user", content: prompt }],
    options: { num_predict: REPLY_TOKENS },
  });
  return {
    wrongModel: (error) => error.name === "ResponseError" && error.status_code === 404,
    tooLong: (error) => error.name === "ResponseError" && error.status_code === 400,
    reply: async (model, prompt) => (await client.chat(body(model, prompt))).message.content,
    async *pieces(model, prompt) {
      for await (const chunk of await client.chat({ ...body(model, prompt), stream: true })) yield chunk.message.content;
    },
    async call(model, prompt) {
      const reply = await client.chat({
        ...body(model, prompt),
        options: { num_predict: TOOL_TOKENS },
        tools: [{ type: "function", function: { name: TOOL.name, parameters: TOOL.schema } }],
      });
      const called = reply.message.tool_calls[0].function;
      return { name: called.name, args: called.arguments };
    },
  };
});
