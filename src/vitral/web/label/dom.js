// Elements of the page by their ids, each of its kind, and new ones.

/**
 * @template {Element} T
 * @param {string} id
 * @param {new () => T} kind
 * @returns {T}
 */
function found(id, kind) {
  const one = document.getElementById(id);
  if (one instanceof kind) return one;
  throw new Error(`the page has no ${kind.name} with the id ${id}`);
}

/** @param {string} id */
export const byId = (id) => found(id, HTMLElement);
/** @param {string} id */
export const button = (id) => found(id, HTMLButtonElement);
/** @param {string} id */
export const dialog = (id) => found(id, HTMLDialogElement);
/** @param {string} id */
export const input = (id) => found(id, HTMLInputElement);
/** @param {string} id */
export const picture = (id) => found(id, HTMLImageElement);
/** @param {string} id */
export const progress = (id) => found(id, HTMLProgressElement);
/** @param {string} id */
export const select = (id) => found(id, HTMLSelectElement);
/** @param {string} id */
export const svg = (id) => found(id, SVGSVGElement);
/** @param {string} id */
export const video = (id) => found(id, HTMLVideoElement);

/**
 * A new element with text and children.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} name
 * @param {string} text
 * @param {...Node} children
 */
export function element(name, text = "", ...children) {
  const made = document.createElement(name);
  made.textContent = text;
  made.append(...children);
  return made;
}

/**
 * A row of a list: words, a bar as long as a fraction, and words.
 * @param {string} before
 * @param {number} fraction
 * @param {string} after
 */
export function barRow(before, fraction, after) {
  const bar = element("span");
  bar.className = "bar";
  bar.style.setProperty("width", `${100 * fraction}%`);
  return element("li", "", element("span", before), element("span", "", bar), element("span", after));
}
