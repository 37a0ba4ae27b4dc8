// Answers computed here: the network runs in a worker of this page, and no image leaves this machine.

import { Refusal } from "./refusal.js";

const MOST_BYTES = 256 * 2 ** 20;
let model = null; // model.json and preprocessing.json
let worker = null;
const waiting = new Map(); // number of a question → { resolve, reject, tell }
let questions = 0;

/** `models`: the only one; and `limits`: bytes of an image as `body`. */
export async function models() {
  const [facts, { preprocessing, classes }] = await Promise.all(["model.json", "preprocessing.json"].map(json));
  model = { ...facts, preprocessing };
  worker = new Worker("worker.js", { type: "module" });
  worker.onmessage = heard;
  worker.onerror = (event) => {
    for (const { reject } of waiting.values()) reject(new Error(event.message || "the worker did not start"));
    waiting.clear();
  };
  const known = { ...facts, classes, image_size: preprocessing.image_size, preprocessing };
  return { models: [known], limits: { body: MOST_BYTES } };
}

/** Load network and runtime before the first image asks for them. */
export function warm(tell) {
  return ask({ model }, tell);
}

/** The prediction of one image, as the server's. `tell` is called with the current activity. */
export async function predict(image, name, { top, explain, target }, tell = () => {}) {
  const { classes } = await json("preprocessing.json");
  const index = target ? classes.indexOf(target) : -1;
  const found = await ask({ image, target: index, explain: Boolean(explain), model }, tell);
  const order = [...found.probabilities.keys()].sort((a, b) => found.probabilities[b] - found.probabilities[a]);
  const first = order.slice(0, Number(top)).map((k) => ({ class: classes[k], probability: found.probabilities[k] }));
  const unknown = isUnknown(found);
  const label = unknown ? "unknown" : first[0].class;
  const prediction = { image: name, label, confidence: first[0].probability, top: first, unknown };
  if (!explain) return prediction;
  const [shown, overlay] = await Promise.all([found.image, found.overlay].map(asURL));
  const { method, note } = model.explanation;
  const explained = index < 0 ? first[0].class : target;
  prediction.explanation = { method, label: explained, note, values: [...found.map], grid: model.explanation.grid, image: shown, overlay };
  return prediction;
}

/** True for an image of no known class, by the threshold of the run. */
function isUnknown({ probabilities, energy, distance }) {
  if (!model.unknown) return false;
  const scores = { confidence: 1 - Math.max(...probabilities), energy, distance };
  return scores[model.unknown.score] > model.unknown.threshold;
}

function ask(question, tell) {
  questions += 1;
  const id = questions;
  return new Promise((resolve, reject) => {
    waiting.set(id, { resolve, reject, tell });
    worker.postMessage({ id, question });
  });
}

function heard({ data: { id, doing, answer, problem } }) {
  const { resolve, reject, tell } = waiting.get(id);
  if (doing !== undefined) {
    tell(doing);
    return;
  }
  waiting.delete(id);
  if (problem) reject(new Refusal(problem));
  else resolve(answer);
}

const read = new Map();

/** The content of a JSON file of this folder, read once. */
function json(name) {
  if (!read.has(name)) read.set(name, fetched(name));
  return read.get(name);
}

async function fetched(name) {
  let response;
  try {
    response = await fetch(name);
  } catch {
    throw new Refusal({ title: "The page is not complete", detail: `${name} cannot be loaded`, try: "load the page again" });
  }
  if (response.ok) return response.json();
  throw new Refusal({ title: "The page is not complete", detail: `${name}: ${response.status}`, try: "export it again" });
}

function asURL(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}
