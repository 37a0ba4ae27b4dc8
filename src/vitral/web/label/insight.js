// What features say about the images: suggestions, doubts, near-duplicates and accuracy, as the server has computed them.

/** Orders of the grid: key → name. */
export const ORDERS = {
  given: "as in the data",
  doubtful: "most doubtful first",
  certain: "most certain first",
  wrong: "likely wrong first",
  similar: "most similar first",
};

export class Insight {
  constructor(plain = {}) {
    const { suggested = [], percent = [], doubt = [], groups = [], unlike = [], held = [] } = plain;
    Object.assign(this, { suggested, percent, doubt, groups });
    this.unlike = new Set(unlike);
    this.held = new Set(held);
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
    Object.assign(this, { suggested: [], percent: [], doubt: [], confusion: undefined, crossed: undefined, heldOut: undefined, forecast: undefined });
  }

  /** An image and its near-duplicates. */
  copies(i) {
    return this.members.get(this.groups[i]) ?? [i];
  }

  /** These images, and those of their near-duplicates that pass a test. */
  withCopies(images, test) {
    const more = images.flatMap((i) => this.copies(i).filter((other) => other !== i && test(other)));
    return [...new Set([...images, ...more])];
  }

  /** Images in an order; near-duplicates stand together where they lie. */
  ordered(images, order) {
    if (order === "similar" && Insight.places) return sorted(images, (i) => Insight.places[i] ?? Infinity);
    if (order === "doubtful") return sorted(images, (i) => (this.suggested[i] >= 0 ? this.percent[i] : 101));
    if (order === "certain") return sorted(images, (i) => (this.suggested[i] >= 0 ? -this.percent[i] : 1));
    if (order === "wrong") return sorted(images, (i) => -(this.doubt[i] ?? 0));
    if (!this.members.size) return images;
    return sorted(images, (i) => this.copies(i)[0]);
  }
}

/** Remember the order of images by their similarity to one. */
Insight.setSimilar = (order) => {
  Insight.places = new Float64Array(order.length);
  order.forEach((number, place) => (Insight.places[number] = place));
};

function sorted(images, key) {
  const keys = new Map(images.map((i) => [i, key(i)]));
  return [...images].sort((a, b) => keys.get(a) - keys.get(b) || a - b);
}

/** Group → its images, of groups of several. */
function membersOf(groups) {
  const found = new Map();
  groups.forEach((group, i) => found.set(group, [...(found.get(group) ?? []), i]));
  for (const [group, images] of found) if (images.length < 2) found.delete(group);
  return found;
}
