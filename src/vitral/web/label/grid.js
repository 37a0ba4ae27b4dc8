// A grid that draws only the images in sight: 20,000 images cost as much as 60.

import { element } from "./dom.js";
import { CHECKED, color } from "./store.js";

const GAP = 8, CAPTION = 24, MARGIN = 2; // pixels; rows above and below that are drawn, too

export class Grid {
  /**
   * @param {HTMLElement} place
   * @param {import("./store.js").Store} store
   * @param {import("./selection.js").Selection} selection
   * @param {import("./thumbs.js").Thumbs} thumbs
   */
  constructor(place, store, selection, thumbs) {
    this.element = place;
    this.store = store;
    this.selection = selection;
    this.thumbs = thumbs;
    this.size = 150;
    this.columns = 0;
    this.side = this.row = 1; // pixels of an image, and of a row with its gap
    /** @type {Map<number, HTMLElement>} Number of an image → cell. */
    this.cells = new Map();
    this.canvas = place.appendChild(element("div"));
    this.canvas.className = "canvas";
    this.canvas.setAttribute("role", "presentation");
    this.asked = 0;
    place.addEventListener("scroll", () => this.ask());
    new ResizeObserver(() => this.layout()).observe(place);
    store.addEventListener("view", () => this.layout());
    store.addEventListener("change", () => this.redraw());
    selection.addEventListener("change", () => this.redraw());
  }

  /** @param {number} size pixels that an image has at least */
  setSize(size) {
    this.size = size;
    this.layout();
    this.reveal();
  }

  /** Columns and sizes for the width of the grid, then all cells at their places. */
  layout() {
    const width = this.element.clientWidth - 2 * GAP;
    this.columns = Math.max(1, Math.floor((width + GAP) / (this.size + GAP)));
    this.side = Math.max(1, (width + GAP) / this.columns - GAP);
    this.row = this.side + CAPTION + GAP;
    this.canvas.style.height = `${Math.ceil(this.store.shown.length / this.columns) * this.row + GAP}px`;
    this.draw();
  }

  /** Draw before the next frame. */
  ask() {
    if (!this.asked) this.asked = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.asked = 0;
    if (!this.columns || !this.store.names.length) return;
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.row) - MARGIN) * this.columns;
    const rows = Math.ceil(this.element.clientHeight / this.row) + 2 * MARGIN + 1;
    const visible = this.store.shown.slice(first, first + rows * this.columns);
    const there = new Set(visible);
    for (const [number, cell] of this.cells) {
      if (there.has(number)) continue;
      cell.remove();
      this.cells.delete(number);
    }
    this.thumbs.forget(there);
    visible.forEach((number, i) => this.place(this.cells.get(number) || this.create(number), first + i));
    this.redraw();
  }

  /** @param {number} number */
  create(number) {
    const image = element("img"), copies = element("span");
    const picture = element("div", "", image, copies), caption = element("span");
    const cell = element("div", "", picture, caption);
    cell.className = "cell";
    copies.className = "copies";
    picture.className = "picture";
    caption.className = "caption";
    cell.id = `image-${number}`;
    cell.setAttribute("role", "option");
    cell.title = this.store.names[number];
    image.alt = "";
    image.draggable = false;
    this.cells.set(number, cell);
    this.canvas.append(cell);
    this.thumbs.wish(number, (url) => {
      if (url) image.src = url;
      else cell.classList.add("broken");
    });
    return cell;
  }

  /**
   * @param {HTMLElement} cell
   * @param {number} position
   */
  place(cell, position) {
    cell.dataset.position = String(position);
    cell.setAttribute("aria-setsize", String(this.store.shown.length));
    cell.setAttribute("aria-posinset", String(position + 1));
    cell.style.width = `${this.side}px`;
    cell.style.height = `${this.side + CAPTION}px`;
    const [x, y] = [(position % this.columns) * (this.side + GAP) + GAP, Math.floor(position / this.columns) * this.row + GAP];
    cell.style.transform = `translate(${x}px, ${y}px)`;
  }

  /** Labels, selection and cursor of the cells that are drawn. */
  redraw() {
    for (const [number, cell] of this.cells) this.dress(cell, number);
    const current = this.cells.get(this.selection.current ?? -1);
    if (current) this.element.setAttribute("aria-activedescendant", current.id);
    else this.element.removeAttribute("aria-activedescendant");
  }

  /**
   * @param {HTMLElement} cell
   * @param {number} number
   */
  dress(cell, number) {
    const label = this.store.labels[number], checked = CHECKED[this.store.checked[number]];
    const words = this.store.words(number);
    const [selected, cursor] = [this.selection.has(number), number === this.selection.current];
    const key = `${words} ${label} ${selected} ${cursor}`;
    if (cell.dataset.key === key) return;
    cell.dataset.key = key;
    cell.dataset.checked = checked;
    cell.classList.toggle("labeled", label >= 0);
    cell.classList.toggle("cursor", cursor);
    cell.setAttribute("aria-selected", String(selected));
    cell.setAttribute("aria-label", words);
    const shown = label >= 0 ? label : this.store.insight.suggested[number];
    if (shown >= 0) cell.style.setProperty("--color", color(shown));
    const suggestion = this.store.suggestionFor(number), instead = this.store.insteadOf(number);
    cell.classList.toggle("suggested", Boolean(suggestion || instead));
    const copies = this.store.insight.copies(number).length;
    write(cell, ".copies", copies > 1 ? `× ${copies}` : "");
    const state = ["unsure", "excluded"].includes(checked) ? checked : "";
    const probably = suggestion ? `${suggestion}? ${this.store.insight.percent[number]}%` : instead && `${this.store.labelOf(number)} → ${instead}?`;
    const name = this.store.names[number].split("/").at(-1) ?? "";
    write(cell, ".caption", state || probably || this.store.labelOf(number) || name);
  }

  /** Scroll until the image with the cursor is in sight. */
  reveal() {
    const top = Math.floor(this.selection.cursor / this.columns) * this.row;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + this.row + GAP > scrollTop + clientHeight) this.element.scrollTop = top + this.row + GAP - clientHeight;
    this.draw();
  }

  /**
   * Positions of the images that touch a rectangle of the canvas, in pixels.
   * @param {number} left
   * @param {number} top
   * @param {number} right
   * @param {number} bottom
   */
  within(left, top, right, bottom) {
    /** @type {number[]} */
    const found = [];
    const step = this.side + GAP;
    const column = (/** @type {number} */ x) => Math.max(0, Math.min(this.columns - 1, Math.floor((x - GAP) / step)));
    const row = (/** @type {number} */ y) => Math.max(0, Math.floor((y - GAP) / this.row));
    for (let y = row(top); y <= row(bottom); y++) {
      for (let x = column(left); x <= column(right); x++) {
        const position = y * this.columns + x;
        if (position < this.store.shown.length) found.push(position);
      }
    }
    return found;
  }
}

/**
 * @param {Element} cell
 * @param {string} selector
 * @param {string} text
 */
function write(cell, selector, text) {
  const part = cell.querySelector(selector);
  if (part) part.textContent = text;
}
