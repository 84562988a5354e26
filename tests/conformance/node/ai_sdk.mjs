// Vercel's AI SDK through its OpenAI-compatible provider. Prints one JSON object; arguments as in openai.mjs.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";

const [, , url, name, features] = process.argv;
const provider = createOpenAICompatible({
  name: "served", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider.chatModel(name);
const request = { model, prompt: "Say hello 👩‍👩‍👧", temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
const result = {};

const plain = await generateText(request);
result.plain = plain.text;
result.usage = plain.usage;
result.finish = plain.finishReason;

const streamed = streamText({ ...request, onError: ({ error }) => { result.streamError = String(error); } });
result.streamed = "";
for await (const part of streamed.textStream) result.streamed += part;
result.streamedUsage = await streamed.usage;

result.stop = result.plain.slice(5, 7);
result.stopped = (await generateText({ ...request, stopSequences: [result.stop] })).text;
result.seeds = [];
for (const seed of [1, 1, 2]) result.seeds.push((await generateText({ ...request, temperature: 1, seed })).text);
result.completion = (await generateText({ ...request, model: provider.completionModel(name) })).text;

try {
  await generateText({ ...request, model: provider.chatModel("nope") });
} catch (error) {
  result.missing = { status: error.statusCode, message: error.message };
}

if (features === "tools") {
  const schema = jsonSchema({
    type: "object", properties: { yes: { type: "boolean" } }, required: ["yes"], additionalProperties: false,
  });
  const longer = { ...request, maxOutputTokens: 64 };
  const called = await generateText({
    ...longer, tools: { answer: tool({ description: "Answers", inputSchema: schema }) }, toolChoice: "required",
  });
  result.tool = called.toolCalls.map((call) => ({ name: call.toolName, input: call.input }));
  result.json = (await generateText({ ...longer, output: Output.object({ schema }) })).output;
}
console.log(JSON.stringify(result));
