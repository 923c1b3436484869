/* Markdown while it grows.
   Owns: the parser's and the sanitiser's settings, blocks of code with their bar, what parts a text consists of.
   Invariants: blocks are the elements that `part` names; what is in a line becomes elements only through DOMPurify with
   the short lists below; HTML in an answer is shown as text; images are shown as links, so no address in an answer is
   ever fetched. The time for a text grows with its length alone, whatever is in it. While text is only appended,
   finished blocks are neither parsed nor drawn again, and of an unfinished list, table, quotation or paragraph only the
   items, cells and runs of text that changed are drawn. */

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { copy, el } from "./dom.js";
import { show } from "./parts.js";

const purify = window.DOMPurify;
const ALLOWED = {
  ALLOWED_TAGS: ["a", "br", "code", "del", "em", "strong"],
  ALLOWED_ATTR: ["href"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
const tick = (checked) => (checked ? "☑ " : "☐ ");
const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => tick(checked),
  },
});

// Text still to come can change the kind of the last blocks (a line under a paragraph makes it a heading).
const UNSETTLED = 3;
const RUN = 16; // pieces of a paragraph's text that are drawn together
const DEEPEST = 32; // quotations and lists in one another; what is nested deeper is text
const LONGEST = 4000; // characters of a paragraph that are read together: the time for some grows with their square

class Lexer extends marked.Lexer {
  depth = 0;

  blockTokens(text, tokens = [], ...rest) {
    if (this.depth > DEEPEST) { tokens.push({ type: "text", raw: text, text }); return tokens; }
    this.depth += 1;
    super.blockTokens(text, tokens, ...rest);
    this.depth -= 1;
    return tokens;
  }

  inlineTokens(text, tokens = []) {
    let rest = text;
    while (rest.length > LONGEST) {
      const end = rest.lastIndexOf(" ", LONGEST) + 1 || LONGEST;
      super.inlineTokens(rest.slice(0, end), tokens);
      rest = rest.slice(end);
    }
    return super.inlineTokens(rest, tokens);
  }
}

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
    const tokens = new Lexer(marked.defaults).lex(text.slice(this._settled.length));
    show(this.box, this._kept, tokens.filter(visible).map((token) => part(token.type === "text" ? { ...token, type: "paragraph" } : token)), this._settledBlocks);
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

// ---- a text's parts, see parts.js

function parts(tokens) {
  return tokens.filter(visible).flatMap((token) => (token.type === "text" ? runs(token) : [part(token)]));
}

function part(token) {
  switch (token.type) {
    case "code": return codePart(token);
    case "paragraph": return container("p", runs(token));
    case "heading": return container(`h${token.depth}`, runs(token));
    case "hr": return { kind: "hr", key: "", make: () => [el("hr")] };
    case "blockquote": return container("blockquote", parts(token.tokens), { dir: "auto" });
    case "list": {
      const items = token.items.map(({ tokens }) => container("li", parts(tokens)));
      return token.ordered ? container("ol", items, { dir: "auto", start: token.start || 0 }) : container("ul", items, { dir: "auto" });
    }
    case "table": return tablePart(token);
    case "checkbox": return run(tick(token.checked));
    default: return container("p", runs({ text: token.raw })); // HTML, shown as it is written
  }
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
    made.push(run(marked.Parser.parseInline(all.slice(i, i + RUN), marked.defaults)));
  }
  return made;
}

const run = (html) => ({ kind: "run", key: html, make: () => inline(html) });

function inline(html) {
  if (!/[<&]/.test(html)) return [document.createTextNode(html)];
  return [...purify.sanitize(html, ALLOWED).childNodes];
}

function tablePart({ header, rows, align }) {
  const row = (cells, tag) => container("tr", cells.map((cell, i) => container(tag, runs(cell), align[i] ? { align: align[i] } : {})));
  const make = () => {
    const hole = el("table");
    return { nodes: [el("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" }, hole)], hole };
  };
  return { kind: "table", make, inner: [container("thead", [row(header, "th")]), container("tbody", rows.map((cells) => row(cells, "td")))] };
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

function codeBlock(text, lang) {
  const code = document.createTextNode(text);
  const button = el("button", { type: "button", class: "quiet", onclick: () => copy(button, code.data) }, "Copy");
  const box = el("div", { class: "block" },
    el("div", { class: "bar" }, el("span", {}, lang.split(/\s/)[0] || "code"), button),
    el("pre", { tabIndex: 0 }, el("code", {}, code)));
  return Object.assign(box, { code });
}
