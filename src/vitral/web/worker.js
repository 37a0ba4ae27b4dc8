// Compute predictions and heat maps off the page's thread, in ONNX Runtime Web: WebGPU where there is one, else
// WebAssembly.

import { enlarged, overlay } from "./overlay.js";
import { prepare } from "./resize.js";
import { orientation, upright } from "./upright.js";

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
  ready ||= start(model, tell).catch((error) => {
    ready = null; // the next question tries again
    throw error;
  });
  const { session } = await ready;
  if (!image) return {}; // only to be ready
  const pixels = await decode(image, model.preprocessing);
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
  const { mean, std, channels, image_size: size } = preprocessing;
  const input = new Float32Array(pixels.length);
  const plane = pixels.length / channels;
  for (let c = 0; c < channels; c++) {
    const factor = Math.fround(1 / (255 * std[c]));
    const shift = Math.fround(-mean[c] / std[c]);
    for (let i = c * plane; i < (c + 1) * plane; i++) input[i] = Math.fround(pixels[i] * factor) + shift;
  }
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

// ---- the runtime

async function start(model, tell) {
  const bytes = await load("model.onnx", "the network", tell);
  if (await hasGPU()) {
    try {
      return await open("webgpu", model, bytes, tell);
    } catch (error) {
      console.info(`WebGPU is not used: ${error.message}`);
    }
  }
  return open("wasm", model, bytes, tell);
}

async function hasGPU() {
  try {
    return Boolean(await navigator.gpu?.requestAdapter());
  } catch {
    return false;
  }
}

const PROGRAM = { wasm: "ort-wasm-simd-threaded.wasm", webgpu: "ort-wasm-simd-threaded.asyncify.wasm" };

async function open(runtime, model, bytes, tell) {
  const name = `runtime/ort.${runtime}.bundle.min.js`;
  const ort = await import(`./${name}`).catch(() => {
    throw incomplete(`${name} cannot be loaded`);
  });
  ort.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(navigator.hardwareConcurrency || 1, 8) : 1;
  ort.env.logLevel = "error";
  // Fetched here, since browsers complain of hosts that do not know the type of .wasm.
  ort.env.wasm.wasmBinary = (await load(`runtime/${PROGRAM[runtime]}`, "its runtime", tell)).buffer;
  tell("Starting the network …");
  const session = await ort.InferenceSession.create(bytes, { executionProviders: [runtime], logSeverityLevel: 3 });
  session.ort = ort;
  await check(session, model);
  return { session, runtime };
}

/** Compute an image whose probabilities are known: a driver that computes something else is not used. */
async function check(session, model) {
  const { channels, image_size: size } = model.preprocessing;
  const pixels = Uint8Array.from({ length: channels * size[0] * size[1] }, (_, i) => (i * i + 7 * i) % 251);
  const { probabilities } = await run(session, model, pixels, -1);
  const difference = model.check.reduce((most, wanted, k) => Math.max(most, Math.abs(wanted - probabilities[k])), 0);
  if (!(difference < CLOSE)) throw new Error(`it computes something else than the network that was exported`);
}

async function load(name, what, tell) {
  const response = await fetch(new URL(name, import.meta.url)).catch(() => {
    throw incomplete(`${name} cannot be loaded`);
  });
  if (!response.ok) throw incomplete(`${name}: the server answered ${response.status}`);
  const total = Number(response.headers.get("Content-Length")) || 0;
  const parts = [];
  let received = 0;
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    received += value.length;
    // Compressed by the server, the file is longer than its Content-Length.
    const of = received <= total ? ` of ${megabytes(total)}` : "";
    tell(`Loading ${what}: ${megabytes(received)}${of} …`);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)}\u202fMB`;

function incomplete(detail) {
  const problem = { title: "The page is not complete", detail, try: "check the connection, and load the page again" };
  return Object.assign(new Error(detail), { problem });
}

// ---- images

/** Decode an image: upright, in the colors of sRGB, transparent pixels on white. */
async function decode(file, preprocessing) {
  const turn = orientation(new Uint8Array(await file.arrayBuffer()));
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, {
      imageOrientation: turn ? "none" : "from-image",
      colorSpaceConversion: "default", // to sRGB, as Python converts
    });
  } catch {
    const detail = "this browser cannot read it";
    throw Object.assign(new Error(detail), {
      problem: { title: "The image cannot be read", detail, try: "a JPEG, PNG or WebP" },
    });
  }
  const { width, height, matrix } = upright(turn, bitmap.width, bitmap.height);
  let canvas;
  const strip = (top, count) => {
    if (canvas?.height !== count) canvas = new OffscreenCanvas(width, count);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.resetTransform();
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, count);
    context.imageSmoothingEnabled = false;
    context.setTransform(...matrix.slice(0, 5), matrix[5] - top);
    context.drawImage(bitmap, 0, 0);
    return context.getImageData(0, 0, width, count).data;
  };
  const pixels = prepare(width, height, strip, preprocessing);
  bitmap.close();
  return pixels;
}

function png({ data, width, height }) {
  const canvas = new OffscreenCanvas(width, height);
  canvas.getContext("2d").putImageData(new ImageData(data, width, height), 0, 0);
  return canvas.convertToBlob({ type: "image/png" });
}
