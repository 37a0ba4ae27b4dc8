// The page of vitral label: its parts, and how actions reach the server.

import * as api from "./api.js";
import { Assist } from "./assist.js";
import { Classes } from "./classes.js";
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

const byId = (id) => document.getElementById(id);
const PAUSE = 1000; // milliseconds before a request that failed is tried again

class Page {
  constructor() {
    this.store = new Store();
    this.selection = new Selection();
    this.sent = Promise.resolve(true); // the last action
    this.grid = new Grid(byId("grid"), this.store, this.selection, new Thumbs());
    this.large = new Large(this.store, this.selection);
    const label = (name) => this.label(name);
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
        if (error.status === 401) return;
        await new Promise((resolve) => setTimeout(resolve, PAUSE));
      }
    }
  }

  /** Apply an action; true, so that a key counts as handled. */
  act(action) {
    return this.acted(action) && true;
  }

  /** Send an action after those before it; what it resolves to tells if it was done. */
  acted(action) {
    this.sent = this.sent.then(() => this.send(action));
    return this.sent;
  }

  async send(action) {
    const said = { undo: this.store.undo && `Undone: ${this.store.undo}`, redo: this.store.redo && `Redone: ${this.store.redo}` }[action.do];
    try {
      await this.store.act(action);
      this.message("");
      this.say(said ?? this.store.undo);
      return true;
    } catch (error) {
      this.complain(error);
      return false;
    }
  }

  /** Label the selected images, with their near-duplicates. */
  label(name) {
    return this.on({ do: "label", label: name }, (images) => this.store.withCopies(images));
  }

  /** Accept the suggestions of images. */
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

  /** Confirm, clear, set aside or exclude the selected images; again takes them back. */
  mark(kind) {
    if (kind === "confirm" && this.selection.targets.length && this.selection.targets.every((i) => this.store.suggestionFor(i))) return this.take();
    const state = { unsure: 3, exclude: 4 }[kind];
    const { targets } = this.selection;
    const back = state && targets.length && targets.every((number) => this.store.checked[number] === state);
    return this.on({ do: back ? "restore" : kind });
  }

  /** Send an action on the selected images, and go on to the next one at once, so that a person need not wait. */
  on(action, chosen = (images) => images) {
    const { selection } = this;
    const images = selection.targets, all = chosen(images);
    if (!images.length) return this.say("Select images first");
    if (images.length === 1 && images[0] === selection.current) selection.move(1, false);
    else selection.none();
    this.grid.reveal();
    return this.acted({ ...action, images: all }).then((done) => done && this.store.refresh());
  }

  async addClass(name) {
    if ((await this.acted({ do: "add class", label: name })) && this.selection.numbers.size) this.label(name);
  }

  edit(name) {
    this.edited = name;
    byId("edit-name").value = name;
    byId("edit-title").textContent = `The class ${name}`;
    byId("edit").showModal();
    byId("edit-name").select();
  }

  help() {
    byId("help").showModal();
    return true;
  }

  buttons() {
    const clicked = (id, work) => byId(id).addEventListener("click", work);
    clicked("undo", () => this.act({ do: "undo" }));
    clicked("redo", () => this.act({ do: "redo" }));
    clicked("help-open", () => this.help());
    clicked("help-close", () => byId("help").close());
    clicked("finish", () => this.finish());
    for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", () => this.mark(button.dataset.do));
    byId("size").addEventListener("input", (event) => this.grid.setSize(Number(event.target.value)));
    byId("edit-form").addEventListener("submit", () => {
      const name = byId("edit-name").value.trim();
      if (name && name !== this.edited) this.acted({ do: "rename class", label: this.edited, name });
    });
    clicked("edit-cancel", () => byId("edit").close());
    clicked("edit-remove", () => {
      byId("edit").close();
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
      byId(id).disabled = !text;
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
    for (const button of document.querySelectorAll("[data-do]")) button.disabled = !this.selection.targets.length;
  }

  say(text) {
    byId("status").textContent = text ? text[0].toUpperCase() + text.slice(1) : "";
    return true;
  }

  message(text) {
    byId("message").hidden = !text;
    byId("message").textContent = text;
  }

  complain(error) {
    const reused = error.status === 401 ? "Open the address that vitral label printed in the terminal" : error.hint;
    this.message([error.message, reused].filter(Boolean).join(". "));
  }
}

new Page().start();
