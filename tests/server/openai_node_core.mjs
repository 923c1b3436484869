// openai-node against a scripted server: run by test_openai_node.py; throws at the first thing that is not so.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "k", maxRetries: 0, timeout: 10_000 });
const asked = { model: "fake-model", messages: [{ role: "user", content: "hi" }] };

const whole = await client.chat.completions.create(asked);
assert.equal(whole.choices[0].message.content, "Hello!");
const { data, request_id } = await client.chat.completions.create(asked).withResponse();
assert.equal(data.choices[0].finish_reason, "stop");
assert.match(request_id, /^req-/);

const chunks = [];
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) chunks.push(chunk);
assert.equal(chunks[0].choices[0].delta.role, "assistant");
assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), "Hello!");
assert.equal(chunks.at(-1).usage.completion_tokens, 7);

const final = await client.chat.completions.stream(asked).finalChatCompletion();
assert.equal(final.choices[0].message.content, "Hello!");

const response = await client.responses.create({ model: "fake-model", input: "hi" });
assert.equal(response.output_text, "Hello!");

const ids = [];
for await (const model of client.models.list()) ids.push(model.id);
assert.deepEqual(ids, ["fake-model", "fake-alias"]);

await assert.rejects(client.chat.completions.create({ ...asked, model: "x" }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...asked, n: 0 }), OpenAI.BadRequestError);
console.log("all of it");
