// The side list: filters with their counts, and classes with color, key and count.

import { byId, element, input } from "./dom.js";
import { FILTERS, color } from "./store.js";

export class Classes {
  /**
   * `label` labels the selected images, `add` adds a class, `edit` asks for another name.
   * @param {import("./store.js").Store} store
   * @param {{ label: (name: string) => unknown, add: (name: string) => unknown, edit: (name: string) => unknown }} calls
   */
  constructor(store, { label, add, edit }) {
    this.store = store;
    this.label = label;
    this.add = add;
    this.edit = edit;
    this.find = input("find");
    this.find.addEventListener("input", () => this.draw());
    this.find.addEventListener("keydown", (event) => event.key === "Escape" && this.leave());
    byId("find-form").addEventListener("submit", (event) => this.submit(event));
    store.addEventListener("change", () => this.draw());
    store.addEventListener("view", () => this.draw());
  }

  /**
   * The class of a digit key, if there is one.
   * @param {number} digit
   * @returns {string | undefined}
   */
  byDigit(digit) {
    return this.store.classes[(digit + 9) % 10];
  }

  /** Write a name: Enter labels with the first class that fits, or adds a new one. */
  focus() {
    this.find.focus();
    this.find.select();
  }

  leave() {
    this.find.value = "";
    this.draw();
    byId("grid").focus();
  }

  matching() {
    const text = this.find.value.trim().toLowerCase();
    return this.store.classes.filter((name) => name.toLowerCase().includes(text));
  }

  /** @param {Event} event */
  async submit(event) {
    event.preventDefault();
    const text = this.find.value.trim();
    const exact = this.store.classes.find((name) => name.toLowerCase() === text.toLowerCase());
    const name = exact || this.matching()[0];
    if (!text) return;
    if (name) await this.label(name);
    else await this.add(text);
    this.leave();
  }

  draw() {
    if (!this.store.names.length) return;
    const { filters, classes } = this.store.counts();
    const focused = document.activeElement?.getAttribute("data-key");
    byId("filters").replaceChildren(
      ...Object.entries(FILTERS)
        .filter(([key]) => key === "all" || key === "unlabeled" || filters[key] || this.store.filter === key)
        .map(([key, [name]]) => this.filter(key, name, filters[key])),
    );
    const matching = new Set(this.matching());
    const rows = this.store.classes.flatMap((name, i) => (matching.has(name) ? [this.row(name, i, classes[i])] : []));
    byId("classes").replaceChildren(...rows);
    byId("classes-note").textContent = this.note(rows.length);
    const again = focused && document.querySelector(`[data-key="${CSS.escape(focused)}"]`);
    if (again instanceof HTMLElement) again.focus();
  }

  /** @param {number} shown classes */
  note(shown) {
    if (!this.store.classes.length) return "Write the name of your first class above, then Enter.";
    if (!shown) return "Enter adds this class.";
    return "";
  }

  /**
   * @param {string} key
   * @param {string} words
   * @param {boolean} [pressed]
   */
  button(key, words, pressed) {
    const button = element("button", words);
    button.type = "button";
    button.dataset.key = key;
    if (pressed !== undefined) button.setAttribute("aria-pressed", String(pressed));
    return button;
  }

  /** @param {number} number */
  count(number) {
    const span = element("span", number.toLocaleString("en"));
    span.className = "count";
    return span;
  }

  /**
   * @param {string} key
   * @param {string} name
   * @param {number} number
   */
  filter(key, name, number) {
    const button = this.button(`filter ${key}`, name, this.store.filter === key);
    button.append(" ", this.count(number));
    button.addEventListener("click", () => this.store.show(key));
    return button;
  }

  /**
   * @param {string} name
   * @param {number} place
   * @param {number} number
   */
  row(name, place, number) {
    const row = element("li");
    row.dataset.label = name;
    row.style.setProperty("--color", color(place));
    const key = element("kbd", place < 10 ? String((place + 1) % 10) : "");
    key.setAttribute("aria-hidden", "true");
    const assign = this.button(`label ${name}`, name);
    assign.className = "name";
    assign.title = `Label the selected images ${name}`;
    assign.addEventListener("click", () => this.label(name));
    const show = this.button(`class:${name}`, "", this.store.filter === `class:${name}`);
    show.append(this.count(number));
    show.setAttribute("aria-label", `Show ${name}, ${number}`);
    show.title = `Show the images of ${name}`;
    show.className = "show";
    show.addEventListener("click", () => this.store.show(this.store.filter === `class:${name}` ? "all" : `class:${name}`));
    const edit = this.button(`edit ${name}`, "…");
    edit.setAttribute("aria-label", `Rename or remove ${name}`);
    edit.className = "edit";
    edit.addEventListener("click", () => this.edit(name));
    row.append(key, assign, show, edit);
    return row;
  }
}
