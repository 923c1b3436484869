/* Puts the page together: each part is told of the others only what it has to call. */

import { $, composing } from "./dom.js";
import { Chats } from "./chats.js";
import { Composer } from "./composer.js";
import { ServerState } from "./server.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";
import { Thread } from "./thread.js";

const chats = new Chats();
const askKey = () => settings.open("api-key");
const thread = new Thread(chats, askKey);
const composer = new Composer({
  send: (text, images) => { chats.send(text, images); thread.toEnd(); },
  stop: () => chats.stop(),
  editLast: () => thread.editLast(),
});
const sidebar = new Sidebar(chats, { focusPrompt: () => composer.focus() });
const server = new ServerState(chats, {
  learned: (models) => {
    composer.takesImages = models.some(({ input_modalities: takes }) => takes?.includes("image"));
    composer.update();
    for (const run of chats.runs.values()) if (run.waiting?.status === 503) run.tryNow();
  },
  needsKey: askKey,
});
const settings = new Settings(chats, () => server.look());

chats.addEventListener("change", () => {
  composer.running = chats.run !== null;
  composer.update();
});
chats.addEventListener("end", ({ detail: { error } }) => { if ([0, 401, 404, 503].includes(error?.status)) server.look(true); });
store.events.addEventListener("unkept", ({ detail: why }) => {
  $("unkept").hidden = !why;
  $("unkept").textContent = why && `This browser does not keep your conversations: ${why}. Export saves them in a file.`;
});

// The browser's back button leads to the conversation that was open before; an empty one is not come back to.
let back = false;
chats.addEventListener("change", () => {
  const { id } = chats.current;
  if (history.state !== id) history[chats.all.has(history.state) && !back ? "pushState" : "replaceState"](id, "");
});
addEventListener("popstate", ({ state }) => {
  back = true;
  if (chats.all.has(state)) chats.open(state);
  else chats.begin();
  back = false;
});

addEventListener("keydown", (event) => {
  if (event.defaultPrevented || composing(event)) return;
  if (event.key === "Escape" && chats.run && !$("settings").open) { event.preventDefault(); chats.stop(); composer.focus(); }
  if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "o") { event.preventDefault(); $("settings").close(); sidebar.begin(); }
});

// The text of the last seconds would be lost with the page. A hidden page may end without another word.
addEventListener("pagehide", () => chats.leave());
document.addEventListener("visibilitychange", () => { if (document.hidden) chats.keepRunning(); });

await chats.load();
thread.toEnd();
composer.focus();
server.watch();
