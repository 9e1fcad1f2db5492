// @anthropic-ai/sdk, with the Messages API.
import Anthropic from "@anthropic-ai/sdk";
import { main, REPLY_TOKENS, TOOL, TOOL_TOKENS } from "./cases.mjs";

main((url) => {
  const { messages } = new Anthropic({ baseURL: url, apiKey: "none" });
  const body = (model, prompt) => ({ model, messages: [{ role: "user", content: prompt }], max_tokens: REPLY_TOKENS });
  return {
    wrongModel: (error) => error instanceof Anthropic.NotFoundError,
    tooLong: (error) => error instanceof Anthropic.BadRequestError,
    async reply(model, prompt) {
      const reply = await messages.create(body(model, prompt));
      return reply.content.map((block) => (block.type === "text" ? block.text : "")).join("");
    },
    async *pieces(model, prompt) {
      for await (const event of messages.stream(body(model, prompt))) {
        if (event.type === "content_block_delta" && event.delta.type === "text_delta") yield event.delta.text;
      }
    },
    async call(model, prompt) {
      const reply = await messages.create({
        ...body(model, prompt),
        max_tokens: TOOL_TOKENS,
        tools: [{ name: TOOL.name, input_schema: TOOL.schema }],
        tool_choice: { type: "any" },
      });
      const called = reply.content.find((block) => block.type === "tool_use");
      return { name: called.name, args: called.input };
    },
  };
});
