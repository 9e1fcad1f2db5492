// openai for Node, with chat completions.
import OpenAI from "openai";
import { main, REPLY_TOKENS, TOOL, TOOL_TOKENS } from "./cases.mjs";

main((url) => {
  const { completions } = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).chat;
  const body = (model, prompt) => ({ model, messages: [{ role: "user", content: prompt }], max_tokens: REPLY_TOKENS });
  return {
    wrongModel: (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
    tooLong: (error) => error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded",
    reply: async (model, prompt) => (await completions.create(body(model, prompt))).choices[0].message.content,
    async *pieces(model, prompt) {
      const chunks = await completions.create({ ...body(model, prompt), stream: true });
      for await (const chunk of chunks) yield chunk.choices[0]?.delta?.content;
    },
    async call(model, prompt) {
      const reply = await completions.create({
        ...body(model, prompt),
        max_tokens: TOOL_TOKENS,
        tools: [{ type: "function", function: { name: TOOL.name, parameters: TOOL.schema } }],
        tool_choice: "required",
      });
      const called = reply.choices[0].message.tool_calls[0].function;
      return { name: called.name, args: JSON.parse(called.arguments) };
    },
  };
});
