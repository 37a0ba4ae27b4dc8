// The dialog of the accuracy: figures with their interval, each class, the confusions, and what more labels would bring.

const byId = (id) => document.getElementById(id);

/** A fraction as a percentage. */
export const percent = (fraction) => `${Math.round(100 * fraction)}%`;

export class Measure {
  constructor(store) {
    this.store = store;
    byId("measure-close").addEventListener("click", () => byId("measure").close());
  }

  show() {
    this.draw();
    byId("measure").showModal();
  }

  draw() {
    const { crossed, heldOut, confusion, curve } = this.store.insight;
    byId("measure-text").replaceChildren(
      ...[this.sentence(crossed, "checked labels, each predicted from the others (cross-validation)"), this.sentence(heldOut, "held-out images, which you labeled without a suggestion"), this.advice()]
        .filter(Boolean)
        .map((text) => element("p", text)),
    );
    byId("confusion").replaceChildren(...(confusion ? this.table(confusion) : []));
    byId("curve").replaceChildren(...curve.map(([labels, accuracy]) => this.point(labels, accuracy)));
    byId("curve-title").hidden = !curve.length;
  }

  sentence(one, what) {
    if (!one || !one.images) return "";
    const counted = `${one.right.toLocaleString("en")} of ${one.images.toLocaleString("en")} ${what}`;
    if (one.accuracy === undefined) return `${counted} are predicted correctly: too few to say how accurate the suggestions are.`;
    const [low, high] = one.interval;
    return `${percent(one.accuracy)} correct: ${counted}. The accuracy on new images is probably from ${percent(low)} to ${percent(high)}.`;
  }

  /** What more labels would probably bring, and for which class. */
  advice() {
    const { forecast, curve, confusion } = this.store.insight;
    if (!forecast) return "";
    const now = curve.at(-1)[1];
    const recalls = confusion.map((row, i) => [row[i] / Math.max(1, sum(row)), i]).filter(([, i]) => sum(confusion[i]) > 4);
    const [, worst] = recalls.sort((a, b) => a[0] - b[0])[0] ?? [];
    const where = worst === undefined ? "" : ` Most mistakes are in ${this.store.classes[worst]}: label more of it.`;
    return `Another 50 labels would probably raise the accuracy from ${percent(now)} to about ${percent(forecast)}.${where}`;
  }

  table(confusion) {
    const { classes } = this.store;
    const head = element("tr", "", element("th", "Label"), ...classes.map((name) => header(name, "col")), header("Correct", "col"));
    const rows = confusion.map((row, i) => {
      const cells = row.map((count, j) => element("td", "", ...(count ? [this.cell(count, i, j)] : [])));
      return element("tr", "", header(classes[i], "row"), ...cells, element("td", sum(row) ? percent(row[i] / sum(row)) : ""));
    });
    return [element("caption", "Checked labels by predicted class. A number shows its images."), element("thead", "", head), element("tbody", "", ...rows)];
  }

  cell(count, label, predicted) {
    const button = element("button", count.toLocaleString("en"));
    button.type = "button";
    button.className = label === predicted ? "right" : "confused";
    button.setAttribute("aria-label", `${count} of ${this.store.classes[label]} predicted as ${this.store.classes[predicted]}: show them`);
    button.addEventListener("click", () => {
      byId("measure").close();
      this.store.show(`confused:${label}:${predicted}`);
    });
    return button;
  }

  point(labels, accuracy) {
    const bar = element("span", "");
    bar.className = "bar";
    bar.style.setProperty("width", percent(accuracy));
    return element("li", "", element("span", `${labels.toLocaleString("en")} labels`), element("span", "", bar), element("span", percent(accuracy)));
  }
}

const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);

function element(name, text, ...children) {
  const found = document.createElement(name);
  found.textContent = text;
  found.append(...children);
  return found;
}

function header(text, scope) {
  const found = element("th", text);
  found.scope = scope;
  return found;
}
