// What a person takes home: of a trained network its folder, a table of predictions, a web page, ONNX; and at any time
// a page on which other people teach the same classes.

import * as api from "./api.js";
import { byId, element } from "./dom.js";

/** @typedef {import("./api.js").Made} Made */

/** Kind → [what the button makes, what it is for]. */
const KINDS = {
  table: ["Table of predictions", "for the images without a label"],
  web: ["Web page", "on which the network runs in the browser of a visitor"],
  onnx: ["ONNX", "for other programs"],
  teach: ["Teaching page", "on which other people teach these classes with their own images"],
};
const WITHOUT_RUN = "teach";

export class Home {
  /** @param {(asked: Promise<import("./api.js").Training>) => void} follow draws the answer to a request. */
  constructor(follow) {
    this.follow = follow;
  }

  /** @param {import("./api.js").Training} run */
  draw(run) {
    byId("home-trained").hidden = !run.finished;
    byId("home-run").textContent = run.finished;
    const focused = document.activeElement?.getAttribute("data-kind");
    const kinds = Object.entries(KINDS).filter(([kind]) => run.finished || kind === WITHOUT_RUN);
    byId("home-list").replaceChildren(...kinds.map(([kind, words]) => this.row(kind, words, run.home[kind])));
    const again = focused && byId("home-list").querySelector(`[data-kind="${focused}"]`);
    if (again instanceof HTMLElement) again.focus();
  }

  /**
   * @param {string} kind
   * @param {string[]} words
   * @param {Made} made
   */
  row(kind, [name, use], made) {
    const make = element("button", name);
    make.type = "button";
    make.dataset.kind = kind;
    if (made.state === "running") make.setAttribute("aria-disabled", "true");
    make.addEventListener("click", () => made.state !== "running" && this.follow(api.make(kind)));
    return element("li", "", make, element("span", this.words(made) || use));
  }

  /** @param {Made} made */
  words(made) {
    if (made.state === "running") return "Being made …";
    if (made.state === "failed") return `Failed: ${made.why}`;
    if (made.state !== "done") return "";
    return [`It is in ${made.path}.`, made.next && `Open it with: ${made.next}`, made.note].filter(Boolean).join(" ");
  }
}
