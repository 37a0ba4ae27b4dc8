// The dialog that trains a network on the labels: minutes, the plan, a live curve, and the accuracy beside that of the
// suggestions.

import * as api from "./api.js";
import { button, byId, dialog, element, input, svg } from "./dom.js";
import { Home } from "./home.js";
import { percent } from "./measure.js";

const PAUSE = 1000; // milliseconds between two looks at a run
const SVG = "http://www.w3.org/2000/svg", WIDTH = 400, HEIGHT = 120;

/** @typedef {import("./api.js").Training} Training */

export class Teach {
  /** @param {import("./store.js").Store} store */
  constructor(store) {
    this.store = store;
    this.asked = 0; // number of the last request: an older answer that comes late is not drawn
    this.planned = 0; // minutes of the plan that is shown
    this.home = new Home((asked) => this.follow(asked));
    button("teach-open").addEventListener("click", () => this.show());
    button("teach-close").addEventListener("click", () => dialog("teach").close());
    byId("teach-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.drawPlan(undefined);
      this.follow(api.plan(this.minutes));
    });
    input("teach-minutes").addEventListener("input", () => this.drawPlan(undefined)); // it is of other minutes
    button("teach-start").addEventListener("click", () => this.follow(api.train(this.planned)));
    button("teach-stop").addEventListener("click", () => this.follow(api.stopTraining()));
  }

  get minutes() {
    return Number(input("teach-minutes").value);
  }

  show() {
    dialog("teach").showModal();
    this.follow(api.training());
  }

  /**
   * Draw the answer to a request, and look again while something is under way.
   * @param {Promise<Training>} asked
   */
  async follow(asked) {
    clearTimeout(this.timer);
    const number = ++this.asked;
    try {
      const run = await asked;
      if (number !== this.asked) return;
      this.draw(run);
      const made = Object.values(run.home).some((one) => one.state === "running");
      const busy = made || ["planning", "running", "stopping"].includes(run.state);
      if (busy) this.timer = setTimeout(() => this.follow(api.training()), PAUSE);
    } catch (error) {
      byId("teach-text").textContent = api.wordsOf(error);
    }
  }

  /** @param {Training} run */
  draw(run) {
    const busy = run.state === "running" || run.state === "stopping";
    this.planned = run.minutes ?? 0;
    const typing = document.activeElement === input("teach-minutes");
    if (run.state === "planned" && !typing) input("teach-minutes").value = String(run.minutes);
    byId("teach-form").hidden = busy;
    button("teach-make-plan").disabled = run.state === "planning";
    byId("teach-stop").hidden = !busy;
    button("teach-stop").disabled = run.state === "stopping";
    button("teach-open").textContent = busy ? "Training …" : "Train";
    const words = this.words(run);
    if (byId("teach-text").textContent !== words) byId("teach-text").textContent = words; // it is spoken
    this.drawPlan(run.plan);
    this.curve(run.epochs ?? []);
    this.home.draw(run);
  }

  /** @param {import("./api.js").Choice[] | undefined} choices */
  drawPlan(choices) {
    byId("teach-plan").hidden = byId("teach-start").hidden = !choices;
    if (!choices) return;
    const heads = ["Choice", "Value", "Why"].map((name) => element("th", name));
    for (const head of heads) head.scope = "col";
    const rows = choices.map(({ name, value, reason }) => {
      const head = element("th", name);
      head.scope = "row";
      return element("tr", "", head, element("td", value), element("td", reason));
    });
    byId("teach-choices").replaceChildren(element("thead", "", element("tr", "", ...heads)), element("tbody", "", ...rows));
  }

  /** @param {Training} run */
  words(run) {
    const epochs = run.epochs?.length ?? 0, seconds = Math.round(run.seconds_left ?? 0);
    if (run.state === "planning") return "vitral looks at the images and plans the training.";
    if (run.state === "planned") return `This is the plan for ${run.minutes} minutes. Press Start to train with it.`;
    if (run.state === "running") return epochs ? `${epochs} epochs done, about ${seconds} s left.` : `Reading and timing the images, about ${seconds} s left.`;
    if (run.state === "stopping") return "The run saves itself and stops.";
    if (run.state === "stopped") return `Stopped. Go on with: ${run.next}`;
    if (run.state === "failed") return `It failed. ${run.why}`;
    if (run.state === "done") return this.result(run);
    return "A network is trained on your labels, in a process of its own. Images that are unsure, excluded or without a label are left out.";
  }

  /** @param {Training} run */
  result(run) {
    if (run.accuracy === undefined || !run.accuracy_interval) return "The run is done.";
    const [low, high] = run.accuracy_interval;
    const own = `The trained network is correct on ${percent(run.accuracy)} of ${run.images} held-out images (probably ${percent(low)} to ${percent(high)}).`;
    const { heldOut } = this.store.insight;
    if (heldOut?.accuracy === undefined) return own;
    const better = run.accuracy >= heldOut.accuracy ? "Use the network." : "The suggestions are better: train longer, or label more.";
    return `${own} The suggestions are correct on ${percent(heldOut.accuracy)} of ${heldOut.images}. ${better}`;
  }

  /**
   * The validation accuracy of each epoch as a line.
   * @param {import("./api.js").Epoch[]} epochs
   */
  curve(epochs) {
    const points = epochs.flatMap((one) => (one.val_accuracy === undefined ? [] : [one.val_accuracy]));
    const drawing = svg("teach-curve"), last = points.at(-1);
    drawing.toggleAttribute("hidden", points.length < 2);
    const line = document.createElementNS(SVG, "polyline");
    const places = points.map((accuracy, i) => `${(i / Math.max(1, points.length - 1)) * WIDTH},${HEIGHT - accuracy * HEIGHT}`);
    line.setAttribute("points", places.join(" "));
    drawing.replaceChildren(line);
    drawing.setAttribute("aria-label", last === undefined ? "" : `Validation accuracy by epoch, now ${percent(last)}`);
    byId("teach-now").textContent = last === undefined ? "" : `Validation accuracy: ${percent(last)}`;
  }
}
