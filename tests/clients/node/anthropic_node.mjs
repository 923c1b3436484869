// @anthropic-ai/sdk against /v1/messages.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { FRUIT, MODEL, URL, WEATHER, runChecks, validWeather } from "./common.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: "any", maxRetries: 0, timeout: 120_000 });
const tools = [{ name: "get_weather", description: "The weather in a city.", input_schema: WEATHER }];

await runChecks({
  async message_and_stream_agree() {
    const asked = { model: MODEL, max_tokens: 24, messages: FRUIT, temperature: 0 };
    const whole = await client.messages.create(asked);
    const final = await client.messages.stream(asked).finalMessage();
    assert.equal(final.content[0].text, whole.content[0].text);
    assert.ok(whole.content[0].text.length > 10);
    assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
    assert.equal(final.stop_reason, whole.stop_reason);
  },
  async count_tokens() {
    const { input_tokens } = await client.messages.countTokens({ model: MODEL, messages: FRUIT });
    assert.ok(input_tokens > 5);
  },
  async tool_streamed() {
    const asked = { model: MODEL, max_tokens: 200, messages: FRUIT, tools, tool_choice: { type: "any" } };
    const message = await client.messages.stream(asked).finalMessage();
    assert.equal(message.stop_reason, "tool_use");
    const call = message.content.find((block) => block.type === "tool_use");
    assert.equal(call.name, "get_weather");
    validWeather(call.input);
  },
  async typed_errors() {
    await assert.rejects(client.messages.create({ model: "unknown", max_tokens: 5, messages: FRUIT }), Anthropic.NotFoundError);
    await assert.rejects(client.messages.create({ model: MODEL, max_tokens: 0, messages: FRUIT }), Anthropic.BadRequestError);
  },
});
