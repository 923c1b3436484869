/* The settings of the open conversation, and the key.
   Owns: the dialog and its fields.
   Invariants: a field's text is the setting; a number out of range and what is none are said and not kept, and so is a
   list of tools that is none. */

import { $, fit } from "./dom.js";
import * as api from "./api.js";
import * as store from "./store.js";

const FIELDS = { system: "system", temperature: "temperature", top_p: "top_p", top_k: "top_k", min_p: "min_p", repetition_penalty: "repetition_penalty", seed: "seed", max_tokens: "max_tokens", "stop-strings": "stop", tools: "tools" };

export class Settings {
  constructor(chats, keyChanged) {
    this.chats = chats;
    for (const [id, name] of Object.entries(FIELDS)) {
      $(id).addEventListener("input", () => { if (this._fine(id)) chats.set(name, $(id).value); });
    }
    for (const box of $("settings").querySelectorAll("textarea")) box.addEventListener("input", () => fit(box));
    // Enter in a field would press the first button, which closes.
    $("settings").addEventListener("keydown", (event) => { if (event.key === "Enter" && event.target.tagName === "INPUT") { event.preventDefault(); event.target.blur(); } });
    $("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
    $("open-settings").addEventListener("click", () => this.open());
    $("api-key").value = store.recall("sessionStorage", "key", "");
    api.setKey($("api-key").value);
    $("api-key").addEventListener("change", () => {
      store.keep("sessionStorage", "key", $("api-key").value);
      api.setKey($("api-key").value);
      keyChanged();
    });
  }

  open(id = "system") {
    if ($("settings").open) return;
    for (const [field, name] of Object.entries(FIELDS)) $(field).value = this.chats.current.settings[name] ?? "";
    for (const field of Object.keys(FIELDS)) this._fine(field);
    $("settings").showModal();
    for (const box of $("settings").querySelectorAll("textarea")) fit(box);
    $(id).focus();
  }

  _fine(id) {
    if (id !== "tools") {
      const wrong = [...$("settings").querySelectorAll("input:invalid")].map((box) => `${box.labels[0].textContent}: ${box.validationMessage}`);
      $("numbers-fault").textContent = wrong.length ? `Not taken over – ${wrong.join(" ")}` : "";
      return $(id).validity.valid;
    }
    const fault = toolsFault($("tools").value.trim());
    $("tools-fault").textContent = fault;
    return !fault;
  }
}

function toolsFault(text) {
  if (!text) return "";
  try { return Array.isArray(JSON.parse(text)) ? "" : "A list is needed: [ … ]"; }
  catch (error) { return error.message; }
}
