// The page on which a visitor teaches classes: images in, a head and its accuracy out, all in this browser.

import { Answer } from "./answer.js";
import { asking } from "./asking.js";
import { Camera, LiveView } from "./camera.js";
import { Classes } from "./classes.js";
import { at, counted, element, problem, showProblem } from "./elements.js";
import { forget, keep, recalled } from "./kept.js";
import { drawMeasure } from "./measure.js";
import { read, written } from "./project.js";
import { EMPTY, Store, withClass, withImage } from "./store.js";

const MOST_BYTES = 256 * 2 ** 20; // of an image file
const KEPT_AFTER = 800; // milliseconds without a change

/** @typedef {import("./store.js").State} State */
/** @typedef {import("./project.js").Head & { confusion: number[][], crossed: import("./figures.js").Accuracy }} Measured */

export class Page {
  /** @param {import("./store.js").Model} model */
  constructor(model) {
    this.model = model;
    /** The last fit.
     * @type {Measured | null} */
    this.head = null;
    this.eyes = asking("eyes.js");
    this.tutor = asking("tutor.js");
    this.store = new Store((state) => this.changed(state));
    this.classes = new Classes(this);
    this.answer = new Answer(this);
    this.camera = new Camera();
    this.live = new LiveView((image) => this.answer.takeView(image));
    this.fitting = false;
    this.stale = false;
    this.timer = 0;
    at("undo").addEventListener("click", () => this.store.undo());
    at("save").addEventListener("click", () => this.save());
    at("restart").addEventListener("click", () => this.restart());
    at("open").addEventListener("change", (/** @type {any} */ event) => this.open(event.target.files[0]).finally(() => (at("open").value = "")));
  }

  get state() {
    return this.store.state;
  }

  /** Begin with the project that this browser keeps, or with the classes of the page. */
  async start() {
    at("about").textContent = "Give each class some images of your own, and see how well a small network tells them apart. Everything happens on this device: no image leaves it.";
    let state = this.model.classes.reduce(withClass, EMPTY);
    const bytes = await recalled();
    try {
      if (bytes) state = read(bytes, this.model);
    } catch (error) {
      say(`The last project could not be opened again: ${reason(error)}.`);
    }
    this.store.set(state, false);
    this.classes.draw(state);
    await this.eyes({ model: this.model }, say).then(() => say(bytes && state.images.length ? "Your last project is open again." : "Ready."), showProblem);
  }

  /** Apply a change to the state; false, with the reason shown, if it is not possible.
   * @param {(state: State) => State} change */
  act(change) {
    try {
      this.store.set(change(this.state));
      showProblem(null);
      return true;
    } catch (error) {
      showProblem(problem("This is not possible", reason(error)));
      return false;
    }
  }

  /** @param {State} state */
  changed(state) {
    at("undo").disabled = !this.store.past.length;
    at("restart").disabled = !state.classes.length;
    at("save").disabled = !state.images.length;
    this.classes.draw(state);
    this.fit();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.keep(), KEPT_AFTER);
  }

  async keep() {
    const kept = await keep(written(this.state, null, this.model));
    if (!kept) say("This browser keeps nothing: save the project before you close the page.");
  }

  /** Fit the head anew; a change during a fit leads to another one. */
  async fit() {
    this.stale = true;
    if (this.fitting) return;
    this.fitting = true;
    document.body.dataset.fitting = "true";
    while (this.stale) {
      this.stale = false;
      const { state } = this;
      const width = this.model.width;
      const features = new Float32Array(state.images.length * width);
      state.images.forEach((one, i) => features.set(one.features, i * width));
      const [labels, groups] = [state.images.map((one) => one.label), state.images.map((one) => one.group)];
      try {
        this.head = await this.tutor({ features, width, labels, groups, classes: state.classes.length });
      } catch (error) {
        this.head = null;
        showProblem(error);
      }
    }
    this.fitting = false;
    document.body.dataset.fitting = "false";
    drawMeasure(this.head, this.state.classes);
    this.answer.draw();
    if (!this.head && this.live.close) this.live.end();
  }

  /** The features of a file or an ImageBitmap; null, with the reason shown, if it cannot be read.
   * @param {File | ImageBitmap} image @returns {Promise<Float32Array | null>} */
  async look(image) {
    try {
      const { features } = await this.eyes({ image, model: this.model }, () => {}, image instanceof ImageBitmap ? [image] : []);
      return features;
    } catch (error) {
      showProblem(error);
      return null;
    }
  }

  /** @param {string} name @param {File[]} files */
  async addFiles(name, files) {
    showProblem(null);
    let done = 0;
    const failed = [];
    for (const file of files) {
      const why = await this.add(name, file, file.name);
      if (why) failed.push(`${file.name}: ${why}`);
      done += 1;
      say(`${done} of ${counted(files.length, "image")} added to ${name} …`);
    }
    say(`${counted(files.length - failed.length, "image")} added to ${name}.`);
    if (failed.length) showProblem(problem(`${counted(failed.length, "file")} could not be added`, failed.slice(0, 3).join("; "), "JPEG, PNG or WebP images"));
  }

  /** Add an image, a file or an ImageBitmap, to a class; returns the reason if that is not possible.
   * @param {string} className @param {File | ImageBitmap} image @param {string} name */
  async add(className, image, name) {
    if (image instanceof File && image.size > MOST_BYTES) return "the file is too large";
    try {
      const transfer = image instanceof ImageBitmap ? [image] : [];
      const { features, thumbnail, look } = await this.eyes({ image, model: this.model, small: true }, () => {}, transfer);
      const label = this.state.classes.indexOf(className);
      if (label < 0) return "the class was removed";
      this.store.set(withImage(this.state, { name, label, features, thumbnail, look }));
      return "";
    } catch (error) {
      return reason(error);
    }
  }

  /** @param {string} name */
  openCamera(name) {
    this.live.end();
    return this.camera.open(name, async (image) => {
      const why = await this.add(name, image, `photo ${new Date().toLocaleTimeString()}`);
      if (why) showProblem(problem("The photo could not be added", why));
    });
  }

  // ---- projects

  async save() {
    while (this.fitting) await new Promise((resolve) => setTimeout(resolve, 50));
    const bytes = written(this.state, this.head, this.model, { thumbnails: at("with-thumbnails").checked });
    const address = URL.createObjectURL(new Blob([/** @type {any} */ (bytes)], { type: "application/octet-stream" }));
    element("a", { href: address, download: "project.safetensors" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
    say(this.head ? "The project is saved." : "The project is saved. It has no classifier yet: two classes need three images each.");
  }

  /** @param {File | undefined} file */
  async open(file) {
    if (!file) return;
    try {
      const state = read(new Uint8Array(await file.arrayBuffer()), this.model);
      this.store.set(state);
      showProblem(null);
      say(`${file.name} is open: ${counted(state.images.length, "image")} of ${counted(state.classes.length, "class")}.`.replace("classs", "classes"));
    } catch (error) {
      showProblem(problem("This project cannot be opened", reason(error), "a file that this page saved"));
    }
  }

  restart() {
    this.store.set(EMPTY);
    forget();
    say("The page is empty again. Undo brings everything back.");
  }
}

/** @param {unknown} error */
const reason = (error) => (error instanceof Error ? error.message : String(error));

/** @param {string} text */
function say(text) {
  at("status").textContent = text ?? "";
}

async function begin() {
  const response = await fetch("model.json").catch(() => null);
  if (!response?.ok) {
    at("about").textContent = "";
    showProblem(problem("The page is not complete", "model.json cannot be loaded", "load the page again"));
    return;
  }
  await new Page(await response.json()).start();
}

begin();
