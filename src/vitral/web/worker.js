// Compute predictions and heat maps off the page's thread.

import { opened, pixelsOf, standardized, testPixels } from "./decode.js";
import { enlarged, overlay } from "./overlay.js";
import { start } from "./runtime.js";

const CLOSE = 1e-3; // largest difference of the check's probabilities
let ready = null; // promise of { session, runtime }

self.onmessage = async ({ data: { id, question } }) => {
  try {
    self.postMessage({ id, answer: await answer(question, (text) => self.postMessage({ id, doing: text })) });
  } catch (error) {
    self.postMessage({ id, problem: error.problem || { title: "The network failed", detail: String(error), try: "load the page again" } });
  }
};

async function answer({ image, target, explain, model }, tell) {
  ready ||= start((session) => check(session, model), tell).catch((error) => {
    ready = null; // the next question tries again
    throw error;
  });
  const { session } = await ready;
  if (!image) return {}; // only to be ready
  const file = await opened(image);
  const pixels = pixelsOf(file, model.preprocessing);
  file.close();
  tell(null);
  const { map, ...found } = await run(session, model, pixels, explain ? target : -1);
  if (!explain) return found;
  const { preprocessing, explanation } = model;
  const shown = enlarged(pixels, preprocessing.image_size, preprocessing.channels, explanation.style);
  const drawn = overlay(shown, map, explanation.grid, explanation.style);
  return { ...found, map, image: await png(shown), overlay: await png(drawn) };
}

/** Probabilities (K,), energy of the logits, distance of the features and heat map of one prepared image; `target` −1 is the predicted class. */
async function run(session, { preprocessing, explanation, temperature }, pixels, target) {
  const ort = session.ort;
  const { channels, image_size: size } = preprocessing;
  const input = standardized(pixels, preprocessing);
  const given = { images: new ort.Tensor("float32", input, [1, channels, ...size]) };
  if (explanation) given.target = new ort.Tensor("float32", Float32Array.of(target), [1]);
  const found = await session.run(given);
  const logits = found.logits.data;
  const { powers, sum } = exponentials(logits, temperature);
  return { probabilities: powers.map((one) => one / sum), energy: energyOf(logits), distance: found.distance?.data[0], map: found.map?.data };
}

/** exp(logits / temperature), their sum, and the largest logit `most`, which they are divided by. */
function exponentials(logits, temperature) {
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const powers = Float64Array.from(logits, (one) => Math.exp((one - most) / temperature));
  return { powers, most, sum: powers.reduce((a, b) => a + b, 0) };
}

/** -log Σ exp(logits), as src/vitral/inference/unknown.py. */
function energyOf(logits) {
  const { most, sum } = exponentials(logits, 1);
  return -most - Math.log(sum);
}

/** Compute an image whose probabilities are known: a driver that computes something else is not used. */
async function check(session, model) {
  const { probabilities } = await run(session, model, testPixels(model.preprocessing), -1);
  const difference = model.check.reduce((most, wanted, k) => Math.max(most, Math.abs(wanted - probabilities[k])), 0);
  if (!(difference < CLOSE)) throw new Error(`it computes something else than the network that was exported`);
}

function png({ data, width, height }) {
  const canvas = new OffscreenCanvas(width, height);
  canvas.getContext("2d").putImageData(new ImageData(data, width, height), 0, 0);
  return canvas.convertToBlob({ type: "image/png" });
}
