/* Where conversations and settings are kept: this browser.
   Owns: the database, one record a conversation, so that two tabs do not overwrite each other's; small settings.
   Does not know: what a conversation is beyond its id.
   Invariants: a browser without storage (a private window, a full disk) costs the memory of conversations, not the
   page. */

const opened = new Promise((resolve) => {
  try {
    const asked = indexedDB.open("aengine", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore("conversations", { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => resolve(null);
  } catch { resolve(null); }
});

async function run(mode, work) {
  const database = await opened;
  if (!database) return undefined;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction("conversations", mode);
    const asked = work(transaction.objectStore("conversations"));
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

export const all = async () => (await run("readonly", (store) => store.getAll()).catch(() => [])) ?? [];
export const put = (conversation) => run("readwrite", (store) => store.put(conversation)).catch((error) => console.warn("not kept:", error));
export const remove = (id) => run("readwrite", (store) => store.delete(id)).catch((error) => console.warn("not deleted:", error));

/** A value in localStorage or sessionStorage; both calls work where there is none. */
export function recall(area, key, fallback) {
  try { return JSON.parse(window[area].getItem(`aengine.${key}`)) ?? fallback; } catch { return fallback; }
}

export function keep(area, key, value) {
  try { window[area].setItem(`aengine.${key}`, JSON.stringify(value)); } catch { /* holds for this visit */ }
}
