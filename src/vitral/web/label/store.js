// The state as the server has it, and the images that are shown of it.

import * as api from "./api.js";
import { Insight } from "./insight.js";

export const CHECKED = ["no", "yes", "accepted", "unsure", "excluded"];

/**
 * Filters beside those of the classes: key → [name, test of an image].
 * @type {Record<string, [string, (store: Store, i: number) => boolean]>}
 */
export const FILTERS = {
  all: ["All images", () => true],
  unlabeled: ["Unlabeled", (store, i) => store.isOpen(i)],
  suggested: ["Suggested", (store, i) => store.isOpen(i) && store.insight.suggested[i] >= 0],
  sure: ["Above 95%", (store, i) => store.isSure(i)],
  unlike: ["Unlike all classes", (store, i) => store.isOpen(i) && store.insight.unlike.has(i)],
  wrong: ["Likely wrong", (store, i) => store.insight.doubt[i] > 50 && store.checked[i] !== 1 && store.checked[i] < 3],
  held: ["Held out", (store, i) => store.isOpen(i) && store.insight.held.has(i)],
  unchecked: ["Not checked", (store, i) => store.labels[i] >= 0 && store.checked[i] === 0],
  changed: ["Changed", (store, i) => store.labels[i] >= 0 && store.given[i] >= 0 && store.labelOf(i) !== store.givenOf(i)],
  unsure: ["Unsure", (store, i) => store.checked[i] === 3],
  excluded: ["Excluded", (store, i) => store.checked[i] === 4],
};

/** Emits `change` with `detail.numbers` after marks changed, and `view` after other images are shown. */
export class Store extends EventTarget {
  constructor() {
    super();
    this.filter = "all"; // a key of FILTERS, "class:NAME", or "confused:LABEL:PREDICTED" by their places
    this.order = "given"; // a key of ORDERS
    this.insight = new Insight();
    this.version = -1;
    /** @type {number[]} */
    this.shown = [];
    /** @type {string[]} Of the images; empty before `load`. */
    this.names = [];
    /** @type {string[]} */
    this.classes = [];
    /** @type {string[]} */
    this.notes = [];
    /** @type {number[]} The class that each image came with, as a place in `givenNames`; -1 for none. */
    this.given = [];
    /** @type {string[]} */
    this.givenNames = [];
    /** @type {Set<number>} */
    this.missing = new Set();
    this.labels = new Int16Array();
    this.checked = new Uint8Array();
    this.title = this.undo = this.redo = this.table = "";
  }

  /** @param {import("./api.js").Whole} whole */
  load(whole) {
    const { names, given, given_names: givenNames, title, missing } = whole;
    this.names = names;
    this.given = given;
    this.givenNames = givenNames;
    this.title = title;
    this.missing = new Set(missing);
    this.labels = new Int16Array(names.length).fill(-1);
    this.checked = new Uint8Array(names.length);
    this.take(whole);
    this.refresh();
  }

  /**
   * Take what changed, unless something newer is here already.
   * @param {import("./api.js").Delta} delta
   */
  take(delta) {
    if (delta.version < this.version) return;
    const { version, classes, undo, redo, table, notes } = delta;
    if (classes.join("\n") !== this.classes.join("\n")) this.insight.forget(); // it names classes by their places
    Object.assign(this, { version, classes, undo, redo, table, notes });
    if (delta.insight) this.insight = new Insight(delta.insight);
    delta.numbers.forEach((number, i) => {
      this.labels[number] = delta.labels[i];
      this.checked[number] = delta.checked[i];
    });
    if (this.filter.startsWith("class:") && !classes.includes(this.filter.slice(6))) this.filter = "all";
    this.dispatchEvent(new CustomEvent("change", { detail: delta }));
  }

  /** @param {import("./api.js").Action} action */
  async act(action) {
    this.take(await api.act(action, this.version));
  }

  /**
   * True for an image that waits for a label.
   * @param {number} i
   */
  isOpen(i) {
    return this.labels[i] < 0 && this.checked[i] < 3;
  }

  /**
   * True for an image whose suggestion can be accepted with all others above 95%.
   * @param {number} i
   */
  isSure(i) {
    return this.isOpen(i) && this.insight.percent[i] >= 95 && this.insight.suggested[i] >= 0 && !this.insight.unlike.has(i);
  }

  /**
   * The class that is suggested for an image without a label; "" for none.
   * @param {number} i
   */
  suggestionFor(i) {
    return this.isOpen(i) ? this.classes[this.insight.suggested[i]] ?? "" : "";
  }

  /**
   * The class that other images suggest instead of a label that is likely wrong; "" for none.
   * @param {number} i
   */
  insteadOf(i) {
    const wrong = this.labels[i] >= 0 && this.checked[i] !== 1 && this.insight.doubt[i] > 50 && this.insight.suggested[i] !== this.labels[i];
    return wrong ? this.classes[this.insight.suggested[i]] ?? "" : "";
  }

  /**
   * Images with their near-duplicates that no one has labeled yet.
   * @param {number[]} images
   */
  withCopies(images) {
    return this.insight.withCopies(images, (i) => this.isOpen(i) && !this.missing.has(i));
  }

  /** @param {number} i */
  labelOf(i) {
    return this.labels[i] < 0 ? "" : this.classes[this.labels[i]];
  }

  /** @param {number} i */
  givenOf(i) {
    return this.given[i] < 0 ? "" : this.givenNames[this.given[i]];
  }

  /**
   * Show the images of a filter.
   * @param {string} filter
   */
  show(filter) {
    this.filter = filter;
    this.refresh();
  }

  /** Apply the filter anew: images that no longer fit it disappear. */
  refresh() {
    const test = this.test(this.filter);
    this.shown = [];
    for (let i = 0; i < this.names.length; i++) if (!this.missing.has(i) && test(i)) this.shown.push(i);
    this.shown = this.insight.ordered(this.shown, this.order);
    this.dispatchEvent(new CustomEvent("view"));
  }

  /**
   * The name of a filter for the heading.
   * @param {string} filter
   */
  nameOf(filter) {
    if (filter.startsWith("class:")) return filter.slice(6);
    if (!filter.startsWith("confused:")) return FILTERS[filter][0];
    const [label, predicted] = filter.split(":").slice(1).map((place) => this.classes[Number(place)]);
    return `${label}, predicted as ${predicted}`;
  }

  /**
   * @param {string} filter
   * @returns {(i: number) => boolean}
   */
  test(filter) {
    if (filter.startsWith("confused:")) {
      const [, label, predicted] = filter.split(":").map(Number);
      return (i) => this.labels[i] === label && this.insight.suggested[i] === predicted && this.checked[i] === 1 && !this.insight.held.has(i);
    }
    if (!filter.startsWith("class:")) return (i) => FILTERS[filter][1](this, i);
    const label = this.classes.indexOf(filter.slice(6));
    return (i) => this.labels[i] === label && this.checked[i] < 3;
  }

  /** Number of images of each filter, and of each class. */
  counts() {
    const filters = Object.fromEntries(Object.keys(FILTERS).map((key) => [key, 0]));
    const classes = new Array(this.classes.length).fill(0);
    for (let i = 0; i < this.names.length; i++) {
      if (this.missing.has(i)) continue;
      for (const [key, [, test]] of Object.entries(FILTERS)) if (test(this, i)) filters[key] += 1;
      if (this.labels[i] >= 0 && this.checked[i] < 3) classes[this.labels[i]] += 1;
    }
    return { filters, classes };
  }

  /**
   * An image in words, for people who do not see it.
   * @param {number} i
   */
  words(i) {
    const label = this.labelOf(i);
    const checked = [label && "not checked", "checked", ...CHECKED.slice(2)][this.checked[i]];
    const [suggestion, instead, copies] = [this.suggestionFor(i), this.insteadOf(i), this.insight.copies(i).length];
    const more = [
      suggestion && `perhaps ${suggestion}, ${this.insight.percent[i]}%`,
      instead && `perhaps ${instead} instead`,
      copies > 1 && `${copies} near-duplicates`,
    ];
    return [this.names[i], label || "no label", checked, ...more].filter(Boolean).join(", ");
  }
}

/**
 * The color of a class by its place: neighbors differ most.
 * @param {number} place
 */
export function color(place) {
  return `oklch(var(--class-lightness) var(--class-chroma) ${(30 + place * 137.5) % 360})`;
}
