/* One message as it is shown.
   Owns: its elements; what goes with it (figures, actions, notices, thoughts, tool calls).
   Does not know: other messages, scrolling.
   Invariants: a view belongs to one node for life; `draw` may be called as often as one likes. */

import { coarse, copy, el, fit, iconButton } from "./dom.js";
import { Markdown } from "./markdown.js";

/** `act`: what the buttons do, see thread.js. */
export class QuestionView {
  constructor(node, act) {
    this.node = node;
    this.act = act;
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
    const button = iconButton("copy", "Copy the message", () => copy(button, node.content));
    this.meta.replaceChildren(...switcher(node, act, place, count, running), button);
    if (!running) this.meta.append(iconButton("edit", "Edit and send again", () => this.edit()));
  }

  edit() {
    const box = el("textarea", { value: this.node.content, rows: 2, "aria-label": "Edit the message" });
    const leave = () => { this._whole(); this.meta.querySelector('[aria-label^="Edit"]')?.focus(); };
    const send = () => { if (box.value.trim()) this.act.edit(this.node, box.value.trim()); };
    box.addEventListener("input", () => fit(box));
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); leave(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !coarse()) { event.preventDefault(); send(); }
    });
    this.box.classList.add("editing");
    this.box.replaceChildren(el("div", { class: "editor" }, box, el("div", {},
      el("button", { type: "button", onclick: leave }, "Cancel"),
      el("button", { type: "button", class: "primary", onclick: send }, "Send"))));
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
    this.notices = el("div");
    this.meta = el("div", { class: "meta" });
    this.box = el("article", { class: "message assistant", "aria-label": "Answer" }, this.text, this.calls, this.notices, this.meta);
  }

  /** `run`: the answer under way here, else null; `running`: whether any is in this conversation. */
  draw({ place, count, run, running, open }) {
    const { node } = this;
    this.box.classList.toggle("writing", run !== null);
    this.box.setAttribute("aria-busy", String(run !== null));
    this.grow(run);
    this.calls.replaceChildren(...(node.calls ?? []).map((call) => this._call(call, !running && open.includes(call))));
    this.notices.replaceChildren(...this._notices(run, running));
    this.meta.replaceChildren(...switcher(node, this.act, place, count, running));
    if (run) return;
    const button = iconButton("copy", "Copy the answer", () => copy(button, node.content));
    if (node.content) this.meta.prepend(button);
    const nothing = !node.content && (node.error || node.finish === "stopped"); // then the notice has the button
    if (!running && !nothing) this.meta.append(iconButton("again", "Another answer", () => this.act.again(node)));
    const ended = { length: "cut at the token limit", stopped: "stopped" }[node.finish];
    if (ended && node.content && !running) this.meta.append(el("button", { type: "button", class: "quiet", onclick: () => this.act.resume(node) }, "Go on"));
    const figures = [node.figures, node.content && ended].filter(Boolean).join(" · ");
    if (figures) this.meta.append(el("span", { class: "figures" }, figures));
  }

  /** The growing part alone: once an animation frame. */
  grow(run) {
    this._thoughts(run);
    this.markdown.draw(this.node.content, run === null);
    if (!run) return;
    this.notices.replaceChildren(...this._notices(run, true));
    if (this.node.calls) this.calls.replaceChildren(...this.node.calls.map((call) => this._call(call, false)));
  }

  _thoughts(run) {
    const { reasoning, content, thought } = this.node;
    if (!reasoning) return;
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

  _notices(run, running) {
    const { node, act } = this;
    if (run?.waiting) {
      const { message, left } = run.waiting;
      return [notice(`${message} – trying again in ${left} s`, false, ["Try now", () => run.tryNow()])];
    }
    if (node.error) {
      const again = running ? [] : [["Retry", () => act.retry(node)]];
      if (node.error.status === 401) again.unshift(["Enter the key", act.key]);
      return [notice(node.error.message, true, ...again)];
    }
    return node.finish === "stopped" && !node.content && !node.reasoning ? [notice("Stopped before the first word.", false, ...(running ? [] : [["Ask again", () => act.retry(node)]]))] : [];
  }
}

export class ResultView {
  constructor(node) {
    this.box = el("article", { class: "message tool", "aria-label": "Result of a tool" },
      el("h3", {}, "result"), el("pre", { tabIndex: 0 }, el("code", {}, pretty(node.content))));
  }

  draw() {}
}

function notice(text, bad, ...actions) {
  return el("div", { class: bad ? "notice bad" : "notice", role: bad ? "alert" : "status" }, el("span", {}, text),
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
