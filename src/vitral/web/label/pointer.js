// Mouse, pen and touch on the grid: clicks, frames around many images, and images dragged onto a class.

const FAR = 5; // pixels that a pointer moves before it drags

export class Pointer {
  /** `enlarge(number)` shows an image large; `drop(label)` labels the selected images. */
  constructor(grid, selection, { enlarge, drop }) {
    Object.assign(this, { grid, selection, enlarge, drop });
    this.frame = grid.canvas.appendChild(document.createElement("div"));
    this.frame.className = "frame";
    this.frame.hidden = true;
    this.ghost = document.body.appendChild(document.createElement("div"));
    this.ghost.className = "ghost";
    this.ghost.hidden = true;
    const element = grid.element;
    element.addEventListener("pointerdown", (event) => this.down(event));
    document.addEventListener("pointermove", (event) => this.move(event)); // a fast one has left the grid at once
    document.addEventListener("pointerup", (event) => this.up(event));
    document.addEventListener("pointercancel", () => this.end());
    element.addEventListener("dblclick", (event) => {
      const number = this.number(event);
      if (number !== undefined) this.enlarge(number);
    });
  }

  position(event) {
    const cell = event.target.closest(".cell");
    return cell ? Number(cell.dataset.position) : undefined;
  }

  number(event) {
    return this.selection.shown[this.position(event)];
  }

  down(event) {
    if (event.button !== 0 || event.offsetX > this.grid.element.clientWidth) return; // the scroll bar is the browser's
    this.start = { x: event.clientX, y: event.clientY, position: this.position(event), touch: event.pointerType === "touch" };
    this.start.toggle = event.ctrlKey || event.metaKey;
    this.start.range = event.shiftKey;
    this.kind = "";
  }

  move(event) {
    const { start } = this;
    if (!start || start.touch) return; // a finger scrolls
    if (!this.kind && Math.hypot(event.clientX - start.x, event.clientY - start.y) > FAR) this.begin(event);
    if (this.kind === "frame") this.stretch(event);
    if (this.kind === "images") this.carry(event);
  }

  begin(event) {
    const { start, grid, selection } = this;
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

  onCanvas(x, y) {
    const box = this.grid.canvas.getBoundingClientRect();
    return [x - box.left, y - box.top];
  }

  stretch(event) {
    const [[x, y], [left, top]] = [this.onCanvas(event.clientX, event.clientY), this.start.corner];
    const [x1, x2, y1, y2] = [Math.min(x, left), Math.max(x, left), Math.min(y, top), Math.max(y, top)];
    Object.assign(this.frame.style, { left: `${x1}px`, top: `${y1}px`, width: `${x2 - x1}px`, height: `${y2 - y1}px` });
    this.frame.hidden = false;
    this.selection.frame(this.grid.within(x1, y1, x2, y2), this.start.toggle);
    const box = this.grid.element.getBoundingClientRect();
    if (event.clientY > box.bottom - 30) this.grid.element.scrollTop += 20;
    if (event.clientY < box.top + 30) this.grid.element.scrollTop -= 20;
  }

  carry(event) {
    Object.assign(this.ghost.style, { left: `${event.clientX + 12}px`, top: `${event.clientY + 12}px` });
    this.mark(this.under(event));
  }

  /** The class under the pointer. */
  under(event) {
    return document.elementFromPoint(event.clientX, event.clientY)?.closest("[data-label]");
  }

  mark(target) {
    for (const one of document.querySelectorAll(".over")) if (one !== target) one.classList.remove("over");
    target?.classList.add("over");
  }

  up(event) {
    const { start, kind } = this;
    if (!start) return;
    const target = kind === "images" ? this.under(event) : null;
    this.end();
    if (target) this.drop(target.dataset.label);
    else if (!kind) this.click(start);
  }

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
