/* Markdown while it grows.
   Owns: the parser's and the sanitiser's settings, blocks of code with their bar.
   Invariants: nothing from a model becomes an element except through DOMPurify with the short lists below; HTML in an
   answer is shown as text; images are shown as links, so no address in an answer is ever fetched. While text is only
   appended, finished blocks are neither parsed nor drawn again. */

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { copy, el } from "./dom.js";

const purify = window.DOMPurify;
const ALLOWED = {
  ALLOWED_TAGS: "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["href", "align", "start", "class"],
  ADD_URI_SAFE_ATTR: ["align", "start"], // the expression below is for addresses
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
purify.addHook("uponSanitizeAttribute", (node, data) => {
  if (data.attrName === "class" && !(node.nodeName === "CODE" && /^language-\S+$/.test(data.attrValue))) data.keepAttr = false;
});
purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

// Text still to come can change the kind of the last blocks (a line under a paragraph makes it a heading).
const UNSETTLED = 3;

export class Markdown {
  constructor(box) {
    this.box = box;
    this._begin();
  }

  _begin() {
    this._settled = ""; // text whose blocks stay as they are
    this._drawn = []; // per child of the box: what it was made from
    this._settledBlocks = 0;
  }

  /** Shows `source`. `whole`: no more comes, so parse it in one piece (a link's address may stand at the end). */
  draw(source, whole) {
    const text = source.replace(/\r\n?/g, "\n"); // as the parser does, so that lengths agree
    if (whole || !text.startsWith(this._settled)) { this._settled = ""; this._settledBlocks = 0; }
    const tokens = lex(text.slice(this._settled.length));
    const from = this._settledBlocks;
    const visible = tokens.filter(({ type }) => type !== "space" && type !== "def");
    visible.forEach((token, i) => this._show(from + i, token));
    while (this.box.children.length > from + visible.length) this.box.lastChild.remove();
    this._drawn.length = from + visible.length;
    if (!whole) this._settle(tokens);
  }

  _settle(tokens) {
    for (const token of tokens.slice(0, Math.max(0, tokens.length - UNSETTLED))) {
      this._settled += token.raw;
      if (token.type !== "space" && token.type !== "def") this._settledBlocks += 1;
    }
  }

  _show(at, token) {
    const html = rendered(token);
    if (this._drawn[at] === html) return;
    const old = this.box.children[at];
    // A long block of code grows by its new characters alone, which also keeps a selection in it.
    if (token.type === "code" && old?.code && old.lang === (token.lang ?? "") && token.text.startsWith(old.code.data)) {
      old.code.appendData(token.text.slice(old.code.data.length));
    } else {
      const node = block(html, token);
      if (old) old.replaceWith(node);
      else this.box.append(node);
    }
    this._drawn[at] = html;
  }
}

function lex(text) {
  try { return marked.lexer(text); }
  catch { return [{ type: "plain", raw: text, text }]; } // nested beyond the parser's stack
}

function rendered(token) {
  if (token.type === "plain") return escaped(token.text);
  if (token.type === "code") return `${token.lang ?? ""}\n${token.text}`;
  try { return marked.parser([token]); }
  catch { return escaped(token.raw); }
}

function block(html, token) {
  if (token.type === "code") return codeBlock(token.text, token.lang ?? "");
  const fragment = purify.sanitize(html, ALLOWED);
  for (const pre of fragment.querySelectorAll("pre")) {
    const lang = pre.firstElementChild?.className.replace("language-", "") ?? "";
    pre.replaceWith(codeBlock(pre.textContent.replace(/\n$/, ""), lang));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = el("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  }
  const only = fragment.children.length === 1 && fragment.textContent.trim() === fragment.firstElementChild.textContent.trim();
  return only ? fragment.firstElementChild : el("p", {}, fragment);
}

function codeBlock(text, lang) {
  const code = document.createTextNode(text);
  const button = el("button", { type: "button", class: "quiet", onclick: () => copy(button, code.data) }, "Copy");
  const box = el("div", { class: "block" },
    el("div", { class: "bar" }, el("span", {}, lang.split(/\s/)[0] || "code"), button),
    el("pre", { tabIndex: 0 }, el("code", {}, code)));
  return Object.assign(box, { code, lang });
}
