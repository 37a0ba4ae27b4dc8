// "Try it": the probabilities of an image, by the head that was fitted last.

import { at, droppable, element, percent } from "./elements.js";
import { logitsOf, logSum } from "./probe.js";

/** Probabilities of features by a head.
 * @param {Float32Array} features @param {import("./project.js").Head} head */
export function probabilitiesOf(features, { weight, bias, temperature }) {
  const rows = { data: Float64Array.from(features), count: 1, width: features.length };
  const logits = logitsOf(rows, { weight, bias }).map((one) => one / temperature);
  const total = logSum(logits, 0, logits.length);
  return Array.from(logits, (one) => Math.exp(one - total));
}

export class Answer {
  /** @param {import("./main.js").Page} page */
  constructor(page) {
    this.page = page;
    /** Features of the image that is shown.
     * @type {Float32Array | null} */
    this.features = null;
    this.address = "";
    at("try-file").addEventListener("change", (/** @type {any} */ event) => {
      this.takeFile(event.target.files[0]);
      event.target.value = ""; // so that the same file can be chosen again
    });
    droppable(at("try-drop"), ([file]) => this.takeFile(file));
  }

  /** @param {File | undefined} file */
  async takeFile(file) {
    if (!file) return;
    const features = await this.page.look(file);
    if (!features) return;
    if (this.address) URL.revokeObjectURL(this.address);
    this.address = URL.createObjectURL(file);
    at("try-image").src = this.address;
    at("try-image").alt = file.name;
    at("try-image").hidden = false;
    this.features = features;
    this.draw();
  }

  /** Answer an image of the camera; false if that is not possible.
   * @param {ImageBitmap} bitmap */
  async takeView(bitmap) {
    at("try-image").hidden = true;
    this.features = await this.page.look(bitmap);
    this.draw();
    return Boolean(this.features);
  }

  draw() {
    const { head, state } = this.page;
    at("try-tools").hidden = !head;
    at("try-note").hidden = Boolean(head);
    if (!head || !this.features || head.bias.length !== state.classes.length) {
      at("try-label").textContent = "";
      at("try-shares").replaceChildren();
      return;
    }
    const shares = probabilitiesOf(this.features, head);
    const order = [...shares.keys()].sort((a, b) => shares[b] - shares[a]);
    at("try-label").textContent = `${state.classes[order[0]]} ${percent(shares[order[0]])}`;
    at("try-shares").replaceChildren(...order.slice(0, 8).map((k) => row(state.classes[k], shares[k])));
  }
}

/** @param {string} name @param {number} share */
function row(name, share) {
  const fill = element("i");
  fill.style.setProperty("width", percent(share));
  return element(
    "li", {},
    element("span", { className: "name", textContent: name }),
    element("data", { className: "share", value: String(share), textContent: percent(share) }),
    element("span", { className: "bar", ariaHidden: "true" }, fill),
  );
}
