/* The open conversation.
   Owns: the row of messages, what their buttons do, following the end while text grows.
   Invariants: while an answer grows it is drawn once an animation frame at most, and only it; the view follows the end until
   the reader scrolls up, by however little, and again once the reader is back. */

import { $, announce, place } from "./dom.js";
import { openCalls, shown, siblings } from "./conversation.js";
import { AnswerView, QuestionView, ResultView } from "./message.js";

const VIEWS = { user: QuestionView, assistant: AnswerView, tool: ResultView };
const UPWARD = new Set(["ArrowUp", "PageUp", "Home"]);
const NEAR_PX = 60;
const QUICK_MS = 12; // what takes longer to draw is drawn less often: three quarters of the time are the reader's
const RARER = 3;

export class Thread {
  constructor(chats, askKey) {
    this.chats = chats;
    this.views = new Map(); // node → view, of the open conversation
    this.conversation = null;
    this.frame = 0;
    this.act = {
      edit: (node, text) => { chats.edit(node, text); this.toEnd(); },
      again: (node) => { chats.again(node); this.toEnd(); },
      retry: (node) => { chats.resume(node); this.toEnd(); },
      resume: (node) => chats.resume(node),
      switch: (node, step) => { chats.switch(node, step); },
      result: (node, call, text) => { chats.result(node, call, text); this.toEnd(); },
      key: askKey,
    };
    chats.addEventListener("change", () => this.draw());
    chats.addEventListener("progress", ({ detail }) => this._grew(detail));
    chats.addEventListener("end", ({ detail }) => this._ended(detail));
    this.following = true;
    this.top = 0;
    $("scroll").addEventListener("scroll", () => this._scrolled(), { passive: true });
    // Following would undo a scroll before it shows, so what means one counts.
    let touched = 0;
    $("scroll").addEventListener("wheel", ({ deltaY }) => { if (deltaY < 0) this._leave(); }, { passive: true });
    $("scroll").addEventListener("keydown", (event) => {
      if (event.target.tagName === "TEXTAREA") return;
      if (UPWARD.has(event.key)) this._leave();
      if (event.key === "End") { event.preventDefault(); this.toEnd(); }
    });
    $("scroll").addEventListener("touchstart", ({ touches: [{ clientY }] }) => { touched = clientY; }, { passive: true });
    $("scroll").addEventListener("touchmove", ({ touches: [{ clientY }] }) => { if (clientY > touched) this._leave(); }, { passive: true });
    // A field that grows, a phone's keyboard, the line of a loading server, a message that comes into view and has its
    // height only then: the end stays in view.
    const sizes = new ResizeObserver(() => { if (this.following) this.toEnd(); });
    for (const id of ["scroll", "messages"]) sizes.observe($(id));
    $("latest").addEventListener("click", () => this.toEnd());
  }

  draw() {
    const { current } = this.chats;
    if (this.conversation !== current) {
      this.views.clear();
      this.following = true;
    }
    this.conversation = current;
    const path = shown(current);
    $("welcome").hidden = path.length > 0;
    const views = path.map((node) => this._view(node));
    place($("messages"), views.map(({ box }) => box));
    path.forEach((node, i) => views[i].draw(this._facts(node)));
    $("stats").textContent = this.chats.run?.figures() ?? "";
    if (this.following) this.toEnd();
    $("latest").hidden = this.following || this._below() < NEAR_PX;
  }

  _view(node) {
    let view = this.views.get(node);
    if (!view) this.views.set(node, (view = new VIEWS[node.role](node, this.act)));
    return view;
  }

  _facts(node) {
    const { run, current } = this.chats;
    const all = siblings(current, node);
    return { place: all.indexOf(node), count: all.length, run: run?.node === node ? run : null, running: run !== null, open: node.calls ? openCalls(current, node) : [] };
  }

  _grew(node) {
    if (!this.views.has(node) || this.frame) return;
    this.frame = requestAnimationFrame(() => {
      const took = this._drawGrown();
      if (took < QUICK_MS) { this.frame = 0; return; }
      setTimeout(() => { this.frame = 0; this._grew(node); }, RARER * took);
    });
  }

  /** Gives how long that took, in milliseconds. */
  _drawGrown() {
    const began = performance.now();
    const { run } = this.chats;
    if (run === null) return 0;
    this.views.get(run.node)?.grow(run);
    $("stats").textContent = run.figures();
    if (this.following) this.toEnd();
    return performance.now() - began;
  }

  _ended(node) {
    if (!this.views.has(node) || node.error) return; // an error announces itself
    announce(node.finish === "stopped" ? "Stopped." : `Answer: ${node.content}`.slice(0, 2000));
  }

  editLast() {
    const last = shown(this.chats.current).findLast(({ role }) => role === "user");
    if (last && !this.chats.run) this._view(last).edit();
  }

  _below() {
    const { scrollHeight, scrollTop, clientHeight } = $("scroll");
    return scrollHeight - scrollTop - clientHeight;
  }

  _leave() { if ($("scroll").scrollTop > 0) this.following = false; }

  _scrolled() {
    const { scrollTop } = $("scroll");
    const below = this._below();
    if (scrollTop < this.top && below > 1) this.following = false; // not where text that shrank pulled the view up
    if (scrollTop > this.top && below < NEAR_PX) this.following = true;
    this.top = scrollTop;
    $("latest").hidden = this.following || below < NEAR_PX;
  }

  toEnd() {
    this.following = true;
    $("scroll").scrollTop = $("scroll").scrollHeight;
    this.top = $("scroll").scrollTop;
  }
}
