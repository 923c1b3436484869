/* Markdown while it grows.
   Owns: the parser's and the sanitiser's settings, blocks of code with their bar, what parts a text consists of.
   Invariants: nothing from a model becomes an element except through DOMPurify with the short lists below, save the
   empty elements that `part` names; HTML in an answer is shown as text; images are shown as links, so no address in an
   answer is ever fetched. While text is only appended, finished blocks are neither parsed nor drawn again, and of an
   unfinished list, table, quotation or paragraph only the items, rows and runs of text that changed are drawn. */

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { copy, el } from "./dom.js";
import { show } from "./parts.js";

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
const RUN = 16; // pieces of a paragraph's text that are drawn together
const DEPTH = 8; // what is nested deeper is drawn as one part: the browser's own parser bounds how deep elements go

export class Markdown {
  constructor(box) {
    this.box = box;
    this._kept = [];
    this._settled = ""; // text whose blocks stay as they are
    this._settledBlocks = 0;
    this._whole = null; // the text shown, if it was drawn as a whole
  }

  /** Shows `source`. `whole`: no more comes, so parse it in one piece (a link's address may stand at the end). */
  draw(source, whole) {
    if (whole && source === this._whole) return;
    this._whole = whole ? source : null;
    const text = source.replace(/\r\n?/g, "\n"); // as the parser does, so that lengths agree
    if (whole || !text.startsWith(this._settled)) { this._settled = ""; this._settledBlocks = 0; }
    const tokens = lex(text.slice(this._settled.length));
    show(this.box, this._kept, tokens.filter(visible).map(topPart), this._settledBlocks);
    if (!whole) this._settle(tokens);
  }

  _settle(tokens) {
    for (const token of tokens.slice(0, Math.max(0, tokens.length - UNSETTLED))) {
      this._settled += token.raw;
      if (visible(token)) this._settledBlocks += 1;
    }
  }
}

const visible = ({ type }) => type !== "space" && type !== "def";

function lex(text) {
  try { return marked.lexer(text); }
  catch { return [{ type: "plain", raw: text }]; } // nested beyond the parser's stack
}

// ---- a text's parts, see parts.js

function topPart(token) {
  try { return token.type === "text" ? container("p", runs(token)) : part(token, 0); }
  catch { return leaf(escaped(token.raw), 0); } // nested beyond the parser's stack
}

function parts(tokens, depth) {
  return tokens.filter(visible).flatMap((token) => (token.type === "text" ? runs(token) : [part(token, depth)]));
}

function part(token, depth) {
  if (token.type === "code") return codePart(token);
  if (depth < DEPTH) {
    if (token.type === "paragraph") return container("p", runs(token));
    if (token.type === "blockquote") return container("blockquote", parts(token.tokens, depth + 1));
    if (token.type === "list") {
      const items = token.items.map(({ tokens }) => container("li", parts(tokens, depth + 1)));
      return token.ordered ? container("ol", items, { start: token.start || 0 }) : container("ul", items);
    }
    if (token.type === "table") return tablePart(token);
  }
  return leaf(token.type === "plain" ? escaped(token.raw) : marked.parser([token]), depth);
}

/** Drawn as one. At the top it is one element: the last of them has the mark of an answer that goes on. */
function leaf(html, depth) {
  return { kind: "leaf", key: html, make: () => (depth ? [...sanitised(html).childNodes] : [single(sanitised(html))]) };
}

function container(tag, inner, properties = {}) {
  const make = () => {
    const hole = el(tag, properties);
    return { nodes: [hole], hole };
  };
  return { kind: `${tag} ${JSON.stringify(properties)}`, make, inner };
}

/** The text of a paragraph or an item in pieces, so that its end is drawn without its beginning. */
function runs({ tokens, text }) {
  const all = tokens ?? [{ type: "text", raw: text, text }];
  const made = [];
  for (let i = 0; i < all.length; i += RUN) {
    const html = marked.Parser.parseInline(all.slice(i, i + RUN), marked.defaults);
    made.push({ kind: "run", key: html, make: () => [...purify.sanitize(html, ALLOWED).childNodes] });
  }
  return made;
}

function tablePart(token) {
  const head = marked.parser([{ ...token, rows: [] }]);
  const make = () => {
    const table = purify.sanitize(head, ALLOWED).querySelector("table");
    const hole = table.querySelector("tbody") ?? table.appendChild(el("tbody"));
    return { nodes: [scrolled(table)], hole };
  };
  const rows = token.rows.map((row) => {
    const html = marked.parser([{ ...token, header: [], rows: [row] }]);
    return { kind: "row", key: html, make: () => [purify.sanitize(html, ALLOWED).querySelector("tbody > tr")] };
  });
  return { kind: `table ${head}`, make, inner: rows };
}

/** A block of code grows by its new characters alone, which also keeps a selection in it. */
function codePart({ text, lang = "" }) {
  const grow = ([{ code }], old) => {
    if (!text.startsWith(old)) return false;
    code.appendData(text.slice(old.length));
    return true;
  };
  return { kind: `code ${lang}`, key: text, make: () => [codeBlock(text, lang)], grow };
}

function sanitised(html) {
  const fragment = purify.sanitize(html, ALLOWED);
  for (const pre of fragment.querySelectorAll("pre")) {
    const lang = pre.firstElementChild?.className.replace("language-", "") ?? "";
    pre.replaceWith(codeBlock(pre.textContent.replace(/\n$/, ""), lang));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const place = document.createComment("");
    table.replaceWith(place);
    place.replaceWith(scrolled(table));
  }
  return fragment;
}

function single(fragment) {
  const only = fragment.children.length === 1 && fragment.textContent.trim() === fragment.firstElementChild.textContent.trim();
  return only ? fragment.firstElementChild : el("p", {}, fragment);
}

function scrolled(table) {
  return el("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" }, table);
}

function codeBlock(text, lang) {
  const code = document.createTextNode(text);
  const button = el("button", { type: "button", class: "quiet", onclick: () => copy(button, code.data) }, "Copy");
  const box = el("div", { class: "block" },
    el("div", { class: "bar" }, el("span", {}, lang.split(/\s/)[0] || "code"), button),
    el("pre", { tabIndex: 0 }, el("code", {}, code)));
  return Object.assign(box, { code });
}
