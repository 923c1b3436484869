// What the Node clients' scripts share: the server's address, a schema and a tool, the list of checks.
// A failing check does not keep later ones from running; the exit code is 1 if any failed.
import assert from "node:assert/strict";

export const URL = process.env.AENGINE_URL;
export const BASE = `${URL}/v1`;
export const MODEL = process.env.AENGINE_MODEL;
export const FRUIT = [{ role: "user", content: "Name three fruits." }];
export const WEATHER = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 }, unit: { enum: ["celsius", "fahrenheit"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};

export function validWeather(given) {
  const weather = typeof given === "string" ? JSON.parse(given) : given;
  assert.deepEqual(Object.keys(weather).sort(), ["city", "unit"]);
  assert.ok(weather.city.length <= 12, JSON.stringify(weather));
  assert.ok(WEATHER.properties.unit.enum.includes(weather.unit), JSON.stringify(weather));
}

export async function collect(iterable) {
  const all = [];
  for await (const item of iterable) all.push(item);
  return all;
}

export async function runChecks(checks) {
  let failed = 0;
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      console.log(`ok ${name}`);
    } catch (error) {
      failed += 1;
      console.error(error);
      console.log(`failed ${name}: ${String(error?.message ?? error).split("\n")[0].slice(0, 300)}`);
    }
  }
  process.exit(failed ? 1 : 0);
}
