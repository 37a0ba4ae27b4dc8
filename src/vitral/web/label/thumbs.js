// Thumbnails: asked for a few at a time, only those in sight, and kept in memory up to a number.

import { Refusal, image } from "./api.js";

const AT_ONCE = 6, MOST = 3000;

export class Thumbs {
  constructor() {
    /** @type {Map<number, string>} Number → URL, or "" for an image that cannot be read; the oldest first. */
    this.urls = new Map();
    /** @type {Map<number, ((url: string) => void)[]>} Number → functions to call with the URL; the oldest first. */
    this.wishes = new Map();
    this.running = 0;
  }

  /**
   * Call `shown` with the URL of a thumbnail, at once if it is there; "" for one that cannot be read.
   * @param {number} number
   * @param {(url: string) => void} shown
   */
  wish(number, shown) {
    const known = this.urls.get(number);
    if (known !== undefined) {
      shown(known);
      return;
    }
    const waiting = this.wishes.get(number) || [];
    this.wishes.set(number, [...waiting, shown]);
    this.next();
  }

  /**
   * Forget the wishes for images that are out of sight.
   * @param {Set<number>} visible
   */
  forget(visible) {
    for (const number of this.wishes.keys()) if (!visible.has(number)) this.wishes.delete(number);
  }

  next() {
    for (const [number, waiting] of this.wishes) {
      if (this.running >= AT_ONCE) return;
      this.wishes.delete(number);
      this.running += 1;
      this.load(number, waiting);
    }
  }

  /**
   * @param {number} number
   * @param {((url: string) => void)[]} waiting
   */
  async load(number, waiting) {
    /** @type {string | undefined} */
    let url;
    try {
      url = URL.createObjectURL(await image(number, "small"));
    } catch (error) {
      if (error instanceof Refusal && error.status === 422) url = ""; // else the server is gone: no fault of the image
    }
    this.running -= 1;
    if (url !== undefined) this.keep(number, url);
    for (const shown of waiting) shown(url ?? "");
    this.next();
  }

  /**
   * @param {number} number
   * @param {string} url
   */
  keep(number, url) {
    this.urls.set(number, url);
    for (const [oldest, old] of this.urls) {
      if (this.urls.size <= MOST) return;
      this.urls.delete(oldest);
      if (old) URL.revokeObjectURL(old);
    }
  }
}
