// Requests to the server of vitral label. The token comes in the address and is kept for this tab alone.

/**
 * @typedef {{ images: number, groups: number, right: number, accuracy?: number, interval?: [number, number] }} Accuracy
 *
 * @typedef {object} Progress Images whose features are computed, of all.
 * @property {number} done
 * @property {number} total
 * @property {number | null} seconds_left
 * @property {string} problem the reason why there are no suggestions; "" for none
 *
 * @typedef {object} Insight What the features say; lists have an entry for each image. See insight.py.
 * @property {number} number
 * @property {Progress} progress
 * @property {number[]} groups
 * @property {number[]} held
 * @property {number[]} suggested
 * @property {number[]} percent
 * @property {number[]} doubt
 * @property {number[]} unlike
 * @property {number[]} next
 * @property {[number, number]} sure
 * @property {[number, number][]} curve
 * @property {number | null} forecast
 * @property {Accuracy | null} crossed
 * @property {Accuracy | null} held_out
 * @property {number[][]} [confusion]
 *
 * @typedef {object} Delta What changed since a version. See view.py.
 * @property {number} version
 * @property {string[]} classes
 * @property {number[]} numbers
 * @property {number[]} labels
 * @property {number[]} checked
 * @property {string} undo
 * @property {string} redo
 * @property {string} table
 * @property {string[]} notes
 * @property {Insight} [insight]
 *
 * @typedef {Delta & { title: string, names: string[], given: number[], given_names: string[], missing: number[] }} Whole
 *
 * @typedef {object} Action
 * @property {string} do
 * @property {number[]} [images]
 * @property {string} [label]
 * @property {string[]} [labels]
 * @property {string} [name]
 *
 * @typedef {{ name: string, value: string, reason: string }} Choice
 * @typedef {{ epoch: number, train_loss?: number, val_accuracy?: number }} Epoch
 * @typedef {{ state: string, path?: string, next?: string, note?: string, why?: string }} Made
 *
 * @typedef {object} Training The plan, or the run, that was asked for last. See teach.py.
 * @property {"none" | "planning" | "planned" | "running" | "stopping" | "stopped" | "failed" | "done"} state
 * @property {string} finished folder of the last run with a result; "" for none
 * @property {Record<string, Made>} home
 * @property {number} [minutes]
 * @property {Choice[]} [plan]
 * @property {Epoch[]} [epochs]
 * @property {number} [seconds_left]
 * @property {string} [next]
 * @property {string} [why]
 * @property {number} [accuracy]
 * @property {[number, number]} [accuracy_interval]
 * @property {number} [images]
 *
 * @typedef {object} Answer
 * @property {{ class: string, probability: number }[]} top
 * @property {boolean} [unknown]
 * @property {number[]} neighbors
 * @property {{ label: string, image: string, overlay: string } | null} explanation
 */

const KEY = "vitral-label-token";

/** Take the token out of the address, where it would stay in the history. */
export function takeToken() {
  const token = location.hash.slice(1);
  if (token.length > 20) {
    sessionStorage.setItem(KEY, token);
    history.replaceState(null, "", location.pathname);
  }
}

/** A request that was refused: `title`, `detail` and `hint` for a person, `status` for programs; 0 without an answer. */
export class Refusal extends Error {
  /** @param {{ title?: string, detail?: string, try?: string, status: number }} problem */
  constructor(problem) {
    super([problem.title, problem.detail].filter(Boolean).join(": "));
    this.hint = problem.try || "";
    this.status = problem.status;
  }
}

/**
 * The words for a person about a request that failed.
 * @param {unknown} error
 */
export function wordsOf(error) {
  if (error instanceof Refusal) return [error.message, error.hint].filter(Boolean).join(". ");
  return String(error);
}

/**
 * @param {string} path
 * @param {RequestInit} options
 */
async function ask(path, options = {}) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(KEY) || ""}`, ...options.headers };
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Refusal({ title: "The server does not answer", try: "start vitral label again; your labels are saved", status: 0 });
  }
  if (response.ok) return response;
  const type = response.headers.get("Content-Type") || "";
  const problem = type.startsWith("application/problem+json") ? await response.json() : { title: `The server answered ${response.status}` };
  throw new Refusal({ ...problem, status: response.status });
}

/**
 * @param {string} path
 * @param {object} plain
 */
async function post(path, plain) {
  return (await ask(path, { method: "POST", body: JSON.stringify(plain), headers: { "Content-Type": "application/json" } })).json();
}

/**
 * Everything: names of the images, classes and marks.
 * @returns {Promise<Whole>}
 */
export async function state() {
  return (await ask("v1/state")).json();
}

/**
 * What changed since a version; the answer waits until there is something.
 * @param {number} version
 * @param {number} insight
 * @returns {Promise<Delta>}
 */
export async function changes(version, insight) {
  return (await ask(`v1/changes?since=${version}&insight=${insight}`)).json();
}

/**
 * All images, the most similar to one first.
 * @param {number} number
 * @returns {Promise<{ order: number[] }>}
 */
export async function similar(number) {
  return (await ask(`v1/images/${number}/similar`)).json();
}

/**
 * The nearest images of the label of an image, `own`, and of the class that is suggested for it, `other`.
 * @param {number} number
 * @returns {Promise<{ own: number[], other: number[] }>}
 */
export async function neighbors(number) {
  return (await ask(`v1/images/${number}/neighbors`)).json();
}

/**
 * Apply an action: `do`, and `images`, `label`, `labels`, `name` where it needs them.
 * @param {Action} action
 * @param {number} version
 * @returns {Promise<Delta>}
 */
export async function act(action, version) {
  return post("v1/actions", { ...action, version });
}

/**
 * The run that was started last.
 * @returns {Promise<Training>}
 */
export async function training() {
  return (await ask("v1/training")).json();
}

/**
 * Plan a run of some minutes.
 * @param {number} minutes
 * @returns {Promise<Training>}
 */
export async function plan(minutes) {
  return post("v1/plan", { minutes });
}

/**
 * Start a run of some minutes.
 * @param {number} minutes
 * @returns {Promise<Training>}
 */
export async function train(minutes) {
  return post("v1/training", { minutes });
}

/**
 * Make something of the finished run: a table, a page (web) or onnx.
 * @param {string} kind
 * @returns {Promise<Training>}
 */
export async function make(kind) {
  return post("v1/home", { kind });
}

/**
 * The answer for an image that is not of the data; `by` is suggestions or run.
 * @param {Blob} image
 * @param {string} by
 * @returns {Promise<Answer>}
 */
export async function answer(image, by) {
  const headers = { "Content-Type": image.type.startsWith("image/") ? image.type : "application/octet-stream" };
  return (await ask(`v1/answer?by=${by}`, { method: "POST", body: image, headers })).json();
}

/**
 * Ask the run to save itself and end.
 * @returns {Promise<Training>}
 */
export async function stopTraining() {
  return (await ask("v1/training", { method: "DELETE" })).json();
}

/** End the server. */
export async function finish() {
  return (await ask("v1/finish", { method: "POST" })).json();
}

/**
 * An image as a blob; `size` is small or large.
 * @param {number} number
 * @param {"small" | "large"} size
 * @param {AbortSignal} [signal]
 */
export async function image(number, size, signal) {
  return (await ask(`v1/images/${number}/${size}`, { signal })).blob();
}
