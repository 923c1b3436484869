/* The list of conversations.
   Owns: its elements, search, renaming, deleting, export and import, its being open on a phone.
   Does not know: messages.
   Invariants: a conversation has one row for life, which is changed in place: a name being written and the focus stay. */

import { $, announce, composing, el, iconButton, place } from "./dom.js";
import { matches, title } from "./conversation.js";

const narrow = matchMedia("(max-width: 52rem)");

export class Sidebar {
  constructor(chats, { focusPrompt }) {
    this.chats = chats;
    this.focusPrompt = focusPrompt;
    this.rows = new Map(); // conversation id → Row
    this.none = el("li", { class: "none" });
    chats.addEventListener("change", () => this.draw());
    $("search").addEventListener("input", () => this.draw());
    $("new-chat").addEventListener("click", () => this.begin());
    $("open-sidebar").addEventListener("click", () => this.show(true));
    $("close-sidebar").addEventListener("click", () => this.show(false));
    $("scrim").addEventListener("click", () => this.show(false));
    $("sidebar").addEventListener("keydown", (event) => { if (event.key === "Escape" && this.open) { event.stopPropagation(); this.show(false); } });
    narrow.addEventListener("change", () => this.show(false));
    $("export").addEventListener("click", () => this._export());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this._import());
  }

  get open() { return $("sidebar").classList.contains("open"); }

  show(open) {
    const was = this.open;
    const on = open && narrow.matches;
    $("sidebar").classList.toggle("open", on);
    $("scrim").hidden = !on;
    $("frame").inert = on;
    $("open-sidebar").setAttribute("aria-expanded", String(on));
    if (on) $("close-sidebar").focus();
    else if (was) $("open-sidebar").focus();
  }

  begin() {
    this.chats.begin();
    this.show(false);
    this.focusPrompt();
  }

  draw() {
    const words = $("search").value.trim();
    const found = this.chats.list().filter((conversation) => !words || matches(conversation, words));
    this.none.textContent = words ? "Nothing found." : "No conversations yet.";
    for (const id of this.rows.keys()) if (!this.chats.all.has(id)) this.rows.delete(id);
    place($("conversations"), found.length ? found.map((each) => this._row(each).item) : [this.none]);
    $("export").disabled = this.chats.all.size === 0;
  }

  _row(conversation) {
    const { id } = conversation;
    let row = this.rows.get(id);
    if (!row) this.rows.set(id, (row = new Row(id, this)));
    row.draw(title(conversation), this.chats.current.id === id, this.chats.runs.has(id));
    return row;
  }

  choose(id) {
    this.chats.open(id);
    this.show(false);
    this.focusPrompt();
  }

  delete(id) {
    this.chats.delete(id);
    this.focusPrompt();
  }

  _export() {
    const url = URL.createObjectURL(new Blob([this.chats.export()], { type: "application/json" }));
    el("a", { href: url, download: `conversations-${new Date().toISOString().slice(0, 10)}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  async _import() {
    const [file] = $("import-file").files;
    $("import-file").value = "";
    let said;
    try {
      const count = this.chats.import(await file.text());
      said = count ? `${count} imported` : "None in the file";
    } catch { said = "Not such a file"; }
    announce(said);
    $("import").textContent = said;
    setTimeout(() => { $("import").textContent = "Import"; }, 2500);
  }
}

class Row {
  constructor(id, sidebar) {
    this.id = id;
    this.sidebar = sidebar;
    this.button = el("button", { type: "button", class: "open", onclick: () => sidebar.choose(id) });
    this.tools = el("span", { class: "tools" });
    this.item = el("li", {}, this.button, this.tools);
    this.name = null;
  }

  draw(name, current, busy) {
    this.item.classList.toggle("current", current);
    this.item.classList.toggle("busy", busy);
    if (current) this.button.setAttribute("aria-current", "true");
    else this.button.removeAttribute("aria-current");
    if (name === this.name) return;
    this.name = this.button.title = this.button.textContent = name;
    this._offer();
  }

  _offer() {
    this.item.classList.remove("asking");
    this.tools.replaceChildren(
      iconButton("edit", `Rename: ${this.name}`, () => this._rename()),
      iconButton("delete", `Delete: ${this.name}`, () => this._ask()));
  }

  _rename() {
    const box = el("input", { value: this.name, "aria-label": "Name of the conversation", maxLength: 200 });
    let left = false;
    const leave = (keep, focus) => {
      if (left) return;
      left = true;
      this.item.replaceChildren(this.button, this.tools);
      if (focus) this.button.focus();
      if (keep && box.value.trim() !== this.name) this.sidebar.chats.rename(this.id, box.value);
    };
    box.addEventListener("blur", () => leave(true, false));
    box.addEventListener("keydown", (event) => {
      if (composing(event)) return;
      if (event.key === "Enter") leave(true, true);
      if (event.key === "Escape") { event.stopPropagation(); leave(false, true); }
    });
    this.item.replaceChildren(box);
    box.select();
  }

  _ask() {
    const keep = () => { this._offer(); this.button.focus(); };
    const sure = el("button", { type: "button", class: "quiet", "aria-label": `Delete for good: ${this.name}`, onclick: () => this.sidebar.delete(this.id) }, "Delete");
    this.tools.replaceChildren(sure, el("button", { type: "button", class: "quiet", onclick: keep }, "Keep"));
    this.item.classList.add("asking");
    sure.focus();
  }
}
