// Vercel's ai with @ai-sdk/openai: the Responses API, which is its default, and chat.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { BASE, MODEL, collect, runChecks } from "./common.mjs";

const provider = createOpenAI({ baseURL: BASE, apiKey: "any" });
const common = { model: provider.responses(MODEL), temperature: 0, maxRetries: 0 };
const schema = z.object({ kind: z.enum(["cat", "dog"]), old: z.boolean() });
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.enum(["Rome", "Paris"]) }),
  execute: async ({ city }) => `sunny in ${city}`,
});

await runChecks({
  async text_and_stream_agree() {
    const asked = { ...common, system: "Be brief.", prompt: "Name three fruits.", maxOutputTokens: 24 };
    const whole = await generateText(asked);
    const streamed = streamText(asked);
    const pieces = await collect(streamed.textStream);
    assert.equal(pieces.join(""), whole.text);
    assert.ok(pieces.length > 3);
    assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
  },
  async generateObject() {
    const { object } = await generateObject({ ...common, schema, prompt: "A pet.", maxOutputTokens: 100 });
    schema.parse(object);
  },
  async tool_streamed_and_answered() {
    const prompt = "The weather in Rome?";
    const streamed = streamText({ ...common, tools: { weather }, toolChoice: "required", prompt, maxOutputTokens: 200 });
    const calls = (await collect(streamed.fullStream)).filter((part) => part.type === "tool-call");
    assert.equal(calls[0].toolName, "weather");
    assert.match(calls[0].input.city, /^(Rome|Paris)$/);
    const { messages } = await streamed.response;
    const { text } = await generateText({ ...common, messages: [{ role: "user", content: prompt }, ...messages], maxOutputTokens: 16 });
    assert.equal(typeof text, "string");
  },
  async chat_model() {
    const { text, usage } = await generateText({ ...common, model: provider.chat(MODEL), prompt: "Name a fruit.", maxOutputTokens: 16 });
    assert.ok(text.length > 0);
    assert.ok(usage.outputTokens > 0);
  },
});
