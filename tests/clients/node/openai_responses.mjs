// openai for Node, with the Responses API.
import OpenAI from "openai";
import { main, REPLY_TOKENS, TOOL, TOOL_TOKENS } from "./cases.mjs";

main((url) => {
  const { responses } = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
  const body = (model, prompt) => ({ model, input: prompt, max_output_tokens: REPLY_TOKENS });
  return {
    wrongModel: (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
    tooLong: (error) => error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded",
    reply: async (model, prompt) => (await responses.create(body(model, prompt))).output_text,
    async *pieces(model, prompt) {
      for await (const event of responses.stream(body(model, prompt))) {
        if (event.type === "response.output_text.delta") yield event.delta;
      }
    },
    async call(model, prompt) {
      const reply = await responses.create({
        ...body(model, prompt),
        max_output_tokens: TOOL_TOKENS,
        tools: [{ type: "function", name: TOOL.name, parameters: TOOL.schema, strict: true }],
        tool_choice: "required",
      });
      const called = reply.output.find((item) => item.type === "function_call");
      return { name: called.name, args: JSON.parse(called.arguments) };
    },
  };
});
