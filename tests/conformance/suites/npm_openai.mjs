// npm's openai: models, chats, streams, tools, structured outputs, completions, embeddings and responses.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = process.env.CONFORMANCE_MODEL;
const client = new OpenAI({ baseURL: `${process.env.CONFORMANCE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const short = { model, max_tokens: 8, temperature: 0 };
const messages = [{ role: "user", content: "def f(" }];
const Answer = z.object({ count: z.union([z.literal(1), z.literal(2)]), is_good: z.boolean() });
const level = {
  type: "function",
  function: {
    name: "level",
    parameters: { type: "object", properties: { is_high: { type: "boolean" } }, required: ["is_high"], additionalProperties: false },
    strict: true,
  },
};

test("models", async () => {
  const names = [];
  for await (const each of client.models.list()) names.push(each.id);
  assert.ok(names.includes(model));
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("chat", async () => {
  const answer = await client.chat.completions.create({ ...short, messages });
  assert.equal(answer.choices[0].message.role, "assistant");
  assert.equal(answer.choices[0].finish_reason, "length");
  assert.equal(answer.usage.completion_tokens, 8);
});

test("chat stream equals the whole answer", async () => {
  const whole = await client.chat.completions.create({ ...short, messages });
  const stream = client.chat.completions.stream({ ...short, messages, stream_options: { include_usage: true } });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const last = await stream.finalChatCompletion();
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(last.usage.completion_tokens, 8);
});

test("chat stream is left", async () => {
  const stream = await client.chat.completions.create({ ...short, max_tokens: 200, messages, stream: true });
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta?.content) break;
  }
  assert.ok(stream.controller.signal.aborted);
});

test("required tool", async () => {
  const answer = await client.chat.completions.create({ ...short, max_tokens: 200, messages, tools: [level], tool_choice: "required", parallel_tool_calls: false });
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
  const [call] = answer.choices[0].message.tool_calls;
  assert.equal(typeof JSON.parse(call.function.arguments).is_high, "boolean");
});

test("streamed tool, run by the client", async () => {
  const called = [];
  const tool = { type: "function", function: { ...level.function, parse: JSON.parse, function: (args) => called.push(args) && "done" } };
  const runner = client.chat.completions.runTools(
    { ...short, max_tokens: 200, messages, stream: true, tools: [tool], tool_choice: { type: "function", function: { name: "level" } } },
    { maxChatCompletions: 1 },
  );
  for await (const _ of runner);
  assert.equal(typeof called[0].is_high, "boolean");
});

test("schema by zod", async () => {
  const answer = await client.chat.completions.parse({ ...short, max_tokens: 200, messages, response_format: zodResponseFormat(Answer, "answer") });
  assert.equal(typeof answer.choices[0].message.parsed.is_good, "boolean");
});

test("completion with log probabilities", async () => {
  const answer = await client.completions.create({ ...short, prompt: "import ", logprobs: 2 });
  assert.equal(answer.choices[0].logprobs.tokens.length, 8);
});

test("completion stream", async () => {
  let n = 0;
  for await (const chunk of await client.completions.create({ ...short, prompt: "import ", stream: true })) n += chunk.choices.length;
  assert.ok(n > 0);
});

test("embeddings", async () => {
  const answer = await client.embeddings.create({ model, input: ["import os", "a fox"] }); // base64 on the wire
  assert.equal(answer.data.length, 2);
  const norm = Math.hypot(...answer.data[0].embedding);
  assert.ok(Math.abs(norm - 1) < 1e-3);
});

test("response", async () => {
  const answer = await client.responses.create({ model, input: "def f(", max_output_tokens: 16, temperature: 0 });
  assert.equal(typeof answer.output_text, "string");
  assert.equal(answer.usage.output_tokens, 16);
  const next = await client.responses.create({ model, input: "go on", previous_response_id: answer.id, max_output_tokens: 16 });
  assert.equal(next.previous_response_id, answer.id);
  await client.responses.delete(answer.id);
});

test("response stream", async () => {
  const stream = client.responses.stream({ model, input: "def f(", max_output_tokens: 16, temperature: 0 });
  const kinds = new Set();
  stream.on("event", (event) => kinds.add(event.type));
  const last = await stream.finalResponse();
  assert.ok(kinds.has("response.output_text.delta"));
  assert.equal(last.status, "incomplete");
});

test("errors have their class", async () => {
  await assert.rejects(client.chat.completions.create({ ...short, model: "other", messages }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...short, messages: [{ role: "user", content: "word ".repeat(5000) }] }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.code, "context_length_exceeded");
    return true;
  });
});
