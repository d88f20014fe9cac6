// Vercel's AI SDK: text, streams, tools, objects and embeddings, by its OpenAI provider (responses and chats) and its
// provider for servers that are compatible with OpenAI's.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const name = process.env.CONFORMANCE_MODEL;
const baseURL = `${process.env.CONFORMANCE_URL}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "relayline", baseURL, supportsStructuredOutputs: true, includeUsage: true });
const models = { responses: openai.responses(name), chat: openai.chat(name), compatible: compatible.chatModel(name) };
const Answer = z.object({ count: z.union([z.literal(1), z.literal(2)]), is_good: z.boolean() });
const common = { temperature: 0, maxRetries: 0 };

for (const [kind, model] of Object.entries(models)) {
  test(`${kind}: text`, async () => {
    const { text, usage, finishReason } = await generateText({ ...common, model, prompt: "def f(", maxOutputTokens: 16 });
    assert.equal(typeof text, "string");
    assert.equal(usage.outputTokens, 16);
    assert.equal(finishReason, "length");
  });

  test(`${kind}: stream`, async () => {
    const run = streamText({ ...common, model, prompt: "def f(", maxOutputTokens: 16 });
    let text = "";
    for await (const part of run.textStream) text += part;
    assert.equal(text, await run.text);
    assert.equal((await run.usage).outputTokens, 16);
  });

  test(`${kind}: tool`, async () => {
    const called = [];
    const level = tool({
      description: "Set a level.",
      inputSchema: z.object({ is_high: z.boolean() }),
      execute: async (input) => called.push(input) && "done",
    });
    await generateText({ ...common, model, prompt: "set it", tools: { level }, toolChoice: "required", stopWhen: stepCountIs(1), maxOutputTokens: 200 });
    assert.equal(typeof called[0].is_high, "boolean");
  });

  test(`${kind}: streamed tool`, async () => {
    const level = tool({ inputSchema: z.object({ is_high: z.boolean() }) });
    const run = streamText({ ...common, model, prompt: "set it", tools: { level }, toolChoice: { type: "tool", toolName: "level" }, maxOutputTokens: 200 });
    const [call] = await run.toolCalls;
    assert.equal(typeof call.input.is_high, "boolean");
  });

  test(`${kind}: object`, async () => {
    const { output } = await generateText({ ...common, model, prompt: "count", output: Output.object({ schema: Answer }), maxOutputTokens: 200 });
    assert.equal(typeof output.is_good, "boolean");
  });
}

test("embeddings", async () => {
  const { embeddings } = await embedMany({ model: openai.embedding(name), values: ["import os", "a fox"] });
  assert.equal(embeddings.length, 2);
  assert.ok(Math.abs(Math.hypot(...embeddings[0]) - 1) < 1e-3);
});
