// The dialog in which a person tries an image that is not of the data: probabilities, neighbors, and the map of evidence.

import * as api from "./api.js";
import { Camera } from "./camera.js";
import { barRow, button, byId, dialog, element, input, picture, select } from "./dom.js";

/** @param {number} fraction */
const exact = (fraction) => `${(100 * fraction).toFixed(1)}%`;

export class Trial {
  /** @param {import("./store.js").Store} store */
  constructor(store) {
    this.store = store;
    /** @type {Blob | undefined} The image that was asked about last. */
    this.image = undefined;
    this.name = this.url = "";
    this.asked = 0; // number of the last question: an older answer that comes late is not shown
    this.camera = new Camera({
      taken: (photo) => this.ask(photo, "the photo"),
      failed: (why) => (byId("trial-text").textContent = why),
    });
    button("trial-open").addEventListener("click", () => this.show());
    button("trial-close").addEventListener("click", () => dialog("trial").close());
    dialog("trial").addEventListener("close", () => this.camera.close());
    input("trial-file").addEventListener("click", () => (input("trial-file").value = "")); // the same file can come again
    input("trial-file").addEventListener("change", () => this.choose(input("trial-file").files));
    select("trial-by").addEventListener("change", () => this.image && this.ask(this.image, this.name));
    byId("trial-form").addEventListener("submit", (event) => event.preventDefault());
    dialog("trial").addEventListener("dragover", (event) => event.preventDefault());
    dialog("trial").addEventListener("drop", (event) => {
      event.preventDefault();
      this.choose(event.dataTransfer?.files);
    });
  }

  async show() {
    dialog("trial").showModal();
    if (!this.image) byId("trial-text").textContent = "Choose an image that is not in your data, or drop it here.";
    try {
      byId("trial-by-choice").hidden = !(await api.training()).finished;
    } catch {
      byId("trial-by-choice").hidden = true; // the suggestions answer all the same
    }
  }

  /** @param {FileList | null | undefined} files */
  choose(files) {
    const file = files?.[0];
    if (file) this.ask(file, file.name);
  }

  /**
   * @param {Blob} image
   * @param {string} name
   */
  async ask(image, name) {
    const number = ++this.asked;
    this.image = image;
    this.name = name;
    byId("trial-text").textContent = `Looking at ${name} …`;
    try {
      const found = await api.answer(image, byId("trial-by-choice").hidden ? "suggestions" : select("trial-by").value);
      if (number === this.asked) await this.draw(found, image, name);
    } catch (error) {
      if (number !== this.asked) return;
      byId("trial-answer").hidden = true;
      byId("trial-text").textContent = api.wordsOf(error);
    }
  }

  /**
   * @param {import("./api.js").Answer} found
   * @param {Blob} image
   * @param {string} name
   */
  async draw(found, image, name) {
    const [best] = found.top, map = found.explanation;
    const answer = found.unknown ? `none of the classes; the nearest is ${best.class}` : `${best.class}, ${exact(best.probability)}`;
    byId("trial-text").textContent = `${name}: ${answer}`;
    byId("trial-classes").replaceChildren(...found.top.map((one) => barRow(one.class, one.probability, exact(one.probability))));
    if (this.url) URL.revokeObjectURL(this.url);
    this.url = URL.createObjectURL(image);
    picture("trial-image").src = map ? map.image : this.url;
    picture("trial-image").alt = name;
    byId("trial-seen").textContent = map ? "As the network sees it" : name;
    byId("trial-map").hidden = !map;
    if (map) {
      picture("trial-overlay").src = map.overlay;
      picture("trial-overlay").alt = `Map of the evidence for ${map.label}`;
      byId("trial-evidence").textContent = `Evidence for ${map.label}: red for it, blue against it`;
    }
    byId("trial-answer").hidden = false;
    byId("trial-neighbors").replaceChildren(...found.neighbors.map((number) => this.neighbor(number)));
  }

  /** @param {number} number */
  neighbor(number) {
    const small = element("img");
    small.alt = this.store.words(number);
    small.addEventListener("load", () => URL.revokeObjectURL(small.src), { once: true });
    api.image(number, "small").then((blob) => (small.src = URL.createObjectURL(blob)), () => small.classList.add("broken"));
    return element("figure", "", small, element("figcaption", this.store.labelOf(number)));
  }
}
