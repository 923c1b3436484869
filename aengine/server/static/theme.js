/* Light or dark.
   Owns: the choice, kept in the browser; without one the system's preference holds.
   Invariants: a classic script in the head, so that the first paint has the right colours. */
"use strict";
(() => {
const KEY = "aengine.theme";
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
try { root.dataset.theme = localStorage.getItem(KEY) ?? ""; } catch { /* no storage: the system's preference */ }

addEventListener("DOMContentLoaded", () => {
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    try { localStorage.setItem(KEY, root.dataset.theme); } catch { /* holds for this visit */ }
  });
});
})();
