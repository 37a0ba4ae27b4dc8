// The project is kept in this browser after each change, so that a closed tab loses nothing.

const KEY = location.pathname;

/** The bytes that were kept last; null if there are none, or if this browser keeps nothing. */
export async function recalled() {
  try {
    return (await request("readonly", (store) => store.get(KEY))) ?? null;
  } catch {
    return null;
  }
}

/** Keep these bytes; false if this browser keeps nothing.
 * @param {Uint8Array} bytes */
export async function keep(bytes) {
  try {
    await request("readwrite", (store) => store.put(bytes, KEY));
    return true;
  } catch {
    return false;
  }
}

/** Forget what was kept. */
export function forget() {
  return request("readwrite", (store) => store.delete(KEY)).catch(() => {});
}

/** @param {IDBTransactionMode} mode @param {(store: IDBObjectStore) => IDBRequest} ask */
async function request(mode, ask) {
  const database = await settled(opening());
  try {
    return await settled(ask(database.transaction("projects", mode).objectStore("projects")));
  } finally {
    database.close();
  }
}

function opening() {
  const found = indexedDB.open("vitral-teach", 1);
  found.onupgradeneeded = () => found.result.createObjectStore("projects");
  return found;
}

/** @param {IDBRequest} asked @returns {Promise<any>} */
function settled(asked) {
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}
