/* Elements.
   Owns: making them. Text becomes text nodes: no function here takes markup. */

export const $ = (id) => document.getElementById(id);

/** An element with properties (`class`, `dataset`, any DOM property, `on…` listeners) and children (nodes, text). */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.includes("-")) node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** One of the drawings in index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("aria-hidden", "true");
  svg.append(document.createElementNS(SVG, "use"));
  svg.firstChild.setAttribute("href", `#i-${name}`);
  return svg;
}

export function iconButton(name, label, onclick) {
  return el("button", { type: "button", class: "icon", title: label, "aria-label": label, onclick }, icon(name));
}

/** Copies what `text()` gives at the time of the click, and says so on the button. */
export async function copy(button, text) {
  const words = button.querySelector("svg") ? null : button.textContent;
  let said = "Copied";
  try { await navigator.clipboard.writeText(text); }
  catch { said = copyOldWay(text) ? said : "Not allowed"; }
  announce(said);
  if (words === null) { button.title = said; button.classList.add("done"); }
  else button.textContent = said;
  setTimeout(() => {
    button.classList.remove("done");
    if (words === null) button.title = button.getAttribute("aria-label");
    else button.textContent = words;
  }, 1500);
}

// The clipboard's own interface is there on HTTPS and localhost only; a server in the local network is neither.
function copyOldWay(text) {
  const box = el("textarea", { value: text, class: "only-readers" });
  const before = document.activeElement;
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  before?.focus();
  return done;
}

/** Says something to screen readers. */
export function announce(text) { $("announce").textContent = text; }

/** A text field as high as its text. */
export function fit(box) {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + box.offsetHeight - box.clientHeight}px`;
}

export const coarse = () => matchMedia("(pointer: coarse)").matches;
