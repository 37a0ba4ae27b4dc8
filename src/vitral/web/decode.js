// From an image to the input of the network, with the bytes of training (resize.js).

import { prepare } from "./resize.js";
import { orientation, upright } from "./upright.js";

/** @typedef {OffscreenCanvasRenderingContext2D} Context */
/** @typedef {{ width: number, height: number, draw: (context: Context, top?: number, scale?: number) => void, close: () => void }} Opened */

/** Open an image, a file or an ImageBitmap: its upright size and `draw(context, top, scale)`, which draws it from the
 * row `top` on, in the colors of sRGB, with white for transparent pixels. Call `close` at the end.
 * @param {Blob | ImageBitmap} image @returns {Promise<Opened>} */
export async function opened(image) {
  const file = image instanceof Blob ? image : null;
  const turn = file ? orientation(new Uint8Array(await file.arrayBuffer())) : 1;
  const bitmap = image instanceof Blob ? await bitmapOf(image, turn) : image;
  const { width, height, matrix } = upright(turn, bitmap.width, bitmap.height);
  /** @param {Context} context */
  const draw = (context, top = 0, scale = 1) => {
    context.resetTransform();
    context.fillStyle = "#fff";
    context.fillRect(0, 0, context.canvas.width, context.canvas.height);
    context.imageSmoothingEnabled = scale !== 1;
    const [a, b, c, d, e, f] = matrix.map((/** @type {number} */ one) => one * scale);
    context.setTransform(a, b, c, d, e, f - top);
    context.drawImage(bitmap, 0, 0);
  };
  return { width, height, draw, close: () => bitmap.close() };
}

/** @param {Blob} file @param {number} turn */
async function bitmapOf(file, turn) {
  try {
    return await createImageBitmap(file, {
      imageOrientation: turn ? "none" : "from-image",
      colorSpaceConversion: "default", // to sRGB, as Python converts
    });
  } catch {
    const detail = "this browser cannot read it";
    throw Object.assign(new Error(detail), {
      problem: { title: "The image cannot be read", detail, try: "a JPEG, PNG or WebP" },
    });
  }
}

/** The bytes (channels, height, width) that the network expects of an opened image.
 * @param {Opened} image @param {any} preprocessing @returns {Uint8Array} */
export function pixelsOf({ width, height, draw }, preprocessing) {
  let canvas = new OffscreenCanvas(1, 1);
  /** @param {number} top @param {number} count */
  const strip = (top, count) => {
    if (canvas.width !== width || canvas.height !== count) canvas = new OffscreenCanvas(width, count);
    const context = /** @type {Context} */ (canvas.getContext("2d", { willReadFrequently: true }));
    draw(context, top);
    return context.getImageData(0, 0, width, count).data;
  };
  return prepare(width, height, strip, preprocessing);
}

/** The input of the network, as Preprocessing.standardize.
 * @param {Uint8Array} pixels @param {any} preprocessing */
export function standardized(pixels, { mean, std, channels }) {
  const input = new Float32Array(pixels.length);
  const plane = pixels.length / channels;
  for (let c = 0; c < channels; c++) {
    const factor = Math.fround(1 / (255 * std[c]));
    const shift = Math.fround(-mean[c] / std[c]);
    for (let i = c * plane; i < (c + 1) * plane; i++) input[i] = Math.fround(pixels[i] * factor) + shift;
  }
  return input;
}

/** The bytes of an image whose answer is in model.json, to test a runtime with.
 * @param {any} preprocessing */
export function testPixels({ channels, image_size: [height, width] }) {
  return Uint8Array.from({ length: channels * height * width }, (_, i) => (i * i + 7 * i) % 251);
}
