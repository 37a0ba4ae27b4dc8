// The state of the page as plain data: classes and their images. A state is never modified; actions return a new one.
//
// A state has the names of the classes, and the images. The label of an image is the number of a class. Near-duplicates have
// the same group. A thumbnail is the bytes of a JPEG, or null; a look is what near.js compares, or null.

import { near } from "./near.js";

/** @typedef {{ name: string, label: number, features: Float32Array, thumbnail: Uint8Array | null, look: Uint8Array | null }} Shown */
/** @typedef {Shown & { id: number, group: number }} Taught */
/** @typedef {{ classes: string[], images: Taught[] }} State */
/** @typedef {{ name: string, vitral: string, weights: string, width: number, preprocessing: any, classes: string[], check: number[] }} Model */

export const LONGEST_NAME = 255;
export const MOST_CLASSES = 1000;
export const MOST_IMAGES = 10_000;
const MOST_UNDONE = 50;
const UNSHOWN = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\p{Cs}]/u; // as vitral.wording.shown

/** @type {State} */
export const EMPTY = { classes: [], images: [] };

/** The name as it is kept; throws an Error with the reason if it cannot be the name of a class.
 * @param {string} text @param {string[]} others */
export function className(text, others) {
  const name = text.normalize("NFC").trim();
  if (!name) throw new Error("Give the class a name.");
  if (name.length > LONGEST_NAME) throw new Error(`A name has at most ${LONGEST_NAME} characters.`);
  if (UNSHOWN.test(name)) throw new Error("A name has only characters that can be seen.");
  if (others.includes(name)) throw new Error(`There is a class ${name} already.`);
  return name;
}

/** @param {State} state @param {string} text @returns {State} */
export function withClass(state, text) {
  if (state.classes.length >= MOST_CLASSES) throw new Error(`A page has at most ${MOST_CLASSES} classes.`);
  return { ...state, classes: [...state.classes, className(text, state.classes)] };
}

/** @param {State} state @param {number} label @param {string} text @returns {State} */
export function renamed(state, label, text) {
  const others = state.classes.filter((_, i) => i !== label);
  const name = className(text, others);
  return { ...state, classes: state.classes.map((one, i) => (i === label ? name : one)) };
}

/** @param {State} state @param {number} label @returns {State} */
export function withoutClass(state, label) {
  const images = state.images.filter((one) => one.label !== label);
  return {
    classes: state.classes.filter((_, i) => i !== label),
    images: images.map((one) => (one.label > label ? { ...one, label: one.label - 1 } : one)),
  };
}

/** @param {State} state @param {Shown} image @returns {State} */
export function withImage(state, { name, label, features, thumbnail, look }) {
  const copies = state.images.filter((one) => equal(one.features, features));
  if (copies.some((one) => one.label === label)) return state; // it is there already
  if (state.images.length >= MOST_IMAGES) throw new Error(`A page has at most ${MOST_IMAGES.toLocaleString("en")} images.`);
  const id = 1 + state.images.reduce((most, one) => Math.max(most, one.id), 0);
  const alike = state.images.filter((one) => look && one.look && near(look, one.look));
  const groups = new Set([...copies, ...alike].map((one) => one.group));
  const group = groups.size ? Math.min(...groups) : id;
  const images = groups.size > 1 ? state.images.map((one) => (groups.has(one.group) ? { ...one, group } : one)) : state.images;
  return { ...state, images: [...images, { id, name, label, features, thumbnail, look, group }] };
}

/** @param {State} state @param {number | null} id @param {number} label @returns {State} */
export function moved(state, id, label) {
  return { ...state, images: state.images.map((one) => (one.id === id ? { ...one, label } : one)) };
}

/** @param {State} state @param {number | null} id @returns {State} */
export function withoutImage(state, id) {
  return { ...state, images: state.images.filter((one) => one.id !== id) };
}

/** @param {Float32Array} a @param {Float32Array} b */
function equal(a, b) {
  if (a.length !== b.length) return false;
  for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return false;
  return true;
}

/** The current state, with the ones before it to go back to. `listener` is called after each change. */
export class Store {
  /** @param {(state: State) => void} listener */
  constructor(listener) {
    this.listener = listener;
    this.state = EMPTY;
    /** @type {State[]} */
    this.past = [];
  }

  /** Replace the state; `undoable` keeps the one before.
   * @param {State} state */
  set(state, undoable = true) {
    if (state === this.state) return;
    this.past = undoable ? [...this.past, this.state].slice(-MOST_UNDONE) : [];
    this.state = state;
    this.listener(state);
  }

  undo() {
    const before = this.past.at(-1);
    if (!before) return;
    this.state = before;
    this.past = this.past.slice(0, -1);
    this.listener(this.state);
  }
}
