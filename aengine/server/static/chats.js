/* The conversations of this browser and the answers under way.
   Owns: which conversation is open, what sending, regenerating, editing and resuming mean, when a conversation is kept,
   what other tabs' writing changes here.
   Does not know: elements. It tells with events: "change" (what is shown, or the list), "progress" (detail: a node that
   grew), "end" (detail: a node whose run is over).
   Invariants: at most one run a conversation; a conversation without messages is not kept. */

import { Answer } from "./answer.js";
import { add, checked, checkedNode, choose, merge, newConversation, node as nodeOf, openCalls, shown, siblings, wireMessages } from "./conversation.js";
import * as store from "./store.js";

const KEEP_EVERY_MS = 2000;
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"];

export class Chats extends EventTarget {
  constructor() {
    super();
    this.all = new Map();
    this.runs = new Map(); // conversation id → Answer
    this.models = [];
    this.current = newConversation(store.recall("localStorage", "settings", { temperature: "0.7" }));
  }

  async load() {
    store.events.addEventListener("elsewhere", ({ detail }) => this._elsewhere(detail));
    for (const each of (await store.all()).map(checked).filter(Boolean)) this.all.set(each.id, each);
    this._return();
    const last = this.all.get(store.recall("sessionStorage", "current", ""));
    if (last) this.current = last;
    this._changed();
  }

  /** Newest first. */
  list() { return [...this.all.values()].sort((a, b) => b.updated - a.updated); }

  begin() { this._open(newConversation(this.current.settings)); }

  open(id) { this._open(this.all.get(id)); }

  _open(conversation) {
    this.current = conversation;
    store.keep("sessionStorage", "current", conversation.id);
    this._changed();
  }

  rename(id, title) {
    const conversation = this.all.get(id);
    conversation.title = title.trim().slice(0, 200);
    this._keep(conversation);
    this._changed();
  }

  delete(id) {
    store.remove(id);
    this._forget(id);
  }

  _forget(id) {
    this.runs.get(id)?.stop();
    this.all.delete(id);
    if (this.current.id === id) this.begin();
    else this._changed();
  }

  export() { return JSON.stringify({ format: "aengine-chats", version: 1, conversations: this.list() }, null, 1); }

  // What this tab has is merged with what another wrote meanwhile.
  _keep(conversation) {
    store.update(conversation.id, (kept) => {
      const theirs = checked(kept);
      if (theirs) merge(conversation, theirs);
      return conversation;
    });
  }

  /** Keeps what has come of the answers under way. */
  keepRunning() { for (const id of this.runs.keys()) if (this.all.has(id)) this._keep(this.all.get(id)); }

  /** The same of a page that is being left, where the database is too slow: only what is written at once stays. */
  leave() {
    store.keep("sessionStorage", "left", [...this.runs].map(([id, { node }]) => ({ id, node })));
  }

  _return() {
    const left = store.recall("sessionStorage", "left", []);
    for (const { id, node } of Array.isArray(left) ? left : []) {
      const mine = this.all.get(id);
      if (!mine || typeof node?.content !== "string" || !nodeOf(mine, node.id)) continue;
      merge(mine, { nodes: [checkedNode(node)], chosen: {}, updated: 0 });
      this._keep(mine);
    }
    store.keep("sessionStorage", "left", []);
  }

  async _elsewhere({ id, removed }) {
    if (removed) { if (this.all.has(id)) this._forget(id); return; }
    const theirs = checked(await store.get(id));
    if (!theirs) return;
    const mine = this.all.get(id);
    if (mine) {
      merge(mine, theirs);
      mine.title = theirs.title;
      mine.settings = theirs.settings;
    } else this.all.set(id, theirs);
    this._changed();
  }

  /** Takes what `export` made; gives how many conversations that were. One of a known id is merged with ours. */
  import(text) {
    const { conversations } = JSON.parse(text);
    const read = (Array.isArray(conversations) ? conversations : []).map(checked).filter(Boolean);
    for (const each of read) {
      const mine = this.all.get(each.id);
      if (mine) merge(mine, each);
      else this.all.set(each.id, each);
      this._keep(mine ?? each);
    }
    this._changed();
    return read.length;
  }

  set(name, value) {
    this.current.settings[name] = value;
    store.keep("localStorage", "settings", this.current.settings);
    if (this.all.has(this.current.id)) this._keep(this.current);
  }

  get run() { return this.runs.get(this.current.id) ?? null; }

  stop() { this.run?.stop(); }

  send(content, images) {
    this._ask(() => add(this.current, shown(this.current).at(-1), { role: "user", content, ...(images.length ? { images } : {}) }));
  }

  /** Another answer beside `node`. */
  again(node) { this._ask(() => nodeOf(this.current, node.parent)); }

  /** `content` instead of the question `node`, which stays as an alternative. */
  edit(node, content) {
    this._ask(() => add(this.current, nodeOf(this.current, node.parent), { role: "user", content, ...(node.images ? { images: node.images } : {}) }));
  }

  /** The result of a tool call; the model goes on once every call has one. */
  result(answer, call, content) {
    if (this.run) return;
    const last = add(this.current, shown(this.current).at(-1), { role: "tool", content, callId: call.id });
    if (openCalls(this.current, answer).length) { this._keep(this.current); this._changed(); }
    else this._ask(() => last);
  }

  /** Lets a stopped, cut or failed answer go on where its text ended; without text it begins anew. */
  resume(node) {
    if (this.run) return;
    delete node.calls;
    if (!node.content) { delete node.reasoning; delete node.thought; }
    this._start(node, node.content ? { continue_final_message: true, add_generation_prompt: false } : {});
  }

  switch(node, step) {
    const all = siblings(this.current, node);
    choose(this.current, all[all.indexOf(node) + step]);
    this._keep(this.current);
    this._changed();
  }

  /** `parent()` gives what is answered, once it is clear that nothing else is being answered here. */
  _ask(parent) { if (!this.run) this._start(add(this.current, parent(), { role: "assistant" }), {}); }

  async _start(node, extra) {
    const conversation = this.current;
    this.all.set(conversation.id, conversation);
    store.keep("sessionStorage", "current", conversation.id);
    delete node.error;
    delete node.finish;
    delete node.figures;
    let keptAt = performance.now();
    const run = new Answer(node, () => {
      node.at = Date.now();
      if (performance.now() - keptAt > KEEP_EVERY_MS) { keptAt = performance.now(); this.keepRunning(); }
      this.dispatchEvent(new CustomEvent("progress", { detail: node }));
    });
    this.runs.set(conversation.id, run);
    const body = this._body(conversation, node, extra);
    this._keep(conversation);
    this._changed();
    await run.run(body);
    node.at = Date.now();
    this.runs.delete(conversation.id);
    if (this.all.has(conversation.id)) this._keep(conversation);
    this._changed();
    this.dispatchEvent(new CustomEvent("end", { detail: node }));
  }

  _body(conversation, node, extra) {
    const { settings } = conversation;
    const body = { messages: wireMessages(conversation, node), stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, ...extra };
    if (this.models.some(({ id }) => id === settings.model)) body.model = settings.model;
    for (const name of NUMBERS) if (settings[name]?.trim() && Number.isFinite(Number(settings[name]))) body[name] = Number(settings[name]);
    const stop = settings.stop?.split("\n").filter(Boolean) ?? [];
    if (stop.length) body.stop = stop;
    const tools = listOf(settings.tools);
    if (tools.length) body.tools = tools;
    if (this.models.length > 1) node.model = body.model ?? this.models[0].id; // said where there is a choice
    return body;
  }

  _changed() { this.dispatchEvent(new Event("change")); }
}

function listOf(text) {
  try { const value = JSON.parse(text); return Array.isArray(value) ? value : []; } catch { return []; }
}
