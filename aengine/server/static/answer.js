/* One answer under way.
   Owns: asking until the server takes it, adding up the stream's pieces in a node, the figures.
   Does not know: the page; it calls `changed` after each change.
   Invariants: a run ends once, with node.finish or node.error set; what was received before a stop or an error stays. */

import * as api from "./api.js";

const FEWEST = 8; // tokens, and the time between them, that say something about speed: those of one step come together
const SHORTEST_MS = 20;

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
const rate = (perSecond) => perSecond.toFixed(perSecond < 100 ? 1 : 0);

export class Answer {
  constructor(node, changed) {
    this.node = node;
    this.changed = changed;
    this.waiting = null; // {message, left}: the server asked to come back
    this.usage = null;
    this.first = this.last = 0;
    this._calls = new Map(); // index in the stream → call
    this._abort = new AbortController();
    this._goOn = () => {};
  }

  stop() { this._abort.abort(); }

  /** Ends the waiting for a server that was loading or full. */
  tryNow() { this._goOn(); }

  async run(body) {
    try {
      for await (const chunk of await this._taken(body)) this._take(chunk);
      this.node.finish ??= "stop";
    } catch (error) {
      if (error.name === "AbortError") this.node.finish = "stopped";
      else if (error instanceof api.Problem) this.node.error = { message: error.message, status: error.status, code: error.code };
      else this.node.error = { message: api.NO_ANSWER, status: 500, code: null }; // a piece of another shape
    }
    this.waiting = null;
    this.node.figures = this.figures();
  }

  async _taken(body) {
    for (;;) {
      this.began = performance.now();
      try {
        const chunks = await api.chat(body, this._abort.signal);
        this.waiting = null;
        return chunks;
      } catch (error) {
        if (error.status !== 503 && error.status !== 429) throw error;
        await this._wait(error.message, error.retryAfter ?? 2, error.status);
      }
    }
  }

  _wait(message, left, status) {
    return new Promise((resolve, reject) => {
      const { signal } = this._abort;
      let timer = 0;
      const stop = () => { clearTimeout(timer); reject(new DOMException("stopped", "AbortError")); };
      this._goOn = () => { clearTimeout(timer); signal.removeEventListener("abort", stop); resolve(); };
      const tick = () => {
        if (left <= 0) { this._goOn(); return; }
        this.waiting = { message, left, status };
        this.changed();
        left -= 1;
        timer = setTimeout(tick, 1000);
      };
      signal.addEventListener("abort", stop, { once: true });
      tick();
    });
  }

  _take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought || delta.content || delta.tool_calls) {
      this.last = performance.now();
      this.first ||= this.last;
    }
    if (thought) this.node.reasoning = (this.node.reasoning ?? "") + thought;
    if (delta.content) {
      if (this.node.reasoning && !this.node.content) this.node.thought = this.last - this.first;
      this.node.content += delta.content;
    }
    for (const piece of delta.tool_calls ?? []) this._call(piece);
    if (choice.finish_reason) this.node.finish = choice.finish_reason;
    this.changed();
  }

  _call({ index = 0, id, function: { name, arguments: args } = {} }) {
    let call = this._calls.get(index);
    if (!call) {
      call = { id: id ?? `call_${index}`, name: "", args: "" };
      this._calls.set(index, call);
      (this.node.calls ??= []).push(call);
    }
    if (name) call.name = name;
    if (args) call.args += args;
  }

  figures() {
    const parts = [];
    if (this.first) parts.push(`TTFT ${seconds(this.first - this.began)}`);
    const made = this.usage?.completion_tokens ?? 0;
    if (made >= FEWEST && this.last - this.first >= SHORTEST_MS) parts.push(`${rate(((made - 1) / (this.last - this.first)) * 1000)} tokens/s`);
    if (made) {
      const { prompt_tokens: prompt, prompt_tokens_details: details } = this.usage;
      parts.push(`${made} ${made === 1 ? "token" : "tokens"}`, `prompt ${prompt}, cached ${details?.cached_tokens ?? 0}`);
    }
    return parts.join(" · ");
  }
}
