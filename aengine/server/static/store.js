/* Where conversations and settings are kept: this browser.
   Owns: the database, one record a conversation; telling the other tabs what was written; small settings.
   Does not know: what a conversation is beyond its id. It tells with events: "elsewhere" (detail: {id, removed}, written
   by another tab) and "unkept" (detail: why nothing could be written, "" once it could).
   Invariants: a record is read and written in one transaction, so that what two tabs write at once is never lost; a
   browser without storage (a private window, a full disk) costs the memory of conversations, not the page. */

export const events = new EventTarget();
const tell = (type, detail) => events.dispatchEvent(new CustomEvent(type, { detail }));

const opened = new Promise((resolve) => {
  try {
    const asked = indexedDB.open("aengine", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore("conversations", { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => resolve(null);
  } catch { resolve(null); }
});

let others = null;
try {
  others = new BroadcastChannel("aengine");
  others.onmessage = ({ data }) => tell("elsewhere", data);
} catch { /* the other tabs see it when they are loaded again */ }

/** `work(store, attempt)`; a function given to `attempt` may throw later: then nothing is written. */
async function run(mode, work) {
  const database = await opened;
  if (!database) throw new Error("it has no storage, as in a private window");
  return new Promise((resolve, reject) => {
    const transaction = database.transaction("conversations", mode);
    const attempt = (step) => { try { return step(); } catch (error) { reject(error); transaction.abort(); return undefined; } };
    const asked = attempt(() => work(transaction.objectStore("conversations"), attempt));
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

async function write(id, removed, work) {
  try { await run("readwrite", work); } catch (error) { tell("unkept", error?.message || "its storage is full"); return; }
  tell("unkept", "");
  others?.postMessage({ id, removed });
}

export const all = () => run("readonly", (store) => store.getAll()).catch(() => []);

export const get = (id) => run("readonly", (store) => store.get(id)).catch(() => undefined);

/** Keeps what `change` makes of the record, which is undefined where there is none. */
export const update = (id, change) => write(id, false, (store, attempt) => {
  const asked = store.get(id);
  asked.onsuccess = () => attempt(() => store.put(change(asked.result)));
  return asked;
});

export const remove = (id) => write(id, true, (store) => store.delete(id));

/** A value in localStorage or sessionStorage; both calls work where there is none. */
export function recall(area, key, fallback) {
  try { return JSON.parse(window[area].getItem(`aengine.${key}`)) ?? fallback; } catch { return fallback; }
}

export function keep(area, key, value) {
  try { window[area].setItem(`aengine.${key}`, JSON.stringify(value)); } catch { /* holds for this visit */ }
}
