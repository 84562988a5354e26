// The official client for Node. Prints one JSON object; arguments: address, model, and whether tools are wanted.
import OpenAI from "openai";

const [, , url, model, features] = process.argv;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello 👩‍👩‍👧" }];
const request = { model, messages, temperature: 0, max_tokens: 24 };
const result = {};

const plain = await client.chat.completions.create(request);
result.plain = plain.choices[0].message.content;
result.usage = plain.usage;

const stream = await client.chat.completions.create({
  ...request, stream: true, stream_options: { include_usage: true },
});
result.streamed = "";
for await (const chunk of stream) {
  result.streamed += chunk.choices[0]?.delta.content ?? "";
  result.finish = chunk.choices[0]?.finish_reason ?? result.finish;
  result.streamedUsage = chunk.usage ?? result.streamedUsage;
}

const helper = client.chat.completions.stream(request);
result.helper = (await helper.finalChatCompletion()).choices[0].message.content;

const two = await client.chat.completions.create({ ...request, n: 2, temperature: 1, seed: 7 });
result.two = two.choices.map((choice) => choice.message.content);

const middle = result.plain.slice(5, 7);
const stopped = await client.chat.completions.create({ ...request, stop: [middle] });
result.stop = middle;
result.stopped = stopped.choices[0].message.content;

const completion = await client.completions.create({ model, prompt: ["a", "b"], max_tokens: 4, temperature: 0 });
result.completions = completion.choices.map((choice) => choice.index);
result.models = (await client.models.list()).data.map((item) => item.id);

const failures = {
  missing: { ...request, model: "nope" }, empty: { ...request, messages: [] }, hot: { ...request, temperature: 3 },
};
for (const [name, body] of Object.entries(failures)) {
  try {
    await client.chat.completions.create(body);
    result[name] = null;
  } catch (error) {
    result[name] = { kind: error.constructor.name, status: error.status, param: error.param, code: error.code };
  }
}

if (features === "tools") {
  const parameters = { type: "object", properties: { yes: { type: "boolean" } }, required: ["yes"], additionalProperties: false };
  const called = await client.chat.completions.create({
    ...request, max_tokens: 64, tool_choice: "required", tools: [{ type: "function", function: { name: "answer", parameters } }],
  });
  result.tool = called.choices[0].message.tool_calls;
  const shaped = await client.chat.completions.create({
    ...request, max_tokens: 64,
    response_format: { type: "json_schema", json_schema: { name: "answer", schema: parameters, strict: true } },
  });
  result.json = JSON.parse(shaped.choices[0].message.content);
}
console.log(JSON.stringify(result));
