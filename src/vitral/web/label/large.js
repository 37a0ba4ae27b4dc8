// One image, as large as the window.

import { image } from "./api.js";

const byId = (id) => document.getElementById(id);

export class Large {
  constructor(store, selection) {
    Object.assign(this, { store, selection });
    this.dialog = byId("large");
    this.picture = byId("large-image");
    byId("large-close").addEventListener("click", () => this.close());
    byId("large-before").addEventListener("click", () => selection.move(-1, false));
    byId("large-after").addEventListener("click", () => selection.move(1, false));
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
    this.asked?.abort();
    this.asked = new AbortController();
    try {
      this.put(URL.createObjectURL(await image(number, "large", this.asked.signal)), "");
    } catch (error) {
      if (this.number === number && error.name !== "AbortError") this.put("", error.message);
    }
    return undefined;
  }

  put(url, problem) {
    if (this.url) URL.revokeObjectURL(this.url);
    this.url = url;
    this.picture.hidden = !url;
    if (url) this.picture.src = url;
    byId("large-problem").hidden = !problem;
    byId("large-problem").textContent = problem;
  }
}
