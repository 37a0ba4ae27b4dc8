// One image, as large as the window.

import { image, neighbors } from "./api.js";

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
    this.compare(number);
    this.asked?.abort();
    this.asked = new AbortController();
    try {
      this.put(URL.createObjectURL(await image(number, "large", this.asked.signal)), "");
    } catch (error) {
      if (this.number === number && error.name !== "AbortError") this.put("", error.message);
    }
    return undefined;
  }

  /** Show the nearest images of both classes beside one whose label is likely wrong. */
  async compare(number) {
    const place = byId("neighbors"), instead = this.store.insteadOf(number);
    place.hidden = true;
    if (!instead) return;
    try {
      const { own, other } = await neighbors(number);
      const rows = [[this.store.labelOf(number), own], [instead, other]].map(([name, numbers]) => this.row(name, numbers));
      if (this.number !== number) return;
      place.replaceChildren(...(await Promise.all(rows)));
      place.hidden = false;
    } catch {
      place.hidden = true; // the image is shown all the same
    }
  }

  async row(name, numbers) {
    const row = document.createElement("figure");
    for (const number of numbers) {
      const picture = row.appendChild(document.createElement("img"));
      picture.alt = this.store.words(number);
      picture.addEventListener("load", () => URL.revokeObjectURL(picture.src), { once: true });
      picture.src = URL.createObjectURL(await image(number, "small"));
    }
    row.appendChild(document.createElement("figcaption")).textContent = `Nearest ${name}`;
    return row;
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
