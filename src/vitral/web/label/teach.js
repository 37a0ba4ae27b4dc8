// The dialog that trains a network on the labels: minutes, a live curve, and the accuracy beside that of the suggestions.

import * as api from "./api.js";
import { percent } from "./measure.js";

const byId = (id) => document.getElementById(id);
const PAUSE = 1000; // milliseconds between two looks at a run
const SVG = "http://www.w3.org/2000/svg", WIDTH = 400, HEIGHT = 120;

export class Teach {
  constructor(store) {
    this.store = store;
    byId("teach-open").addEventListener("click", () => this.show());
    byId("teach-close").addEventListener("click", () => byId("teach").close());
    byId("teach-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.follow(api.train(Number(byId("teach-minutes").value)));
    });
    byId("teach-stop").addEventListener("click", () => this.follow(api.stopTraining()));
  }

  show() {
    byId("teach").showModal();
    this.follow(api.training());
  }

  /** Draw the answer to a request, and look again while the run goes on. */
  async follow(asked) {
    clearTimeout(this.timer);
    try {
      const run = await asked;
      this.draw(run);
      if (run.state === "running" || run.state === "stopping") this.timer = setTimeout(() => this.follow(api.training()), PAUSE);
    } catch (error) {
      byId("teach-text").textContent = [error.message, error.hint].filter(Boolean).join(". ");
    }
  }

  draw(run) {
    const busy = run.state === "running" || run.state === "stopping";
    byId("teach-form").hidden = busy;
    byId("teach-stop").hidden = !busy;
    byId("teach-stop").disabled = run.state === "stopping";
    byId("teach-open").textContent = busy ? "Training …" : "Train";
    byId("teach-text").textContent = this.words(run);
    this.curve(run.epochs ?? []);
  }

  words(run) {
    const epochs = run.epochs?.length ?? 0, seconds = Math.round(run.seconds_left ?? 0);
    if (run.state === "running") return epochs ? `${epochs} epochs done, about ${seconds} s left.` : `Reading and timing the images, about ${seconds} s left.`;
    if (run.state === "stopping") return "The run saves itself and stops.";
    if (run.state === "stopped") return `Stopped. Go on with: ${run.next}`;
    if (run.state === "failed") return `The run failed. ${run.why}`;
    if (run.state === "done") return `${this.result(run)} The run is in ${run.run}.`;
    return "A network is trained on your labels, in a process of its own. Images that are unsure, excluded or without a label are left out.";
  }

  result(run) {
    if (run.accuracy === undefined) return "The run is done.";
    const [low, high] = run.accuracy_interval;
    const own = `The trained network is correct on ${percent(run.accuracy)} of ${run.images} held-out images (probably ${percent(low)} to ${percent(high)}).`;
    const { heldOut } = this.store.insight;
    if (heldOut?.accuracy === undefined) return own;
    const better = run.accuracy >= heldOut.accuracy ? "Use the network." : "The suggestions are better: train longer, or label more.";
    return `${own} The suggestions are correct on ${percent(heldOut.accuracy)} of ${heldOut.images}. ${better}`;
  }

  /** The validation accuracy of each epoch as a line. */
  curve(epochs) {
    const points = epochs.filter((one) => one.val_accuracy !== undefined);
    byId("teach-curve").hidden = points.length < 2;
    const line = document.createElementNS(SVG, "polyline");
    const place = ({ val_accuracy: accuracy }, i) => `${(i / Math.max(1, points.length - 1)) * WIDTH},${HEIGHT - accuracy * HEIGHT}`;
    line.setAttribute("points", points.map(place).join(" "));
    byId("teach-curve").replaceChildren(line);
    const last = points.at(-1);
    byId("teach-curve").setAttribute("aria-label", last ? `Validation accuracy by epoch, now ${percent(last.val_accuracy)}` : "");
    byId("teach-now").textContent = last ? `Validation accuracy: ${percent(last.val_accuracy)}` : "";
  }
}
