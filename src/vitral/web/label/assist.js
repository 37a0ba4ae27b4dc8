// The bar above the grid: progress of the features, suggestions to accept, and orders. And the page of the accuracy.

import { button, byId, dialog, progress as bar, select } from "./dom.js";
import { ORDERS } from "./insight.js";
import { Measure, percent } from "./measure.js";

export class Assist {
  /**
   * @param {import("./store.js").Store} store
   * @param {{ accept: (images: number[]) => void }} calls accepts the suggestions of images.
   */
  constructor(store, { accept }) {
    this.store = store;
    this.accept = accept;
    this.measure = new Measure(store);
    const order = select("order");
    order.replaceChildren(...Object.entries(ORDERS).map(([key, name]) => new Option(name, key)));
    order.addEventListener("change", () => this.setOrder(order.value));
    button("accept").addEventListener("click", () => this.accept(this.sure()));
    button("measure-open").addEventListener("click", () => this.measure.show());
    store.addEventListener("change", () => this.draw());
    store.addEventListener("view", () => this.draw());
  }

  /** @param {string} order a key of ORDERS */
  setOrder(order) {
    this.store.order = order;
    select("order").value = order;
    this.store.refresh();
  }

  /** Images whose suggestion is above 95%, of those that are shown. */
  sure() {
    return this.store.shown.filter((i) => this.store.isSure(i));
  }

  draw() {
    const { insight } = this.store;
    if (!this.store.names.length) return;
    this.drawProgress(insight.progress);
    const sure = this.sure().length, [right, count] = insight.sure;
    const accuracy = count ? `${right} of ${count} such suggestions were right in cross-validation.` : "Not yet tried in cross-validation.";
    byId("accept").hidden = !sure;
    byId("accept").textContent = `Accept ${sure.toLocaleString("en")} above 95%`;
    byId("accept-note").textContent = sure ? accuracy : this.hint();
    byId("measure-open").textContent = this.accuracy();
    button("measure-open").disabled = !insight.crossed && !insight.heldOut;
    if (dialog("measure").open) this.measure.draw();
  }

  /** @param {import("./api.js").Progress | undefined} progress */
  drawProgress(progress) {
    const busy = progress && !progress.problem && progress.done < progress.total;
    byId("progress").hidden = !busy && !progress?.problem;
    byId("progress-bar").hidden = !busy;
    if (!progress) return;
    bar("progress-bar").max = progress.total;
    bar("progress-bar").value = progress.done;
    const left = progress.seconds_left === null ? "" : `, ${duration(progress.seconds_left)} left`;
    const done = `${progress.done.toLocaleString("en")} of ${progress.total.toLocaleString("en")}`;
    byId("progress-text").textContent = progress.problem ? `No suggestions: ${progress.problem}` : `Comparing images: ${done}${left}`;
  }

  hint() {
    const { insight, shown } = this.store;
    if (this.store.filter === "held") return "Label these images without a suggestion: they measure how good the suggestions are.";
    if (insight.suggested.some((one) => one >= 0)) return shown.some((i) => this.store.suggestionFor(i)) ? "Enter accepts the suggestion of an image." : "";
    return "Label three images of two classes, and the others get suggestions.";
  }

  accuracy() {
    const { crossed, heldOut } = this.store.insight;
    const best = heldOut?.accuracy === undefined ? crossed : heldOut;
    if (!best) return "Accuracy: no labels yet";
    return best.accuracy === undefined ? "Accuracy: too few to say" : `Accuracy ${percent(best.accuracy)}`;
  }
}

/** @param {number} seconds */
function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  return `${Math.round(seconds / 60)} min`;
}
