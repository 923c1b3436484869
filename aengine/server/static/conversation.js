/* A conversation is a tree of messages: a new answer and an edited question stand beside the old ones.
   Owns: the tree, which branch is shown, what of it is sent to a model.
   Does not know: the page, the server, where conversations are kept.
   Invariants: plain data that survives JSON; a node's parent is an earlier node's id or ROOT; `chosen[parent]` is the
   child that is shown. A node: {id, parent, role, content, reasoning, calls, callId, images, error, figures, finish}. */

export const ROOT = "root";
const ROLES = new Set(["user", "assistant", "tool"]);

export function newConversation(settings) {
  const now = Date.now();
  return { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", created: now, updated: now, settings: { ...settings }, nodes: [], chosen: {} };
}

export function add(conversation, parent, fields) {
  const node = { id: `${Date.now().toString(36)}-${conversation.nodes.length}`, parent: parent?.id ?? ROOT, content: "", ...fields };
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
    if (each.role === "assistant" && !each.content && !each.calls?.length) continue;
    const message = wire(each);
    const before = messages.at(-1);
    // Many templates want the roles to alternate; after an error two questions may follow each other.
    if (each.role === "user" && before?.role === "user") before.content = joined(before.content, message.content);
    else messages.push(message);
  }
  return messages;
}

function wire({ role, content, images, calls, callId }) {
  if (role === "tool") return { role, content, tool_call_id: callId };
  if (calls?.length) {
    return { role, content, tool_calls: calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } })) };
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
  return (answer.calls ?? []).filter(({ id }) => !results.has(id));
}

export function title({ title: given, nodes }) {
  if (given) return given;
  const first = nodes.find(({ role }) => role === "user");
  const text = first?.content.trim().replace(/\s+/g, " ") ?? "";
  return text ? (text.length > 60 ? `${text.slice(0, 60).trimEnd()}…` : text) : first ? "Image" : "New chat";
}

export function matches(conversation, words) {
  const text = [title(conversation), ...conversation.nodes.map(({ content }) => content)].join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

/** A conversation from a file somebody gave us, or null: only known fields, only of the right kind. */
export function checked(value) {
  if (typeof value !== "object" || !value || typeof value.id !== "string" || !Array.isArray(value.nodes)) return null;
  const ids = new Set([ROOT]);
  const nodes = [];
  for (const each of value.nodes) {
    if (!each || typeof each.id !== "string" || ids.has(each.id) || !ids.has(each.parent) || !ROLES.has(each.role) || typeof each.content !== "string") return null;
    ids.add(each.id);
    nodes.push(checkedNode(each));
  }
  const chosen = {};
  for (const [parent, child] of Object.entries(value.chosen ?? {})) {
    if (nodes.some(({ id, parent: its }) => id === child && its === parent)) chosen[parent] = child;
  }
  const settings = Object.fromEntries(Object.entries(value.settings ?? {}).filter(([, set]) => typeof set === "string"));
  const time = (at) => (Number.isFinite(at) ? at : Date.now());
  return { id: value.id, title: text(value.title), created: time(value.created), updated: time(value.updated), settings, nodes, chosen };
}

const text = (value) => (typeof value === "string" ? value : "");

function checkedNode({ id, parent, role, content, reasoning, calls, callId, images, figures, finish, thought }) {
  const made = { id, parent, role, content };
  if (reasoning) made.reasoning = text(reasoning);
  if (Array.isArray(calls)) made.calls = calls.map((call) => ({ id: text(call?.id), name: text(call?.name), args: text(call?.args) }));
  if (callId) made.callId = text(callId);
  if (Array.isArray(images)) made.images = images.filter((url) => /^data:image\/(png|jpeg|webp|gif);base64,/.test(url));
  if (figures) made.figures = text(figures);
  if (finish) made.finish = text(finish);
  if (Number.isFinite(thought)) made.thought = thought;
  return made;
}
