// One image, as large as the window.

import { image, neighbors, wordsOf } from "./api.js";
import { button, byId, dialog, element, picture } from "./dom.js";

export class Large {
  /**
   * @param {import("./store.js").Store} store
   * @param {import("./selection.js").Selection} selection
   */
  constructor(store, selection) {
    this.store = store;
    this.selection = selection;
    this.dialog = dialog("large");
    this.picture = picture("large-image");
    /** @type {number | undefined} The image that is shown. */
    this.number = undefined;
    this.url = "";
    button("large-close").addEventListener("click", () => this.close());
    button("large-before").addEventListener("click", () => selection.move(-1, false));
    button("large-after").addEventListener("click", () => selection.move(1, false));
    this.dialog.addEventListener("close", () => byId("grid").focus());
    selection.addEventListener("change", () => this.open && this.draw());
    store.addEventListener("change", () => this.open && this.words());
  }

  get open() {
    return this.dialog.open;
  }

  show() {
    if (this.selection.current === undefined) return;
    this.dialog.showModal();
    this.dialog.focus(); // not its first button: Enter keeps a label
    this.draw();
  }

  close() {
    this.dialog.close();
  }

  words() {
    const number = this.selection.current;
    if (number === undefined) return;
    const text = this.store.words(number);
    byId("large-name").textContent = this.store.names[number];
    byId("large-label").textContent = text.slice(this.store.names[number].length + 2);
    this.picture.alt = text;
  }

  async draw() {
    const number = this.selection.current;
    if (number === undefined) return this.close();
    this.words();
    if (this.number === number) return undefined;
    this.number = number;
    this.compare(number);
    this.asked?.abort();
    this.asked = new AbortController();
    try {
      this.put(URL.createObjectURL(await image(number, "large", this.asked.signal)), "");
    } catch (error) {
      const left = error instanceof DOMException && error.name === "AbortError";
      if (this.number === number && !left) this.put("", wordsOf(error));
    }
    return undefined;
  }

  /**
   * Show the nearest images of both classes beside one whose label is likely wrong.
   * @param {number} number
   */
  async compare(number) {
    const place = byId("neighbors"), instead = this.store.insteadOf(number);
    place.hidden = true;
    if (!instead) return;
    try {
      const { own, other } = await neighbors(number);
      const rows = [this.row(this.store.labelOf(number), own), this.row(instead, other)];
      if (this.number !== number) return;
      place.replaceChildren(...(await Promise.all(rows)));
      place.hidden = false;
    } catch {
      place.hidden = true; // the image is shown all the same
    }
  }

  /**
   * @param {string} name
   * @param {number[]} numbers
   */
  async row(name, numbers) {
    const row = element("figure");
    for (const number of numbers) {
      const small = row.appendChild(element("img"));
      small.alt = this.store.words(number);
      small.addEventListener("load", () => URL.revokeObjectURL(small.src), { once: true });
      small.src = URL.createObjectURL(await image(number, "small"));
    }
    row.append(element("figcaption", `Nearest ${name}`));
    return row;
  }

  /**
   * @param {string} url
   * @param {string} problem
   */
  put(url, problem) {
    if (this.url) URL.revokeObjectURL(this.url);
    this.url = url;
    this.picture.hidden = !url;
    if (url) this.picture.src = url;
    byId("large-problem").hidden = !problem;
    byId("large-problem").textContent = problem;
  }
}
