// The page of vitral label: its parts, and how actions reach the server.

import * as api from "./api.js";
import { Assist } from "./assist.js";
import { Classes } from "./classes.js";
import { button, byId, dialog, input } from "./dom.js";
import { Grid } from "./grid.js";
import { Insight } from "./insight.js";
import { listen } from "./keys.js";
import { Large } from "./large.js";
import { Pointer } from "./pointer.js";
import { Selection } from "./selection.js";
import { Store } from "./store.js";
import { Teach } from "./teach.js";
import { Thumbs } from "./thumbs.js";
import { Trial } from "./trial.js";

const PAUSE = 1000; // milliseconds before a request that failed is tried again

/** @typedef {import("./api.js").Action} Action */

export class Page {
  constructor() {
    this.store = new Store();
    this.selection = new Selection();
    this.sent = Promise.resolve(true); // the last action
    this.finished = this.lost = false;
    this.edited = ""; // the class whose name is asked for
    this.noted = 0; // notes that are shown
    this.grid = new Grid(byId("grid"), this.store, this.selection, new Thumbs());
    this.large = new Large(this.store, this.selection);
    const label = (/** @type {string} */ name) => this.label(name);
    this.classes = new Classes(this.store, { label, add: (name) => this.addClass(name), edit: (name) => this.edit(name) });
    this.assist = new Assist(this.store, { accept: (images) => this.accept(images) });
    new Teach(this.store);
    new Trial(this.store);
    new Pointer(this.grid, this.selection, { enlarge: () => this.large.show(), drop: label });
    this.store.addEventListener("view", () => this.view());
    this.store.addEventListener("change", () => this.draw());
    this.selection.addEventListener("change", () => this.drawSelection());
    this.buttons();
    listen(this);
  }

  async start() {
    api.takeToken();
    try {
      this.store.load(await api.state());
    } catch (error) {
      this.complain(error);
      return;
    }
    byId("work").hidden = false;
    byId("title").textContent = this.store.title;
    document.title = `${this.store.title} – vitral label`;
    this.grid.layout();
    this.grid.element.focus();
    this.follow();
  }

  /** Take changes of other tabs, and those that the server finds. */
  async follow() {
    while (!this.finished) {
      try {
        this.store.take(await api.changes(this.store.version, this.store.insight.number));
        if (this.lost) this.message("");
        this.lost = false;
      } catch (error) {
        if (this.finished) return;
        this.lost = true;
        this.complain(error);
        if (error instanceof api.Refusal && error.status === 401) return;
        await new Promise((resolve) => setTimeout(resolve, PAUSE));
      }
    }
  }

  /**
   * Apply an action; true, so that a key counts as handled.
   * @param {Action} action
   */
  act(action) {
    this.acted(action);
    return true;
  }

  /**
   * Send an action after those before it; the promise becomes true if it was done.
   * @param {Action} action
   */
  acted(action) {
    this.sent = this.sent.then(() => this.send(action));
    return this.sent;
  }

  /** @param {Action} action */
  async send(action) {
    const { undo, redo } = this.store;
    const words = (action.do === "undo" && undo && `Undone: ${undo}`) || (action.do === "redo" && redo && `Redone: ${redo}`);
    try {
      await this.store.act(action);
      this.message("");
      this.say(words || this.store.undo);
      return true;
    } catch (error) {
      this.complain(error);
      return false;
    }
  }

  /**
   * Label the selected images, with their near-duplicates.
   * @param {string} name
   */
  label(name) {
    return this.on({ do: "label", label: name }, (images) => this.store.withCopies(images));
  }

  /**
   * Accept the suggestions of images.
   * @param {number[]} images
   */
  accept(images) {
    const labels = images.map((i) => this.store.suggestionFor(i));
    if (!images.length || !labels.every(Boolean)) return this.say("No suggestion here");
    return this.acted({ do: "accept", images, labels }).then((done) => done && this.store.refresh());
  }

  /** Take what is suggested for the selected images: for want of a label, or instead of one that is likely wrong. */
  take() {
    const { targets } = this.selection;
    const images = targets.filter((i) => this.store.suggestionFor(i) || this.store.insteadOf(i));
    if (!images.length) return this.say("No suggestion here");
    const labels = images.map((i) => this.store.suggestionFor(i) || this.store.insteadOf(i));
    return this.on({ do: "accept", labels }, () => images);
  }

  /** Show the images in the order of their similarity to the one with the cursor. */
  async similar() {
    if (this.selection.current === undefined) return;
    try {
      Insight.setSimilar((await api.similar(this.selection.current)).order);
      this.assist.setOrder("similar");
      this.selection.first();
      this.grid.reveal();
    } catch (error) {
      this.complain(error);
    }
  }

  /**
   * Confirm, clear, set aside or exclude the selected images; again takes them back.
   * @param {string} kind
   */
  mark(kind) {
    if (kind === "confirm" && this.selection.targets.length && this.selection.targets.every((i) => this.store.suggestionFor(i))) return this.take();
    const state = ["unsure", "exclude"].indexOf(kind) + 3; // as in CHECKED; 2 for others
    const { targets } = this.selection;
    const back = state > 2 && targets.length && targets.every((number) => this.store.checked[number] === state);
    return this.on({ do: back ? "restore" : kind });
  }

  /**
   * Send an action on the selected images, and go on to the next one at once, so that a person need not wait.
   * @param {Action} action
   * @param {(images: number[]) => number[]} chosen
   */
  on(action, chosen = (images) => images) {
    const { selection } = this;
    const images = selection.targets, all = chosen(images);
    if (!images.length) return this.say("Select images first");
    if (images.length === 1 && images[0] === selection.current) selection.move(1, false);
    else selection.none();
    this.grid.reveal();
    return this.acted({ ...action, images: all }).then((done) => done && this.store.refresh());
  }

  /** @param {string} name */
  async addClass(name) {
    if ((await this.acted({ do: "add class", label: name })) && this.selection.numbers.size) this.label(name);
  }

  /** @param {string} name */
  edit(name) {
    this.edited = name;
    input("edit-name").value = name;
    byId("edit-title").textContent = `The class ${name}`;
    dialog("edit").showModal();
    input("edit-name").select();
  }

  help() {
    dialog("help").showModal();
    return true;
  }

  buttons() {
    const clicked = (/** @type {string} */ id, /** @type {() => void} */ work) => button(id).addEventListener("click", work);
    clicked("undo", () => this.act({ do: "undo" }));
    clicked("redo", () => this.act({ do: "redo" }));
    clicked("help-open", () => this.help());
    clicked("help-close", () => dialog("help").close());
    clicked("finish", () => this.finish());
    for (const one of markers()) one.addEventListener("click", () => this.mark(one.dataset.do ?? ""));
    input("size").addEventListener("input", () => this.grid.setSize(Number(input("size").value)));
    byId("edit-form").addEventListener("submit", () => {
      const name = input("edit-name").value.trim();
      if (name && name !== this.edited) this.acted({ do: "rename class", label: this.edited, name });
    });
    clicked("edit-cancel", () => dialog("edit").close());
    clicked("edit-remove", () => {
      dialog("edit").close();
      this.act({ do: "remove class", label: this.edited });
    });
  }

  async finish() {
    try {
      await api.finish();
      this.finished = true;
      byId("work").hidden = true;
      this.message(`Saved in ${this.store.table}. The terminal shows the next command. You can close this page.`);
    } catch (error) {
      this.complain(error);
    }
  }

  view() {
    const { shown, filter } = this.store;
    this.selection.setShown(shown);
    byId("showing").textContent = this.store.nameOf(filter);
    byId("empty").hidden = shown.length > 0;
    byId("empty").textContent = filter === "unlabeled" ? "Every image has a label, or is set aside." : "No images here.";
  }

  draw() {
    const { undo, redo, table, notes } = this.store;
    for (const [id, text] of [["undo", undo], ["redo", redo]]) {
      button(id).disabled = !text;
      byId(id).title = text ? `${id === "undo" ? "Undo" : "Redo"}: ${text}` : "";
    }
    byId("saved").textContent = undo || redo ? `Saved in ${table}` : `Will be saved in ${table}`;
    if (notes.length !== this.noted) this.message(notes.join(". "));
    this.noted = notes.length;
    this.drawSelection();
  }

  drawSelection() {
    const count = this.selection.numbers.size;
    byId("selected").textContent = count ? `${count.toLocaleString("en")} selected` : "";
    for (const one of markers()) one.disabled = !this.selection.targets.length;
  }

  /** @param {string} text */
  say(text) {
    byId("status").textContent = text ? text[0].toUpperCase() + text.slice(1) : "";
    return true;
  }

  /** @param {string} text */
  message(text) {
    byId("message").hidden = !text;
    byId("message").textContent = text;
  }

  /** @param {unknown} error */
  complain(error) {
    const old = error instanceof api.Refusal && error.status === 401;
    this.message(old ? `${error.message}. Open the address that vitral label printed in the terminal` : api.wordsOf(error));
  }
}

/** The buttons that mark the selected images. */
function markers() {
  return /** @type {NodeListOf<HTMLButtonElement>} */ (document.querySelectorAll("button[data-do]"));
}

new Page().start();
