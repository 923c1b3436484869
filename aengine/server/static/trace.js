/* The timeline page.
   Owns: asking for the last seconds, drawing them, the sentence, the table.
   Invariants: one request at a time, none while the page is hidden or held; all that comes from the server is text or a
   number; the sentence counts time in which there was work. */

import { $, el } from "./dom.js";
import * as api from "./api.js";
import * as store from "./store.js";

const LOOK_MS = 1000, HELD_LANE = 92;
const SPAN_KINDS = { step: "step", "idle: host": "host", "idle: copy": "copy", "idle: decide": "decide", "idle: no_work": "no_work", copy: "copy", gc: "gc", "loop lag": "gc" };
const LANE_KINDS = { loop: "loop", output: "output" };

let shown = null; // {lanes: Map tid -> name, spans: [{name, from, to, tid, args}], from, to, told}
let held = false;

function read(trace) {
  const lanes = new Map(), spans = [];
  for (const event of trace.traceEvents) {
    if (event.ph === "M" && event.name === "thread_name") lanes.set(event.tid, event.args.name);
    if (event.ph === "X") spans.push({ name: event.name, from: event.ts, to: event.ts + event.dur, tid: event.tid, args: event.args });
  }
  const told = trace.otherData;
  return { lanes, spans, from: told.from_us, to: told.to_us, told };
}

/** "device busy 99.2 %, bubbles 0.8 % = 0.5 host + 0.3 copy" */
export function sentence(told) {
  const causes = Object.entries(told.idle_s).filter(([cause, seconds]) => cause !== "no_work" && seconds > 0);
  const idle = causes.reduce((sum, [, seconds]) => sum + seconds, 0);
  const whole = told.busy_s + idle;
  if (!whole) return "the device had no work";
  const share = (seconds) => (100 * seconds / whole).toFixed(1);
  const parts = causes.map(([cause, seconds]) => `${share(seconds)} ${cause}`).join(" + ") || "none";
  return `device busy ${share(told.busy_s)} %, bubbles ${share(idle)} % = ${parts}`;
}

function say() {
  $("sentence").textContent = sentence(shown.told);
  const steps = shown.spans.filter(({ name }) => name === "step");
  const bubbles = shown.spans.filter(({ name }) => name.startsWith("idle: ") && name !== "idle: no_work");
  const mean = steps.reduce((sum, { from, to }) => sum + to - from, 0) / Math.max(steps.length, 1) / 1e3;
  const longest = Math.max(0, ...bubbles.map(({ from, to }) => to - from)) / 1e3;
  $("facts").textContent = steps.length ? `${steps.length} steps of ${mean.toFixed(2)} ms on average; ${bubbles.length} bubbles, the longest ${longest.toFixed(2)} ms` : "";
  const sums = new Map();
  for (const { name, from, to, tid } of shown.spans) {
    const key = `${shown.lanes.get(tid)}: ${name}`, sum = sums.get(key) ?? { times: 0, us: 0, most: 0 };
    sums.set(key, { times: sum.times + 1, us: sum.us + to - from, most: Math.max(sum.most, to - from) });
  }
  const whole = shown.to - shown.from;
  $("sums").replaceChildren(...[...sums].sort().map(([key, { times, us, most }]) => el("tr", {},
    el("th", { scope: "row" }, key),
    ...[times, (us / 1e3).toFixed(2), (100 * us / whole).toFixed(2), (most / 1e3).toFixed(2)].map((text) => el("td", {}, String(text))))));
}

const colours = () => Object.fromEntries([...document.querySelectorAll("#legend i")].map((i) => [i.dataset.kind, getComputedStyle(i).backgroundColor]));

function draw() {
  const canvas = $("canvas"), { clientWidth: width, clientHeight: height } = canvas, scale = devicePixelRatio;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = getComputedStyle(document.body).font.replace(/^.*?(\d+px)/, "12px");
  pen.textBaseline = "middle";
  const ink = getComputedStyle(document.body).color, colour = colours();
  const lane = height / Math.max(shown.lanes.size, 1), x = position(width);
  [...shown.lanes].forEach(([tid, name], row) => {
    pen.fillStyle = ink;
    pen.fillText(name, 8, (row + 0.5) * lane);
    for (const span of shown.spans) {
      if (span.tid !== tid) continue;
      const left = Math.max(x(span.from), HELD_LANE), right = x(span.to);
      pen.fillStyle = colour[SPAN_KINDS[span.name] ?? LANE_KINDS[name]] ?? ink;
      if (right > left) pen.fillRect(left, row * lane + 3, Math.max(right - left, 0.6), lane - 6);
    }
  });
}

const position = (width) => (us) => HELD_LANE + (us - shown.from) / (shown.to - shown.from) * (width - HELD_LANE);

function under(event) {
  if (!shown) return;
  const box = $("canvas").getBoundingClientRect(), lanes = [...shown.lanes.keys()];
  const tid = lanes[Math.floor((event.clientY - box.top) / box.height * lanes.length)];
  const at = shown.from + (event.clientX - box.left - HELD_LANE) / (box.width - HELD_LANE) * (shown.to - shown.from);
  const reach = (shown.to - shown.from) / box.width;
  const found = shown.spans.filter((span) => span.tid === tid && span.from - reach <= at && at <= span.to + reach).sort((a, b) => a.to - a.from - (b.to - b.from))[0];
  $("under").textContent = found ? `${found.name}, ${((found.to - found.from) / 1e3).toFixed(3)} ms, ${Object.entries(found.args).map((pair) => pair.join(" ")).join(", ")}` : "";
}

async function look() {
  try {
    shown = read(await api.trace($("window").value));
    $("key-field").hidden = true;
    say();
    draw();
  } catch (error) {
    if (error.status === 401) $("key-field").hidden = false;
    $("sentence").textContent = error.message;
  }
}

async function watch() {
  for (;;) {
    if (!held && !document.hidden) await look();
    await new Promise((resolve) => { setTimeout(resolve, LOOK_MS); });
  }
}

async function save() {
  const blob = new Blob([JSON.stringify(await api.trace(30))], { type: "application/json" });
  const link = el("a", { href: URL.createObjectURL(blob), download: "aengine-trace.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

$("api-key").value = store.recall("sessionStorage", "key", "");
api.setKey($("api-key").value);
$("api-key").addEventListener("change", () => { store.keep("sessionStorage", "key", $("api-key").value); api.setKey($("api-key").value); look(); });
$("hold").addEventListener("click", () => { held = !held; $("hold").setAttribute("aria-pressed", held); $("hold").textContent = held ? "Go on" : "Hold"; });
$("save").addEventListener("click", () => save().catch((error) => { $("sentence").textContent = error.message; }));
$("window").addEventListener("change", look);
$("canvas").addEventListener("pointermove", under);
addEventListener("resize", () => { if (shown) draw(); });
watch();
