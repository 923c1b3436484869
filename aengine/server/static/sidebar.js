/* The list of conversations.
   Owns: its elements, search, renaming, deleting, export and import, its being open on a phone.
   Does not know: messages. */

import { $, announce, el, iconButton } from "./dom.js";
import { matches, title } from "./conversation.js";

const narrow = matchMedia("(max-width: 52rem)");

export class Sidebar {
  constructor(chats, { focusPrompt }) {
    this.chats = chats;
    this.focusPrompt = focusPrompt;
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
    const none = el("li", { class: "none" }, words ? "Nothing found." : "No conversations yet.");
    $("conversations").replaceChildren(...(found.length ? found.map((each) => this._item(each)) : [none]));
    $("export").disabled = this.chats.all.size === 0;
  }

  _item(conversation) {
    const { id } = conversation;
    const name = title(conversation);
    const current = this.chats.current.id === id;
    const open = () => { this.chats.open(id); this.show(false); this.focusPrompt(); };
    const button = el("button", { type: "button", class: "open", title: name, onclick: open }, name);
    if (current) button.setAttribute("aria-current", "true");
    const item = el("li", {}, button, el("span", { class: "tools" },
      iconButton("edit", `Rename: ${name}`, () => this._rename(conversation, item)),
      iconButton("delete", `Delete: ${name}`, () => this._delete(conversation, item))));
    item.classList.toggle("current", current);
    item.classList.toggle("busy", this.chats.runs.has(id));
    return item;
  }

  _rename(conversation, item) {
    const box = el("input", { value: title(conversation), "aria-label": "Name of the conversation", maxLength: 200 });
    let left = false;
    const leave = (keep) => {
      if (left) return;
      left = true;
      if (keep && box.value.trim() !== title(conversation)) this.chats.rename(conversation.id, box.value);
      else this.draw();
    };
    box.addEventListener("blur", () => leave(true));
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter") leave(true);
      if (event.key === "Escape") { event.stopPropagation(); leave(false); }
    });
    item.replaceChildren(box);
    box.select();
  }

  _delete(conversation, item) {
    const sure = el("button", { type: "button", class: "quiet", onclick: () => { this.chats.delete(conversation.id); this.focusPrompt(); } }, "Delete");
    const no = el("button", { type: "button", class: "quiet", onclick: () => this.draw() }, "Keep");
    item.querySelector(".tools").replaceChildren(sure, no);
    item.classList.add("current");
    sure.focus();
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
