// Vercel's ai with @ai-sdk/openai-compatible: generateText, streamText, generateObject, tools.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { BASE, MODEL, collect, runChecks } from "./common.mjs";

const provider = createOpenAICompatible({
  name: "aengine", baseURL: BASE, apiKey: "any", supportsStructuredOutputs: true, includeUsage: true,
});
const common = { model: provider(MODEL), temperature: 0, maxRetries: 0 };
const schema = z.object({ kind: z.enum(["cat", "dog"]), old: z.boolean() });
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.enum(["Rome", "Paris"]) }),
  execute: async ({ city }) => `sunny in ${city}`,
});

await runChecks({
  async generateText_and_streamText_agree() {
    const asked = { ...common, system: "Be brief.", prompt: "Name three fruits.", maxOutputTokens: 24 };
    const whole = await generateText(asked);
    const streamed = streamText(asked);
    const pieces = await collect(streamed.textStream);
    assert.equal(pieces.join(""), whole.text);
    assert.ok(pieces.length > 3);
    const usage = await streamed.usage;
    assert.equal(usage.outputTokens, whole.usage.outputTokens);
    assert.ok(usage.inputTokens > 0);
    assert.ok(["length", "stop"].includes(await streamed.finishReason));
  },
  async generateObject() {
    const { object } = await generateObject({ ...common, schema, prompt: "A pet.", maxOutputTokens: 100 });
    schema.parse(object);
  },
  async streamObject() {
    const streamed = streamObject({ ...common, schema, prompt: "A pet.", maxOutputTokens: 100 });
    assert.ok((await collect(streamed.partialObjectStream)).length > 0);
    schema.parse(await streamed.object);
  },
  async tool_called_and_answered() {
    const asked = { ...common, tools: { weather }, prompt: "The weather in Rome?", maxOutputTokens: 100 };
    const streamed = streamText({ ...asked, toolChoice: { type: "tool", toolName: "weather" } });
    const calls = (await collect(streamed.fullStream)).filter((part) => part.type === "tool-call");
    assert.equal(calls[0].toolName, "weather");
    assert.match(calls[0].input.city, /^(Rome|Paris)$/);
    const { messages } = await streamed.response;
    const question = { role: "user", content: asked.prompt };
    const { text } = await generateText({ ...common, tools: { weather }, toolChoice: "none", messages: [question, ...messages], maxOutputTokens: 8 });
    assert.equal(typeof text, "string");
    const steps = await generateText({ ...asked, toolChoice: "required", stopWhen: stepCountIs(2) });
    assert.ok(steps.steps[0].toolResults[0].output.startsWith("sunny"));
  },
  async errors_are_told() {
    await assert.rejects(
      generateText({ ...common, model: provider("unknown"), prompt: "x" }),
      (error) => APICallError.isInstance(error) && error.statusCode === 404 && error.message.includes(MODEL),
    );
  },
});
