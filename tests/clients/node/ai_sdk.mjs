// AI SDK with a provider for each dialect: @ai-sdk/openai (Responses), @ai-sdk/openai-compatible, @ai-sdk/anthropic, and
// for Ollama's API the provider named in the dialect.
import { APICallError, generateText, jsonSchema, streamText, tool } from "ai";
import { main, REPLY_TOKENS, TOOL, TOOL_TOKENS } from "./cases.mjs";

const providers = {
  responses: async (url) => (await import("@ai-sdk/openai")).createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }),
  openai: async (url) =>
    (await import("@ai-sdk/openai-compatible")).createOpenAICompatible({
      name: "ingle",
      baseURL: `${url}/v1`,
      apiKey: "none",
      includeUsage: true,
    }),
  anthropic: async (url) =>
    (await import("@ai-sdk/anthropic")).createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" }),
  "ollama, ollama-ai-provider-v2": async (url) =>
    (await import("ollama-ai-provider-v2")).createOllama({ baseURL: `${url}/api` }),
  "ollama, ai-sdk-ollama": async (url) => (await import("ai-sdk-ollama")).createOllama({ baseURL: url }),
};
const hasStatus = (error, status) =>
  error?.name === "OllamaError" || (APICallError.isInstance(error) && error.statusCode === status);
const canForceCalls = (dialect) => !dialect.startsWith("ollama"); // Ollama's API cannot

main((url, dialect) => {
  const provider = providers[dialect](url);
  const options = async (model, prompt) => ({
    model: (await provider)(model),
    prompt,
    maxOutputTokens: REPLY_TOKENS,
    maxRetries: 0,
  });
  return {
    wrongModel: (error) => hasStatus(error, 404),
    tooLong: (error) => hasStatus(error, 400),
    reply: async (model, prompt) => (await generateText(await options(model, prompt))).text,
    async *pieces(model, prompt) {
      const problems = [];
      const onError = ({ error }) => problems.push(error); // a text stream does not raise errors
      yield* streamText({ ...(await options(model, prompt)), onError }).textStream;
      if (problems.length) throw problems[0];
    },
    async call(model, prompt) {
      const reply = await generateText({
        ...(await options(model, prompt)),
        maxOutputTokens: TOOL_TOKENS,
        tools: { [TOOL.name]: tool({ description: TOOL.description, inputSchema: jsonSchema(TOOL.schema) }) },
        ...(canForceCalls(dialect) ? { toolChoice: "required" } : {}),
      });
      return { name: reply.toolCalls[0]?.toolName, args: reply.toolCalls[0]?.input };
    },
  };
});
