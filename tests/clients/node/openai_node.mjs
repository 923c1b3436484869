// openai-node: chat, stream, tools, zod schemas, Responses, completions, typed errors, an aborted stream.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { BASE, FRUIT, MODEL, WEATHER, collect, runChecks, validWeather } from "./common.mjs";

const client = new OpenAI({ baseURL: BASE, apiKey: "any", maxRetries: 0, timeout: 120_000 });
const Answer = z.object({ unit: z.enum(["celsius", "fahrenheit"]), sure: z.boolean() });
const TOOL = { type: "function", function: { name: "get_weather", parameters: WEATHER } };

await runChecks({
  async chat_and_stream_agree() {
    const asked = { model: MODEL, messages: FRUIT, max_tokens: 24, temperature: 0 };
    const whole = await client.chat.completions.create(asked);
    const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
    const chunks = await collect(stream);
    const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
    assert.equal(text, whole.choices[0].message.content);
    assert.ok(text.length > 10);
    assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
  },
  async tool_streamed() {
    const runner = client.chat.completions.stream({
      model: MODEL, messages: FRUIT, tools: [TOOL], tool_choice: "required", parallel_tool_calls: false, max_tokens: 200,
    });
    const { choices } = await runner.finalChatCompletion();
    assert.equal(choices[0].finish_reason, "tool_calls");
    assert.equal(choices[0].message.tool_calls[0].function.name, "get_weather");
    validWeather(choices[0].message.tool_calls[0].function.arguments);
  },
  async strict_schema_through_zod() {
    const format = zodResponseFormat(Answer, "answer");
    const answer = await client.chat.completions.parse({ model: MODEL, messages: FRUIT, response_format: format, max_tokens: 100 });
    Answer.parse(answer.choices[0].message.parsed);
  },
  async responses() {
    const asked = { model: MODEL, input: "Name three fruits.", max_output_tokens: 24, temperature: 0 };
    const whole = await client.responses.create(asked);
    const events = await collect(await client.responses.create({ ...asked, stream: true }));
    assert.equal(events.at(-1).response.output[0].content[0].text, whole.output_text);
    const deltas = events.filter((event) => event.type === "response.output_text.delta");
    assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
    const parsed = await client.responses.parse({
      model: MODEL, input: "x", text: { format: zodTextFormat(Answer, "answer") }, max_output_tokens: 100,
    });
    Answer.parse(parsed.output_parsed);
  },
  async completions_and_models() {
    const asked = { model: MODEL, prompt: "The capital of France is", max_tokens: 8, temperature: 0 };
    const whole = await client.completions.create(asked);
    const chunks = await collect(await client.completions.create({ ...asked, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole.choices[0].text);
    assert.ok((await collect(client.models.list())).some((model) => model.id === MODEL));
  },
  async typed_errors() {
    await assert.rejects(client.chat.completions.create({ model: "unknown", messages: FRUIT }), OpenAI.NotFoundError);
    await assert.rejects(client.chat.completions.create({ model: MODEL, messages: FRUIT, n: 0 }), OpenAI.BadRequestError);
    await assert.rejects(client.embeddings.create({ model: MODEL, input: "x" }), OpenAI.InternalServerError);
  },
  async an_aborted_stream_ends() {
    const stream = await client.chat.completions.create({ model: MODEL, messages: FRUIT, max_tokens: 2000, stream: true, ignore_eos: true });
    let seen = 0;
    for await (const _ of stream) if (++seen === 3) break;
    assert.equal(seen, 3);
    assert.ok(stream.controller.signal.aborted);
  },
});
