/* A conversation is a tree of messages: a new answer and an edited question stand beside the old ones.
   Owns: the tree, which branch is shown, what of it is sent to a model.
   Does not know: the page, the server, where conversations are kept.
   Invariants: plain data that survives JSON; a node's parent is an earlier node's id or ROOT; `chosen[parent]` is the
   child that is shown; nodes are never taken away, and `at` is when one was last written to: so two tabs' versions can be
   merged. A node: {id, parent, role, content, at, reasoning, thought, calls, callId, images, error, figures, finish,
   model}; an answer with neither `finish` nor `error` is under way, or its page was left. */

export const ROOT = "root";
const ROLES = new Set(["user", "assistant", "tool"]);

export function newConversation(settings) {
  const now = Date.now();
  return { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", created: now, updated: now, settings: strings(settings), nodes: [], chosen: {} };
}

export function add(conversation, parent, fields) {
  const [chance] = crypto.getRandomValues(new Uint32Array(1));
  const node = { id: `${Date.now().toString(36)}-${chance.toString(36)}`, parent: parent?.id ?? ROOT, content: "", at: Date.now(), ...fields };
  conversation.nodes.push(node);
  choose(conversation, node);
  return node;
}

export function choose(conversation, node) {
  conversation.chosen[node.parent] = node.id;
  conversation.updated = Date.now();
}

export const node = (conversation, id) => conversation.nodes.find((other) => other.id === id);

export const siblings = (conversation, { parent }) => conversation.nodes.filter((other) => other.parent === parent);

/** The shown branch, from the first message to the last. */
export function shown(conversation) {
  const byId = new Map(conversation.nodes.map((each) => [each.id, each]));
  const path = [];
  for (let at = byId.get(conversation.chosen[ROOT]); at; at = byId.get(conversation.chosen[at.id])) path.push(at);
  return path;
}

/** What is sent: the branch that ends in `last`, without answers that failed before their first word. */
export function wireMessages(conversation, last) {
  const byId = new Map(conversation.nodes.map((each) => [each.id, each]));
  const branch = [];
  for (let at = last; at; at = byId.get(at.parent)) branch.unshift(at);
  const system = conversation.settings.system?.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const each of branch) {
    if (each.role === "assistant" && !each.content && !calls(each).length) continue;
    const message = wire(each);
    const before = messages.at(-1);
    // Many templates want the roles to alternate; after an error two questions may follow each other.
    if (each.role === "user" && before?.role === "user") before.content = joined(before.content, message.content);
    else messages.push(message);
  }
  return messages;
}

/** The tool calls of an answer that came whole: half a call can be neither carried out nor sent back. */
function calls({ calls: all, finish, error }) {
  return all && finish && !error && !["stopped", "length"].includes(finish) ? all : [];
}

function wire(node) {
  const { role, content, images, callId } = node;
  if (role === "tool") return { role, content, tool_call_id: callId };
  if (calls(node).length) {
    return { role, content, tool_calls: calls(node).map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } })) };
  }
  return { role, content: images?.length ? [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: content }] : content };
}

function joined(first, second) {
  if (typeof first === "string" && typeof second === "string") return `${first}\n\n${second}`;
  const parts = (content) => (typeof content === "string" ? [{ type: "text", text: content }] : content);
  return [...parts(first), ...parts(second)];
}

/** Calls of an answer that have no result on the shown branch yet. */
export function openCalls(conversation, answer) {
  const results = new Set(shown(conversation).filter(({ role }) => role === "tool").map(({ callId }) => callId));
  return calls(answer).filter(({ id }) => !results.has(id));
}

export function title({ title: given, nodes }) {
  if (given) return given;
  const first = nodes.find(({ role }) => role === "user");
  const text = first?.content.trim().replace(/\s+/g, " ") ?? "";
  if (!text) return first ? "Image" : "New chat";
  return text.length > 60 ? `${text.slice(0, 60).toWellFormed().trimEnd()}…` : text;
}

export function matches(conversation, words) {
  const text = [title(conversation), ...conversation.nodes.map(({ content }) => content)].join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

/** Takes into `mine` what `theirs`, another version of the same conversation, has besides or has later. */
export function merge(mine, theirs) {
  const byId = new Map(mine.nodes.map((each) => [each.id, each]));
  for (const each of theirs.nodes) {
    const own = byId.get(each.id);
    if (!own) mine.nodes.push(each);
    else if ((each.at ?? 0) > (own.at ?? 0)) {
      for (const name of Object.keys(own)) delete own[name];
      Object.assign(own, each);
    }
  }
  const [older, newer] = theirs.updated > mine.updated ? [mine, theirs] : [theirs, mine];
  mine.chosen = { ...older.chosen, ...newer.chosen };
  mine.updated = newer.updated;
}

/** A conversation from a file somebody gave us or from storage, or null: only known fields, only of the right kind. */
export function checked(value) {
  if (typeof value !== "object" || !value || typeof value.id !== "string" || !Array.isArray(value.nodes)) return null;
  const ids = new Set([ROOT]);
  const nodes = [];
  const parents = new Map();
  for (const each of value.nodes) {
    if (!each || typeof each.id !== "string" || ids.has(each.id) || !ids.has(each.parent) || !ROLES.has(each.role) || typeof each.content !== "string") return null;
    ids.add(each.id);
    parents.set(each.id, each.parent);
    nodes.push(checkedNode(each));
  }
  const chosen = {};
  for (const [parent, child] of Object.entries(value.chosen ?? {})) {
    if (parents.get(child) === parent) chosen[parent] = child;
  }
  const time = (at) => (Number.isFinite(at) ? at : Date.now());
  return { id: value.id, title: text(value.title), created: time(value.created), updated: time(value.updated), settings: strings(value.settings), nodes, chosen };
}

const strings = (values) => Object.fromEntries(Object.entries(values ?? {}).filter(([, value]) => typeof value === "string"));

const text = (value) => (typeof value === "string" ? value : "");

export function checkedNode({ id, parent, role, content, reasoning, calls, callId, images, error, figures, finish, thought, model, at }) {
  const made = { id, parent, role, content };
  if (reasoning) made.reasoning = text(reasoning);
  if (Array.isArray(calls)) made.calls = calls.map((call) => ({ id: text(call?.id), name: text(call?.name), args: text(call?.args) }));
  if (callId) made.callId = text(callId);
  if (Array.isArray(images)) made.images = images.filter((url) => /^data:image\/(png|jpeg|webp|gif);base64,/.test(url));
  if (figures) made.figures = text(figures);
  if (finish) made.finish = text(finish);
  if (error) made.error = { message: text(error.message), status: Number(error.status) || 0, code: text(error.code) || null };
  if (model) made.model = text(model);
  if (Number.isFinite(thought)) made.thought = thought;
  if (Number.isFinite(at)) made.at = at;
  return made;
}
