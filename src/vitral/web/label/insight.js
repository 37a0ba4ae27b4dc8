// What features say about the images: suggestions, doubts, near-duplicates and accuracy, as the server has computed them.

/** Orders of the grid: key → name. */
export const ORDERS = {
  given: "as in the data",
  useful: "most useful first",
  certain: "most certain first",
  wrong: "likely wrong first",
  similar: "most similar first",
};

export class Insight {
  /** @type {Float64Array | undefined} Place of each image in the order of similarity to one. */
  static places;

  /** @param {Partial<import("./api.js").Insight>} plain */
  constructor(plain = {}) {
    const { suggested = [], percent = [], doubt = [], groups = [], unlike = [], held = [], next = [] } = plain;
    this.suggested = suggested;
    this.percent = percent;
    this.doubt = doubt;
    this.groups = groups;
    this.unlike = new Set(unlike);
    this.held = new Set(held);
    /** @type {Map<number, number>} Place of each image whose label teaches most. */
    this.next = new Map(next.map((i, place) => [i, place]));
    this.number = plain.number ?? 0;
    this.progress = plain.progress;
    this.crossed = plain.crossed;
    this.heldOut = plain.held_out;
    this.confusion = plain.confusion;
    this.sure = plain.sure ?? [0, 0];
    this.curve = plain.curve ?? [];
    this.forecast = plain.forecast;
    this.members = membersOf(groups);
  }

  /** Forget what names classes: new insight follows within a moment. */
  forget() {
    this.suggested = this.percent = this.doubt = [];
    this.next = new Map();
    this.confusion = this.crossed = this.heldOut = this.forecast = undefined;
  }

  /**
   * An image and its near-duplicates.
   * @param {number} i
   */
  copies(i) {
    return this.members.get(this.groups[i]) ?? [i];
  }

  /**
   * These images, and those of their near-duplicates that pass a test.
   * @param {number[]} images
   * @param {(i: number) => boolean} test
   */
  withCopies(images, test) {
    const more = images.flatMap((i) => this.copies(i).filter((other) => other !== i && test(other)));
    return [...new Set([...images, ...more])];
  }

  /**
   * Percent of the suggestion, and more for an image that has none.
   * @param {number} i
   */
  certainty(i) {
    return this.suggested[i] >= 0 ? this.percent[i] : 101;
  }

  /**
   * Images in an order; near-duplicates stand together where they lie.
   * @param {number[]} images
   * @param {string} order a key of ORDERS
   */
  ordered(images, order) {
    const { places } = Insight;
    if (order === "similar" && places) return sorted(images, (i) => places[i] ?? Infinity);
    if (order === "useful") return sorted(images, (i) => this.next.get(i) ?? this.next.size + this.certainty(i));
    if (order === "certain") return sorted(images, (i) => (this.suggested[i] >= 0 ? -this.percent[i] : 1));
    if (order === "wrong") return sorted(images, (i) => -(this.doubt[i] ?? 0));
    if (!this.members.size) return images;
    return sorted(images, (i) => this.copies(i)[0]);
  }

  /**
   * Remember the order of images by their similarity to one.
   * @param {number[]} order
   */
  static setSimilar(order) {
    const places = new Float64Array(order.length);
    order.forEach((number, place) => (places[number] = place));
    Insight.places = places;
  }
}

/**
 * @param {number[]} images
 * @param {(i: number) => number} key
 */
function sorted(images, key) {
  return images.map((i) => ({ i, key: key(i) })).sort((a, b) => a.key - b.key || a.i - b.i).map((one) => one.i);
}

/**
 * Group → its images, of groups of several.
 * @param {number[]} groups
 */
function membersOf(groups) {
  /** @type {Map<number, number[]>} */
  const found = new Map();
  groups.forEach((group, i) => found.set(group, [...(found.get(group) ?? []), i]));
  for (const [group, images] of found) if (images.length < 2) found.delete(group);
  return found;
}
