// Mouse, pen and touch on the grid: clicks, frames around many images, and images dragged onto a class.

import { element } from "./dom.js";

/**
 * @typedef {object} Start
 * @property {number} x
 * @property {number} y
 * @property {number | undefined} position
 * @property {boolean} touch
 * @property {boolean} toggle
 * @property {boolean} range
 * @property {[number, number]} corner
 */

const FAR = 5; // pixels that a pointer moves before it drags

export class Pointer {
  /**
   * `enlarge` shows an image large; `drop` labels the selected images.
   * @param {import("./grid.js").Grid} grid
   * @param {import("./selection.js").Selection} selection
   * @param {{ enlarge: (number: number) => void, drop: (label: string) => void }} calls
   */
  constructor(grid, selection, { enlarge, drop }) {
    this.grid = grid;
    this.selection = selection;
    this.enlarge = enlarge;
    this.drop = drop;
    /** @type {Start | undefined} The place where a pointer went down. */
    this.start = undefined;
    this.kind = ""; // of a drag: frame or images
    this.frame = grid.canvas.appendChild(element("div"));
    this.frame.className = "frame";
    this.frame.hidden = true;
    this.ghost = document.body.appendChild(element("div"));
    this.ghost.className = "ghost";
    this.ghost.hidden = true;
    grid.element.addEventListener("pointerdown", (event) => this.down(event));
    document.addEventListener("pointermove", (event) => this.move(event)); // a fast one has left the grid at once
    document.addEventListener("pointerup", (event) => this.up(event));
    document.addEventListener("pointercancel", () => this.end());
    grid.element.addEventListener("dblclick", (event) => {
      const number = this.number(event);
      if (number !== undefined) this.enlarge(number);
    });
  }

  /** @param {MouseEvent} event */
  position(event) {
    const cell = event.target instanceof Element && event.target.closest(".cell");
    return cell instanceof HTMLElement ? Number(cell.dataset.position) : undefined;
  }

  /** @param {MouseEvent} event */
  number(event) {
    const position = this.position(event);
    return position === undefined ? undefined : this.selection.shown[position];
  }

  /** @param {PointerEvent} event */
  down(event) {
    if (event.button !== 0 || event.offsetX > this.grid.element.clientWidth) return; // the scroll bar is the browser's
    const [x, y] = [event.clientX, event.clientY];
    const [touch, toggle] = [event.pointerType === "touch", event.ctrlKey || event.metaKey];
    this.start = { x, y, position: this.position(event), touch, toggle, range: event.shiftKey, corner: [0, 0] };
    this.kind = "";
  }

  /** @param {PointerEvent} event */
  move(event) {
    const { start } = this;
    if (!start || start.touch) return; // a finger scrolls
    if (!this.kind && Math.hypot(event.clientX - start.x, event.clientY - start.y) > FAR) this.begin(event, start);
    if (this.kind === "frame") this.stretch(event, start);
    if (this.kind === "images") this.carry(event);
  }

  /**
   * @param {PointerEvent} event
   * @param {Start} start
   */
  begin(event, start) {
    const { grid, selection } = this;
    grid.element.setPointerCapture(event.pointerId);
    if (start.position === undefined || start.range) {
      this.kind = "frame";
      start.corner = this.onCanvas(start.x, start.y);
      return;
    }
    this.kind = "images";
    if (!selection.has(selection.shown[start.position])) selection.click(start.position);
    this.ghost.textContent = selection.numbers.size === 1 ? "1 image" : `${selection.numbers.size} images`;
    this.ghost.hidden = false;
  }

  /**
   * @param {number} x
   * @param {number} y
   * @returns {[number, number]}
   */
  onCanvas(x, y) {
    const box = this.grid.canvas.getBoundingClientRect();
    return [x - box.left, y - box.top];
  }

  /**
   * @param {PointerEvent} event
   * @param {Start} start
   */
  stretch(event, start) {
    const [[x, y], [left, top]] = [this.onCanvas(event.clientX, event.clientY), start.corner];
    const [x1, x2, y1, y2] = [Math.min(x, left), Math.max(x, left), Math.min(y, top), Math.max(y, top)];
    Object.assign(this.frame.style, { left: `${x1}px`, top: `${y1}px`, width: `${x2 - x1}px`, height: `${y2 - y1}px` });
    this.frame.hidden = false;
    this.selection.frame(this.grid.within(x1, y1, x2, y2), start.toggle);
    const box = this.grid.element.getBoundingClientRect();
    if (event.clientY > box.bottom - 30) this.grid.element.scrollTop += 20;
    if (event.clientY < box.top + 30) this.grid.element.scrollTop -= 20;
  }

  /** @param {PointerEvent} event */
  carry(event) {
    Object.assign(this.ghost.style, { left: `${event.clientX + 12}px`, top: `${event.clientY + 12}px` });
    this.mark(this.under(event));
  }

  /**
   * The class under the pointer.
   * @param {PointerEvent} event
   */
  under(event) {
    return document.elementFromPoint(event.clientX, event.clientY)?.closest("[data-label]") ?? null;
  }

  /** @param {Element | null} target */
  mark(target) {
    for (const one of document.querySelectorAll(".over")) if (one !== target) one.classList.remove("over");
    target?.classList.add("over");
  }

  /** @param {PointerEvent} event */
  up(event) {
    const { start, kind } = this;
    if (!start) return;
    const target = kind === "images" ? this.under(event) : null;
    this.end();
    if (target) this.drop(target.getAttribute("data-label") ?? "");
    else if (!kind) this.click(start);
  }

  /** @param {Start} start */
  click({ position, toggle, range, touch }) {
    if (position === undefined) this.selection.none();
    else this.selection.click(position, { toggle: toggle || touch, range });
  }

  end() {
    this.start = undefined;
    this.kind = "";
    this.frame.hidden = this.ghost.hidden = true;
    this.mark(null);
  }
}
