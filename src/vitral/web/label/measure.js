// The dialog of the accuracy: figures with their interval, each class, the confusions, and what more labels would bring.

import { barRow, button, byId, dialog, element } from "./dom.js";

/** @typedef {import("./api.js").Accuracy} Accuracy */

/**
 * A fraction as a percentage.
 * @param {number} fraction
 */
export const percent = (fraction) => `${Math.round(100 * fraction)}%`;

export class Measure {
  /** @param {import("./store.js").Store} store */
  constructor(store) {
    this.store = store;
    button("measure-close").addEventListener("click", () => dialog("measure").close());
  }

  show() {
    this.draw();
    dialog("measure").showModal();
  }

  draw() {
    const { crossed, heldOut, confusion, curve } = this.store.insight;
    byId("measure-text").replaceChildren(
      ...[this.sentence(crossed, "checked labels, each predicted from the others (cross-validation)"), this.sentence(heldOut, "held-out images, which you labeled without a suggestion"), this.advice()]
        .filter(Boolean)
        .map((text) => element("p", text)),
    );
    byId("confusion").replaceChildren(...(confusion ? this.table(confusion) : []));
    byId("curve").replaceChildren(...curve.map(([labels, accuracy]) => barRow(`${labels.toLocaleString("en")} labels`, accuracy, percent(accuracy))));
    byId("curve-title").hidden = !curve.length;
  }

  /**
   * @param {Accuracy | null | undefined} one
   * @param {string} what
   */
  sentence(one, what) {
    if (!one || !one.images) return "";
    const counted = `${one.right.toLocaleString("en")} of ${one.images.toLocaleString("en")} ${what}`;
    if (one.accuracy === undefined || !one.interval) return `${counted} are predicted correctly: too few to say how accurate the suggestions are.`;
    const [low, high] = one.interval;
    return `${percent(one.accuracy)} correct: ${counted}. The accuracy on new images is probably from ${percent(low)} to ${percent(high)}.`;
  }

  /** What more labels would probably bring, and for which class. */
  advice() {
    const { forecast, curve, confusion } = this.store.insight;
    const last = curve.at(-1);
    if (!forecast || !last || !confusion) return "";
    const now = last[1];
    const recalls = confusion.map((row, i) => [row[i] / Math.max(1, sum(row)), i]).filter(([, i]) => sum(confusion[i]) > 4);
    const [, worst] = recalls.sort((a, b) => a[0] - b[0])[0] ?? [];
    const where = worst === undefined ? "" : ` Most mistakes are in ${this.store.classes[worst]}: label more of it.`;
    return `Another 50 labels would probably raise the accuracy from ${percent(now)} to about ${percent(forecast)}.${where}`;
  }

  /** @param {number[][]} confusion */
  table(confusion) {
    const { classes } = this.store;
    const head = element("tr", "", element("th", "Label"), ...classes.map((name) => header(name, "col")), header("Correct", "col"));
    const rows = confusion.map((row, i) => {
      const cells = row.map((count, j) => element("td", "", ...(count ? [this.cell(count, i, j)] : [])));
      return element("tr", "", header(classes[i], "row"), ...cells, element("td", sum(row) ? percent(row[i] / sum(row)) : ""));
    });
    return [element("caption", "Checked labels by predicted class. A number shows its images."), element("thead", "", head), element("tbody", "", ...rows)];
  }

  /**
   * @param {number} count
   * @param {number} label
   * @param {number} predicted
   */
  cell(count, label, predicted) {
    const cell = element("button", count.toLocaleString("en"));
    cell.type = "button";
    cell.className = label === predicted ? "right" : "confused";
    cell.setAttribute("aria-label", `${count} of ${this.store.classes[label]} predicted as ${this.store.classes[predicted]}: show them`);
    cell.addEventListener("click", () => {
      dialog("measure").close();
      this.store.show(`confused:${label}:${predicted}`);
    });
    return cell;
  }
}

/** @param {number[]} numbers */
const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);

/**
 * @param {string} text
 * @param {string} scope
 */
function header(text, scope) {
  const found = element("th", text);
  found.scope = scope;
  return found;
}
