/* The server's API, as any client may use it.
   Owns: requests, the key, errors as Problem, event streams.
   Does not know: conversations, the page. */

/** `status` 0: the server cannot be reached. `retryAfter`: seconds, for 429 and 503. */
export class Problem extends Error {
  constructor(message, status = 0, code = null, retryAfter = null) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

export const NO_ANSWER = "The server sent something that is not part of an answer.";

let key = "";
export function setKey(value) { key = value.trim(); }
export const hasKey = () => key !== "";

async function request(path, options = {}) {
  if (/[^!-~]/.test(key)) throw new Problem("The API key has a space or a letter that no key can have.", 401);
  const headers = { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...(options.body ? { "Content-Type": "application/json" } : {}) };
  let response;
  try { response = await fetch(path, { ...options, headers, cache: "no-store" }); }
  catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached. Is it running?");
  }
  if (response.ok) return response;
  let error = {};
  try { error = (await response.json()).error ?? {}; } catch { /* not an envelope: the status has to do */ }
  const after = Number(response.headers.get("retry-after"));
  throw new Problem(error.message || `The server answered ${response.status}.`, response.status, error.code ?? null, after > 0 ? after : null);
}

/** The served models: [{id, max_model_len, input_modalities}]. */
export async function models() {
  const response = await request("v1/models");
  try { return (await response.json()).data.filter(({ id }) => id && typeof id === "string"); }
  catch { throw new Problem("its list of models cannot be read", 500); }
}

/** The last `seconds` as Chrome's trace events. */
export const trace = async (seconds) => (await request(`debug/trace?seconds=${seconds}`)).json();

/** "ready", or the phase of a server that is not; throws Problem when there is none. */
export async function phase() {
  let response;
  try { response = await fetch("health", { cache: "no-store" }); } catch { throw new Problem("not reachable"); }
  return response.ok ? "ready" : (response.headers.get("x-aengine-phase") ?? `not ready (${response.status})`);
}

/** Starts a chat; gives an async iterator of chunks once the server has taken it. */
export async function chat(body, signal) {
  return events(await request("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal }));
}

// Comments keep the line open and carry nothing. The stream is complete only when [DONE] came.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Problem("The connection ended before the answer was complete.");
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield chunkOf(data);
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new Problem("The connection broke before the answer was complete.");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

function chunkOf(data) {
  let chunk = null;
  try { chunk = JSON.parse(data); } catch { /* as if it were null */ }
  if (typeof chunk !== "object" || !chunk) throw new Problem(NO_ANSWER, 500);
  if (chunk.error) throw new Problem(chunk.error.message || "The server broke the answer off.", chunk.error.status ?? 500, chunk.error.code ?? null);
  return chunk;
}
