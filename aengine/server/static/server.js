/* The server's state.
   Owns: asking for it while the page is open, the line that shows it, the picker of models.
   Invariants: a server that loads or has gone is seen without a question; one request at a time. */

import { $, el } from "./dom.js";
import * as api from "./api.js";

const LOOK_MS = { ready: 5000, wait: 1000, down: 2000, key: 5000 };

export class ServerState {
  /** `learned(models)` when they are known; `needsKey()` when the server asks for one. */
  constructor(chats, { learned, needsKey }) {
    this.chats = chats;
    this.learned = learned;
    this.needsKey = needsKey;
    this.state = "wait";
    this.known = false; // whether the models shown are those of the server as it is now
    this.since = performance.now();
    this._wake = () => {};
    $("model").addEventListener("change", () => chats.set("model", $("model").value));
    chats.addEventListener("change", () => this._pick());
  }

  /** Looks again at once. `anew`: a question of its models was answered with no, so they are asked for again. */
  look(anew = false) {
    if (anew) this.known = false;
    this._wake();
  }

  async watch() {
    for (;;) {
      if (!document.hidden || this.state !== "ready") await this._look();
      await new Promise((resolve) => { this._wake = resolve; setTimeout(resolve, LOOK_MS[this.state]); });
    }
  }

  async _look() {
    let phase;
    try { phase = await api.phase(); } catch (error) { this._show("down", error.message); return; }
    if (phase !== "ready") { this._show("wait", phase); return; }
    if (this.state === "ready" && this.known) return;
    try {
      this.chats.models = await api.models();
      $("model").replaceChildren(...this.chats.models.map(({ id }) => el("option", { value: id }, id)));
      this.known = true;
      this._pick();
      this._show("ready", "ready");
      this.learned(this.chats.models);
    } catch (error) {
      const first = this.state !== "key";
      if (error.status === 401) this._show("key", api.hasKey() ? "the API key is wrong" : "an API key is needed");
      else this._show("wait", error.message);
      if (error.status === 401 && first) this.needsKey();
    }
  }

  _pick() {
    const names = this.chats.models.map(({ id }) => id);
    const wanted = this.chats.current.settings.model;
    if (names.length) $("model").value = names.includes(wanted) ? wanted : names[0];
  }

  _show(state, text) {
    if (this.state !== state) this.since = performance.now();
    this.state = state;
    $("status").dataset.state = state;
    if ($("status").textContent !== text) $("status").textContent = text;
    $("loading").hidden = state !== "wait";
    $("loading-text").textContent = `The server is getting ready: ${text}, ${Math.round((performance.now() - this.since) / 1000)} s. Messages wait for it.`;
  }
}
