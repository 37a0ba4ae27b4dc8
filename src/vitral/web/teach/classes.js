// The cards of the classes, and the dialog of an image.

import { addressOf, at, counted, droppable, element } from "./elements.js";
import { moved, renamed, withClass, withoutClass, withoutImage } from "./store.js";

const SHOWN = 60; // images of a class that are shown, the newest first

/** @typedef {import("./store.js").State} State */
/** @typedef {import("./store.js").Taught} Taught */

export class Classes {
  /** @param {import("./main.js").Page} page */
  constructor(page) {
    this.page = page;
    /** Id of the image in the dialog.
     * @type {number | null} */
    this.shown = null;
    at("new-class").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      if (page.act((state) => withClass(state, at("new-name").value))) at("new-name").value = "";
      at("new-name").focus();
    });
    at("image-close").addEventListener("click", () => at("image-dialog").close());
    at("image-remove").addEventListener("click", () => this.change((state) => withoutImage(state, this.shown)));
    at("image-label").addEventListener("change", (/** @type {any} */ event) => this.change((state) => moved(state, this.shown, Number(event.target.value))));
  }

  /** @param {(state: State) => State} action */
  change(action) {
    at("image-dialog").close();
    this.page.act(action);
  }

  /** @param {State} state */
  draw(state) {
    const focused = /** @type {HTMLElement | null} */ (document.activeElement)?.dataset.key;
    at("cards").replaceChildren(...state.classes.map((name, label) => this.card(state, name, label)));
    if (focused) at("cards").querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  /** @param {State} state @param {string} name @param {number} label */
  card(state, name, label) {
    const images = state.images.filter((one) => one.label === label);
    const field = element("input", { type: "text", value: name, maxLength: 255, autocomplete: "off" });
    field.setAttribute("aria-label", `Name of class ${label + 1}`);
    field.dataset.key = `name ${label}`;
    field.addEventListener("change", () => {
      if (field.value.trim() !== name && !this.page.act((now) => renamed(now, label, field.value))) field.value = name;
    });
    const card = element(
      "li", { className: "card" },
      element("div", { className: "row" }, field, element("span", { className: "count", textContent: counted(images.length, "image") })),
      this.tools(name, label),
      element("ul", { className: "images" }, ...images.toReversed().slice(0, SHOWN).map((one) => this.image(one, name))),
    );
    if (images.length > SHOWN) card.append(element("p", { className: "note", textContent: `The newest ${SHOWN} of ${images.length.toLocaleString("en")} images.` }));
    droppable(card, (files) => this.page.addFiles(name, files));
    return card;
  }

  /** @param {string} name @param {number} label */
  tools(name, label) {
    const file = element("input", { type: "file", accept: "image/*", multiple: true, id: `files-${label}` });
    file.dataset.key = `files ${label}`;
    file.addEventListener("change", () => {
      this.page.addFiles(name, [...file.files]);
      file.value = ""; // so that the same file can be chosen again
    });
    const title = element("label", { htmlFor: file.id }, "Add images", element("span", { className: "spoken", textContent: ` to ${name}` }));
    const camera = button("Camera", ` for ${name}`, `camera ${label}`, () => this.page.openCamera(name));
    camera.hidden = !navigator.mediaDevices?.getUserMedia; // only in a secure context
    const remove = button("Remove", ` class ${name}`, `remove ${label}`, () => this.page.act((state) => withoutClass(state, label)));
    return element("div", { className: "row" }, element("div", { className: "file" }, file, title), camera, remove);
  }

  /** @param {Taught} one @param {string} label */
  image(one, label) {
    const picture = one.thumbnail ? element("img", { src: addressOf(one.thumbnail), alt: one.name, loading: "lazy" }) : element("span", { className: "bare", textContent: one.name });
    const open = element("button", { type: "button", title: one.name }, picture);
    open.addEventListener("click", () => this.show(one, label));
    return element("li", {}, open);
  }

  /** @param {Taught} one @param {string} label */
  show(one, label) {
    this.shown = one.id;
    at("image-title").textContent = one.name;
    at("image-large").hidden = !one.thumbnail;
    if (one.thumbnail) at("image-large").src = addressOf(one.thumbnail);
    at("image-large").alt = `an image of ${label}`;
    at("image-label").replaceChildren(...this.page.state.classes.map((name, i) => new Option(name, String(i), false, i === one.label)));
    at("image-dialog").showModal();
  }
}

/** @param {string} text @param {string} spoken @param {string} key @param {() => void} click */
function button(text, spoken, key, click) {
  const made = element("button", { type: "button" }, text, element("span", { className: "spoken", textContent: spoken }));
  made.dataset.key = key;
  made.addEventListener("click", click);
  return made;
}
