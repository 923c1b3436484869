/* Puts the page together: each part is told of the others only what it has to call. */

import { $ } from "./dom.js";
import { Chats } from "./chats.js";
import { Composer } from "./composer.js";
import { ServerState } from "./server.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
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
chats.addEventListener("end", ({ detail: { error } }) => { if (error?.status === 0 || error?.status === 503) server.look(); });

addEventListener("keydown", (event) => {
  if (event.defaultPrevented) return;
  if (event.key === "Escape" && chats.run && !$("settings").open) { event.preventDefault(); chats.stop(); composer.focus(); }
  if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "o") { event.preventDefault(); $("settings").close(); sidebar.begin(); }
});

await chats.load();
thread.toEnd();
composer.focus();
server.watch();
