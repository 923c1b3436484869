/* One message as it is shown.
   Owns: its elements; what goes with it (figures, actions, notices, thoughts, tool calls).
   Does not know: other messages, scrolling.
   Invariants: a view belongs to one node for life; `draw` may be called as often as one likes. */

import { composing, copy, el, fit, iconButton, isEnter, refill } from "./dom.js";
import { Markdown } from "./markdown.js";
import { show } from "./parts.js";

/** `act`: what the buttons do, see thread.js. */
export class QuestionView {
  constructor(node, act) {
    this.node = node;
    this.act = act;
    this.running = false;
    this.meta = el("div", { class: "meta" });
    this.text = el("div", { class: "body" }, node.content);
    this.box = el("article", { class: "message user", "aria-label": "You" });
    this._whole();
  }

  _whole() {
    const images = this.node.images?.map((src, i) => el("img", { src, alt: `Attached image ${i + 1}` }));
    this.box.classList.remove("editing");
    this.box.replaceChildren(...(images ? [el("div", { class: "images" }, ...images)] : []), ...(this.node.content ? [this.text] : []), this.meta);
  }

  draw({ place, count, running }) {
    const { node, act } = this;
    this.running = running;
    if (this.send) this.send.disabled = running;
    const button = iconButton("copy", "Copy the message", () => copy(button, node.content));
    refill(this.meta, ...switcher(node, act, place, count, running), button,
      ...(running ? [] : [iconButton("edit", "Edit and send again", () => this.edit())]));
  }

  edit() {
    const box = el("textarea", { value: this.node.content, rows: 2, "aria-label": "Edit the message" });
    const leave = () => { this._whole(); this.meta.querySelector('[aria-label^="Edit"]')?.focus(); };
    const send = () => {
      if (this.running || !box.value.trim()) return;
      this._whole();
      this.act.edit(this.node, box.value.trim());
    };
    box.addEventListener("input", () => fit(box));
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !composing(event)) { event.stopPropagation(); leave(); }
      if (isEnter(event)) { event.preventDefault(); send(); }
    });
    this.send = el("button", { type: "button", class: "primary", onclick: send }, "Send");
    this.box.classList.add("editing");
    this.box.replaceChildren(el("div", { class: "editor" }, box, el("div", {},
      el("button", { type: "button", onclick: leave }, "Cancel"), this.send)));
    fit(box);
    box.focus();
  }
}

export class AnswerView {
  constructor(node, act) {
    this.node = node;
    this.act = act;
    this.text = el("div", { class: "body md" });
    this.markdown = new Markdown(this.text);
    this.calls = el("div");
    this._drawnCalls = [];
    this.notices = el("div");
    this._drawnNotice = "";
    this.meta = el("div", { class: "meta" });
    this.box = el("article", { class: "message assistant", "aria-label": "Answer" }, this.text, this.calls, this.notices, this.meta);
  }

  /** `run`: the answer under way here, else null; `running`: whether any is in this conversation. */
  draw({ place, count, run, running, open }) {
    const { node } = this;
    this.box.classList.toggle("writing", run !== null);
    this.box.setAttribute("aria-busy", String(run !== null));
    this._grow(run, running, running ? [] : open);
    const shown = switcher(node, this.act, place, count, running);
    if (!run) {
      const button = iconButton("copy", "Copy the answer", () => copy(button, node.content));
      if (node.content) shown.unshift(button);
      if (!running && (node.content || !this._drawnNotice)) shown.push(iconButton("again", "Another answer", () => this.act.again(node)));
      const ended = node.error ? "" : { length: "cut at the token limit", stopped: "stopped", undefined: "not finished" }[node.finish];
      if (ended && node.content && !running) shown.push(el("button", { type: "button", class: "quiet", onclick: () => this.act.resume(node) }, "Go on"));
      const figures = [node.model, node.figures, node.content && ended].filter(Boolean).join(" · ");
      if (figures) shown.push(el("span", { class: "figures" }, figures));
    }
    refill(this.meta, ...shown);
  }

  /** The growing part alone: once an animation frame. */
  grow(run) { this._grow(run, true, []); }

  _grow(run, running, open) {
    this._thoughts(run);
    this.markdown.draw(this.node.content, run === null);
    this._notice(run, running);
    show(this.calls, this._drawnCalls, (this.node.calls ?? []).map((call) => {
      const asks = open.includes(call);
      return { kind: "call", key: JSON.stringify([call, asks]), make: () => [this._call(call, asks)] };
    }));
  }

  _thoughts(run) {
    const { reasoning, content, thought } = this.node;
    if (!reasoning) {
      this.thoughts?.details.remove();
      this.thoughts = null;
      return;
    }
    if (!this.thoughts) {
      const inner = el("div", { class: "inner md" });
      this.thoughts = { summary: el("summary"), markdown: new Markdown(inner), details: el("details", { class: "thinking" }) };
      this.thoughts.details.append(this.thoughts.summary, inner);
      this.box.prepend(this.thoughts.details);
    }
    const thinks = run !== null && !content;
    this.box.classList.toggle("thinks", thinks);
    this.thoughts.summary.textContent = thinks ? "Thinking …" : thought ? `Thought for ${(thought / 1000).toFixed(1)} s` : "Thoughts";
    this.thoughts.markdown.draw(reasoning, !thinks);
  }

  _call(call, open) {
    const box = el("section", { class: "tool", "aria-label": `Call of ${call.name}` },
      el("h3", {}, "calls ", el("b", {}, call.name)), el("pre", { tabIndex: 0 }, el("code", {}, pretty(call.args))));
    if (!open) return box;
    const answer = el("textarea", { rows: 1, class: "code", placeholder: "What the tool answers", "aria-label": `Result of ${call.name}` });
    answer.addEventListener("input", () => fit(answer));
    const give = (event) => { event.preventDefault(); this.act.result(this.node, call, answer.value); };
    box.append(el("form", { onsubmit: give }, answer, el("button", {}, "Send result")));
    return box;
  }

  /** The seconds still to wait pass without a word: readers would say each, and the button lose the focus. */
  _notice(run, running) {
    const { text, left = 0, bad = false, actions } = this._state(run, running) ?? { text: "", actions: [] };
    const drawn = text && JSON.stringify([text, bad, actions.map(([name]) => name)]);
    if (drawn !== this._drawnNotice) {
      this._drawnNotice = drawn;
      this.left = el("span", { "aria-live": "off" });
      refill(this.notices, ...(text ? [notice(text, this.left, bad, actions)] : []));
    }
    if (left) this.left.textContent = ` – trying again in ${left} s`;
  }

  _state(run, running) {
    const { node, act } = this;
    if (run?.waiting) return { text: run.waiting.message, left: run.waiting.left, actions: [["Try now", () => run.tryNow()]] };
    if (run) return null;
    const again = (name) => (running ? [] : [[name, () => act.retry(node)]]);
    if (node.error) {
      const key = node.error.status === 401 ? [["Enter the key", act.key]] : [];
      return { text: node.error.message, bad: true, actions: [...key, ...again("Retry")] };
    }
    if (node.content || node.calls?.length) return null;
    const when = node.reasoning ? "before the first word of the answer" : "before the first word";
    const text = { stopped: `Stopped ${when}.`, length: `Cut at the token limit ${when}.`, undefined: "This answer is not finished." }[node.finish];
    return { text: text ?? "The answer is empty.", actions: again("Ask again") };
  }
}

export class ResultView {
  constructor(node) {
    this.box = el("article", { class: "message tool", "aria-label": "Result of a tool" },
      el("h3", {}, "result"), el("pre", { tabIndex: 0 }, el("code", {}, pretty(node.content))));
  }

  draw() {}
}

function notice(text, left, bad, actions) {
  return el("div", { class: bad ? "notice bad" : "notice", role: bad ? "alert" : "status" }, el("span", {}, text, left),
    ...actions.map(([name, onclick]) => el("button", { type: "button", onclick }, name)));
}

function switcher(node, act, place, count, running) {
  if (count < 2) return [];
  const back = iconButton("left", "Earlier version", () => act.switch(node, -1));
  const on = iconButton("right", "Later version", () => act.switch(node, 1));
  back.disabled = running || place === 0;
  on.disabled = running || place === count - 1;
  return [el("span", { class: "switch" }, back, `${place + 1} / ${count}`, on)];
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}
