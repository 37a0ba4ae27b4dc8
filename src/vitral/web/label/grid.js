// A grid that draws only the images in sight: 20,000 images cost as much as 60.

import { CHECKED, color } from "./store.js";

const GAP = 8, CAPTION = 24, MARGIN = 2; // pixels; rows above and below that are drawn, too

export class Grid {
  constructor(element, store, selection, thumbs) {
    Object.assign(this, { element, store, selection, thumbs });
    this.size = 150;
    this.cells = new Map(); // number of an image → cell
    this.canvas = element.appendChild(document.createElement("div"));
    this.canvas.className = "canvas";
    this.canvas.setAttribute("role", "presentation");
    this.asked = 0;
    element.addEventListener("scroll", () => this.ask());
    new ResizeObserver(() => this.layout()).observe(element);
    store.addEventListener("view", () => this.layout());
    store.addEventListener("change", () => this.redraw());
    selection.addEventListener("change", () => this.redraw());
  }

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
    if (!this.columns || !this.store.names) return;
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

  create(number) {
    const cell = document.createElement("div");
    cell.className = "cell";
    cell.id = `image-${number}`;
    cell.setAttribute("role", "option");
    cell.title = this.store.names[number];
    const picture = cell.appendChild(document.createElement("div"));
    picture.className = "picture";
    const image = picture.appendChild(document.createElement("img"));
    image.alt = "";
    image.draggable = false;
    picture.appendChild(document.createElement("span")).className = "copies";
    cell.appendChild(document.createElement("span")).className = "caption";
    this.cells.set(number, cell);
    this.canvas.append(cell);
    this.thumbs.wish(number, (url) => {
      if (url) image.src = url;
      else cell.classList.add("broken");
    });
    return cell;
  }

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
    const current = this.cells.get(this.selection.current);
    if (current) this.element.setAttribute("aria-activedescendant", current.id);
    else this.element.removeAttribute("aria-activedescendant");
  }

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
    cell.querySelector(".copies").textContent = copies > 1 ? `× ${copies}` : "";
    const state = { unsure: "unsure", excluded: "excluded" }[checked];
    const probably = suggestion ? `${suggestion}? ${this.store.insight.percent[number]}%` : instead && `${this.store.labelOf(number)} → ${instead}?`;
    cell.lastChild.textContent = state || probably || this.store.labelOf(number) || this.store.names[number].split("/").at(-1);
  }

  /** Scroll until the image with the cursor is in sight. */
  reveal() {
    const top = Math.floor(this.selection.cursor / this.columns) * this.row;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + this.row + GAP > scrollTop + clientHeight) this.element.scrollTop = top + this.row + GAP - clientHeight;
    this.draw();
  }

  /** Positions of the images that touch a rectangle of the canvas, in pixels. */
  within(left, top, right, bottom) {
    const step = this.side + GAP, found = [];
    const column = (x) => Math.max(0, Math.min(this.columns - 1, Math.floor((x - GAP) / step)));
    const row = (y) => Math.max(0, Math.floor((y - GAP) / this.row));
    for (let y = row(top); y <= row(bottom); y++) {
      for (let x = column(left); x <= column(right); x++) {
        const position = y * this.columns + x;
        if (position < this.store.shown.length) found.push(position);
      }
    }
    return found;
  }
}
