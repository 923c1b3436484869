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

/** Lets `parent` show `children` and nothing else. Only what differs is moved: what stays keeps its focus and place. */
export function place(parent, children) {
  const focused = document.activeElement;
  children.forEach((child, i) => { if (parent.children[i] !== child) parent.insertBefore(child, parent.children[i] ?? null); });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus();
}

const nameOf = (button) => button.getAttribute("aria-label") ?? button.textContent;

/** Lets `parent` show `children`, made anew: a button with the focus hands it to its like. */
export function refill(parent, ...children) {
  const name = parent.contains(document.activeElement) ? nameOf(document.activeElement) : null;
  parent.replaceChildren(...children);
  if (name !== null) [...parent.querySelectorAll("button")].find((button) => nameOf(button) === name)?.focus();
}

/** Copies `text`, and says so on the button for a while. */
export async function copy(button, text) {
  const words = button.querySelector("svg") ? null : (button.dataset.words ??= button.textContent);
  let said = "Copied";
  try { await navigator.clipboard.writeText(text); }
  catch { said = copyOldWay(text) ? said : "Not allowed"; }
  announce(said);
  if (words === null) { button.title = said; button.classList.add("done"); }
  else button.textContent = said;
  clearTimeout(button.copied);
  button.copied = setTimeout(() => {
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

/** Enter that is meant: not one that ends the writing of a syllable with an input method (229: so Safari says it), and
    not on a phone's keyboard, where it is the only way to break a line. */
export const isEnter = (event) => event.key === "Enter" && !event.shiftKey && !composing(event) && !coarse();

export const composing = (event) => event.isComposing || event.keyCode === 229;

/** A text field as high as its text. */
export function fit(box) {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + box.offsetHeight - box.clientHeight}px`;
}

export const coarse = () => matchMedia("(pointer: coarse)").matches;
