// A worker that turns an image into features and a thumbnail.

import { opened, pixelsOf, standardized, testPixels } from "./decode.js";
import { lookOf } from "./near.js";
import { start } from "./runtime.js";

const CLOSE = 1e-3; // largest difference of the check's features, relative to the largest one
const SIDE = 160; // pixels of a thumbnail, along its longer side
const LEAST_SIDE = 32; // pixels; a smaller image has too little detail to be compared
/** A promise of the session.
 * @type {Promise<{ session: any }> | null} */
let ready = null;

/** @typedef {import("./store.js").Model} Model */

self.onmessage = async ({ data: { id, question } }) => {
  try {
    self.postMessage({ id, answer: await answer(question, (/** @type {string} */ text) => self.postMessage({ id, doing: text })) });
  } catch (error) {
    const { problem } = /** @type {any} */ (error);
    self.postMessage({ id, problem: problem || { title: "The network failed", detail: String(error), try: "load the page again" } });
  }
};

/** @param {{ image?: Blob | ImageBitmap, model: Model, small?: boolean }} question @param {(text: string) => void} tell */
async function answer({ image, model, small }, tell) {
  ready ||= start((/** @type {any} */ session) => check(session, model), tell).catch((/** @type {unknown} */ error) => {
    ready = null; // the next question tries again
    throw error;
  });
  const { session } = await ready;
  if (!image) return {}; // only to be ready
  const file = await opened(image);
  try {
    const pixels = pixelsOf(file, model.preprocessing);
    const features = await featuresOf(session, model, pixels);
    if (!small) return { features };
    const { channels, image_size: size } = model.preprocessing;
    const look = Math.min(file.width, file.height) < LEAST_SIDE ? null : lookOf(pixels, channels, size);
    return { features, look, thumbnail: await thumbnailOf(file) };
  } finally {
    file.close();
  }
}

/** @param {any} session @param {Model} model @param {Uint8Array} pixels @returns {Promise<Float32Array>} */
async function featuresOf(session, { preprocessing }, pixels) {
  const { channels, image_size: size } = preprocessing;
  const images = new session.ort.Tensor("float32", standardized(pixels, preprocessing), [1, channels, ...size]);
  return Float32Array.from((await session.run({ images })).features.data);
}

/** Compute an image whose features are known: a driver that computes something else is not used.
 * @param {any} session @param {Model} model */
async function check(session, model) {
  const found = await featuresOf(session, model, testPixels(model.preprocessing));
  const largest = model.check.reduce((most, one) => Math.max(most, Math.abs(one)), 0);
  const difference = model.check.reduce((most, wanted, k) => Math.max(most, Math.abs(wanted - found[k])), 0);
  if (!(difference <= CLOSE * largest)) throw new Error("it computes something else than the network that was exported");
}

/** The bytes of a small JPEG.
 * @param {import("./decode.js").Opened} image */
async function thumbnailOf({ width, height, draw }) {
  const scale = Math.min(1, SIDE / Math.max(width, height));
  const canvas = new OffscreenCanvas(Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale)));
  draw(/** @type {OffscreenCanvasRenderingContext2D} */ (canvas.getContext("2d")), 0, scale);
  const blob = await canvas.convertToBlob({ type: "image/jpeg", quality: 0.85 });
  return new Uint8Array(await blob.arrayBuffer());
}
