// Thumbnails: asked for a few at a time, only those in sight, and kept in memory up to a number.

import { image } from "./api.js";

const AT_ONCE = 6, MOST = 3000;

export class Thumbs {
  constructor() {
    this.urls = new Map(); // number → URL, or "" for an image that cannot be read; the oldest first
    this.wishes = new Map(); // number → functions to call with the URL; the oldest first
    this.running = 0;
  }

  /** Call `shown` with the URL of a thumbnail, at once if it is there; "" for one that cannot be read. */
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

  /** Forget the wishes for images that are out of sight. */
  forget(visible) {
    for (const number of this.wishes.keys()) if (!visible.has(number)) this.wishes.delete(number);
  }

  next() {
    while (this.running < AT_ONCE && this.wishes.size) {
      const [number, waiting] = this.wishes.entries().next().value;
      this.wishes.delete(number);
      this.running += 1;
      this.load(number, waiting);
    }
  }

  async load(number, waiting) {
    let url = "";
    try {
      url = URL.createObjectURL(await image(number, "small"));
    } catch (error) {
      if (error.status !== 422) url = undefined; // the server is gone: this is no fault of the image
    }
    this.running -= 1;
    if (url !== undefined) this.keep(number, url);
    for (const shown of waiting) shown(url ?? "");
    this.next();
  }

  keep(number, url) {
    this.urls.set(number, url);
    if (this.urls.size <= MOST) return;
    const [oldest, old] = this.urls.entries().next().value;
    this.urls.delete(oldest);
    if (old) URL.revokeObjectURL(old);
  }
}
