// The selected images, and the one that has the cursor. Positions count the images that are shown.

/** Emits `change`. */
export class Selection extends EventTarget {
  constructor() {
    super();
    /** @type {number[]} */
    this.shown = [];
    this.cursor = 0;
    this.anchor = 0;
    /** @type {Set<number>} */
    this.numbers = new Set();
  }

  /**
   * Take another list of images; the cursor stays at its image, or at its place if that is gone.
   * @param {number[]} shown
   */
  setShown(shown) {
    const at = shown.indexOf(this.shown[this.cursor]);
    this.cursor = Math.max(0, at >= 0 ? at : Math.min(this.cursor, shown.length - 1));
    this.anchor = this.cursor;
    this.shown = shown;
    const there = new Set(shown);
    this.numbers = new Set([...this.numbers].filter((number) => there.has(number)));
    this.changed();
  }

  /**
   * The image with the cursor; undefined if none is shown.
   * @returns {number | undefined}
   */
  get current() {
    return this.shown[this.cursor];
  }

  /** The selected images, else the one with the cursor. */
  get targets() {
    if (this.numbers.size) return [...this.numbers];
    return this.current === undefined ? [] : [this.current];
  }

  /** @param {number} number */
  has(number) {
    return this.numbers.has(number);
  }

  /**
   * Select as a click does: one image, with `toggle` one more or less, with `range` all from the anchor.
   * @param {number} position
   * @param {{ toggle?: boolean, range?: boolean }} keys
   */
  click(position, { toggle = false, range = false } = {}) {
    const number = this.shown[position];
    if (range) {
      this.numbers = new Set(this.span(this.anchor, position));
    } else if (toggle) {
      if (!this.numbers.delete(number)) this.numbers.add(number);
      this.anchor = position;
    } else {
      this.numbers = new Set([number]);
      this.anchor = position;
    }
    this.cursor = position;
    this.changed();
  }

  /**
   * Move the cursor by a number of positions; with `extend`, select on the way.
   * @param {number} by
   * @param {boolean} extend
   */
  move(by, extend) {
    if (!this.shown.length) return;
    this.cursor = Math.max(0, Math.min(this.shown.length - 1, this.cursor + by));
    if (extend) {
      this.numbers = new Set(this.span(this.anchor, this.cursor));
    } else {
      this.numbers.clear();
      this.anchor = this.cursor;
    }
    this.changed();
  }

  /**
   * Select these positions, with `add` beside those that are selected.
   * @param {number[]} positions
   * @param {boolean} add
   */
  frame(positions, add) {
    this.numbers = new Set([...(add ? this.numbers : []), ...positions.map((position) => this.shown[position])]);
    this.changed();
  }

  /** Put the cursor on the first image. */
  first() {
    this.cursor = this.anchor = 0;
    this.numbers.clear();
    this.changed();
  }

  all() {
    this.numbers = new Set(this.shown);
    this.changed();
  }

  none() {
    this.numbers.clear();
    this.changed();
  }

  /**
   * @param {number} one
   * @param {number} other
   */
  span(one, other) {
    return this.shown.slice(Math.min(one, other), Math.max(one, other) + 1);
  }

  changed() {
    this.dispatchEvent(new CustomEvent("change"));
  }
}
