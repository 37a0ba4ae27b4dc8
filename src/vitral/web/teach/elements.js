// Small helpers for the elements of the page.

/** The element of the page with an id.
 * @type {(id: string) => any} */
export const at = (id) => document.getElementById(id);
/** @param {number} share */
export const percent = (share) => `${Math.round(100 * share)}%`;
/** @param {number} count @param {string} noun */
export const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** Make an element with properties and children.
 * @param {string} name @param {Record<string, any>} values @param {(Node | string)[]} children @returns {any} */
export function element(name, values = {}, ...children) {
  const made = Object.assign(document.createElement(name), values);
  made.append(...children);
  return made;
}

/** Show what went wrong; an empty error hides it.
 * @param {any} error */
export function showProblem(error) {
  const { title, detail, try: hint } = error?.problem ?? { title: error?.title ?? "The page failed", detail: error?.message };
  const lines = error ? [element("p", {}, element("b", { textContent: title }))] : [];
  for (const text of [detail, hint && `Try: ${hint}.`]) if (error && text) lines.push(element("p", { textContent: text }));
  at("problem").replaceChildren(...lines);
  at("problem").hidden = !error;
}

/** An error for a person, with a title and a hint.
 * @param {string} title @param {string} detail @param {string} hint */
export function problem(title, detail, hint = "") {
  return Object.assign(new Error(detail), { problem: { title, detail, try: hint } });
}

/** Let files be dropped on an element.
 * @param {HTMLElement} target @param {(files: File[]) => void} take */
export function droppable(target, take) {
  let inside = 0;
  const over = (/** @type {number} */ change) => {
    inside = Math.max(0, inside + change);
    target.classList.toggle("over", inside > 0);
  };
  target.addEventListener("dragenter", () => over(1));
  target.addEventListener("dragleave", () => over(-1));
  target.addEventListener("dragover", (event) => event.preventDefault());
  target.addEventListener("drop", (event) => {
    event.preventDefault();
    over(-inside);
    take([...(event.dataTransfer?.files ?? [])]);
  });
}

/** Bytes of a thumbnail → address of its image.
 * @type {WeakMap<Uint8Array, string>} */
const addresses = new WeakMap();

/** The address of a thumbnail, made once.
 * @param {Uint8Array} thumbnail */
export function addressOf(thumbnail) {
  const address = addresses.get(thumbnail) ?? URL.createObjectURL(new Blob([/** @type {any} */ (thumbnail)], { type: "image/jpeg" }));
  addresses.set(thumbnail, address);
  return address;
}
