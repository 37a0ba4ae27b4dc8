// The accuracy, as `vitral label` measures it: each image is predicted by a fit to the others.

import { at, counted, element, percent } from "./elements.js";
import { FOR_ADVICE } from "./figures.js";

/** The sentence on the accuracy.
 * @param {import("./figures.js").Accuracy} crossed */
export function sentence(crossed) {
  const { images, groups, right, accuracy, interval } = crossed;
  if (!images) return "Nothing is measured yet: each class needs several images.";
  const copies = groups < images ? ` (${groups.toLocaleString("en")} without near-duplicates)` : "";
  const found = `${right.toLocaleString("en")} of ${counted(images, "image")}${copies}`;
  if (accuracy === undefined || !interval) return `${found} are predicted correctly, each from the others. That is too few to say how accurate it is: at least ${FOR_ADVICE} images are needed.`;
  const [low, high] = interval;
  return `${percent(accuracy)} correct: ${found}, each predicted from the others (cross-validation). The accuracy on new images of this kind is probably from ${percent(low)} to ${percent(high)}.`;
}

/** @param {import("./main.js").Measured | null} head @param {string[]} classes */
export function drawMeasure(head, classes) {
  const known = head?.bias.length === classes.length ? head : null;
  at("measure-text").textContent = known ? sentence(known.crossed) : "Nothing is measured yet.";
  at("measure-table").hidden = !known?.crossed.images;
  if (!known) return;
  const caption = element("caption", { textContent: "Images by class, and the class that is predicted for them" });
  const top = element("tr", {}, cell("th", "Class", "col"), ...classes.map((name) => cell("th", name, "col")), cell("th", "Correct", "col"));
  const rows = known.confusion.map((row, k) => {
    const total = row.reduce((a, b) => a + b, 0);
    const cells = row.map((count, j) => cell("td", count ? count.toLocaleString("en") : "", "", count && j !== k ? "confused" : ""));
    return element("tr", {}, cell("th", classes[k], "row"), ...cells, cell("td", total ? percent(row[k] / total) : ""));
  });
  at("measure-table").replaceChildren(caption, element("thead", {}, top), element("tbody", {}, ...rows));
}

/** @param {string} kind @param {string} text @param {string} scope @param {string} className */
function cell(kind, text, scope = "", className = "") {
  return element(kind, { textContent: text, className, ...(scope ? { scope } : {}) });
}
