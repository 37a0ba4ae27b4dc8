// Preprocessing in whole numbers: the bytes that training resizes to.
//
// PyTorch resizes bytes as sums of pixels times rounded weights, first along rows, then along columns; each pass rounds
// to a byte. src/vitral/export/graph.py has the same arithmetic for an ONNX graph.

/** @typedef {{ support: number, weight: (distance: number) => number }} Filter */
/** @typedef {{ first: number, weights: Float64Array }} Tap of one result: its first pixel, and the weights from there. */
/** @typedef {{ taps: (Tap | null)[], unit: number }} Axis */
/** @typedef {{ size: number, start: number }} Placed */
/** @typedef {{ image_size: [number, number], channels: number, interpolation: string, resize: string, center: string,
 *   resize_size: [number, number] | null, crop_fraction: number, mean: number[] }} Preprocessing */
/** @typedef {Uint8ClampedArray | Uint8Array} Bytes */

/** @param {number} x */
const cubic = (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0);
/** @param {number} x */
const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));

/** Interpolation → half of its width, in pixels of the smaller image, and the weight at a distance.
 * @type {Record<string, Filter>} */
export const FILTERS = {
  bilinear: { support: 1, weight: (x) => Math.max(1 - x, 0) },
  bicubic: { support: 2, weight: cubic },
  lanczos: { support: 3, weight: (x) => (x < 3 ? sinc(x) * sinc(x / 3) : 0) },
};

/** Weights that resize an axis from `length` to `size` pixels: for each result from `start` on the first pixel and the
 * weights from there, which sum to 1; null outside of the image.
 * @param {number} length @param {number} size @param {number} start @param {number} wanted @param {Filter} filter
 * @returns {(Tap | null)[]} */
export function weights(length, size, start, wanted, { support, weight }) {
  const scale = length / size;
  const stretch = Math.max(scale, 1);
  return Array.from({ length: wanted }, (_, i) => {
    const row = start + i;
    if (row < 0 || row >= size) return null;
    const center = scale * (row + 0.5);
    const first = Math.max(Math.floor(center - support * stretch + 0.5), 0);
    const end = Math.min(Math.floor(center + support * stretch + 0.5), length);
    const found = new Float64Array(end - first);
    for (let k = first; k < end; k++) found[k - first] = weight(Math.abs((k - center + 0.5) * (1 / stretch)));
    const sum = found.reduce((a, b) => a + b, 0);
    return { first, weights: found.map((one) => one / sum) };
  });
}

/** The uint8 (channels, height, width) that the network expects, of an image of `width` × `height` pixels.
 * `strip(top, count)` gives RGBA of some rows: a large photograph is never in memory as a whole.
 * @param {number} width @param {number} height @param {(top: number, count: number) => Bytes} strip
 * @param {Preprocessing} preprocessing */
export function prepare(width, height, strip, preprocessing) {
  const [tall, wide] = preprocessing.image_size;
  const { channels } = preprocessing;
  const [rows, columns] = placed(preprocessing, height, width);
  const filter = FILTERS[preprocessing.interpolation];
  const across = inUnits(width, columns, wide, filter);
  const down = inUnits(height, rows, tall, filter);
  const narrow = alongRows(width, height, strip, channels, across, used(down.taps));
  return alongColumns(narrow, preprocessing, down, across.taps);
}

/** @param {number} width @param {number} height @param {(top: number, count: number) => Bytes} strip
 * @param {number} channels @param {Axis} across @param {{ first: number, end: number }} rows */
function alongRows(width, height, strip, channels, { taps, unit }, { first, end }) {
  const wide = taps.length;
  const planes = Array.from({ length: channels }, () => new Uint8Array((end - first) * wide));
  const most = Math.max(1, Math.floor(2 ** 20 / width));
  for (let top = first; top < end; top += most) {
    const count = Math.min(most, end - top);
    const rgba = strip(top, count);
    if (channels === 1) toGray(rgba);
    for (let y = 0; y < count; y++) {
      for (let x = 0; x < wide; x++) {
        const tap = taps[x];
        if (!tap) continue;
        const of = tap.weights;
        for (let c = 0; c < channels; c++) {
          let sum = 0;
          const at = (y * width + tap.first) * 4 + c;
          for (let k = 0; k < of.length; k++) sum += of[k] * rgba[at + 4 * k];
          planes[c][(top - first + y) * wide + x] = toByte(sum, unit);
        }
      }
    }
  }
  return { planes, first, wide };
}

/** @param {{ planes: Uint8Array[], first: number, wide: number }} narrow @param {Preprocessing} preprocessing
 * @param {Axis} down @param {(Tap | null)[]} columns */
function alongColumns({ planes, first, wide }, { channels, resize, mean }, { taps, unit }, columns) {
  const tall = taps.length;
  const result = new Uint8Array(channels * tall * wide);
  for (let c = 0; c < channels; c++) {
    const fill = resize === "letterbox" ? Math.min(Math.max(even(255 * mean[c]), 0), 255) : 0;
    for (let y = 0; y < tall; y++) {
      const tap = taps[y];
      for (let x = 0; x < wide; x++) {
        let value = fill;
        if (tap && columns[x]) {
          let sum = 0;
          let at = (tap.first - first) * wide + x;
          for (const weight of tap.weights) {
            sum += weight * planes[c][at];
            at += wide;
          }
          value = toByte(sum, unit);
        }
        result[(c * tall + y) * wide + x] = value;
      }
    }
  }
  return result;
}

/** Weights as whole numbers, of which `unit` represents 1: the largest one fills 16 bits.
 * @param {number} length @param {Placed} placed @param {number} wanted @param {Filter} filter @returns {Axis} */
function inUnits(length, { size, start }, wanted, filter) {
  const taps = weights(length, size, start, wanted, filter);
  const largest = [...taps, ...weights(length, size, 0, 1, filter)]
    .flatMap((tap) => (tap ? [...tap.weights] : []))
    .reduce((a, b) => Math.max(a, b), 0);
  let bits = 0;
  while (bits < 22 && Math.trunc(0.5 + largest * 2 ** (bits + 1)) < 2 ** 15) bits += 1;
  const unit = 2 ** bits;
  for (const tap of taps) if (tap) tap.weights = tap.weights.map((one) => Math.trunc(one * unit + 0.5 * Math.sign(one)));
  return { taps, unit };
}

/** The pixels of an axis that results read.
 * @param {(Tap | null)[]} taps */
function used(taps) {
  const inside = taps.filter((tap) => tap !== null);
  return { first: inside[0].first, end: Math.max(...inside.map((tap) => tap.first + tap.weights.length)) };
}

/** @param {number} sum @param {number} unit */
const toByte = (sum, unit) => Math.min(Math.max(Math.floor(sum / unit + 0.5), 0), 255);

/** Luma as Pillow computes it, in place of red.
 * @param {Bytes} rgba */
function toGray(rgba) {
  for (let i = 0; i < rgba.length; i += 4) {
    rgba[i] = (rgba[i] * 19595 + rgba[i + 1] * 38470 + rgba[i + 2] * 7471 + 0x8000) >> 16;
  }
}

// ---- sizes, as in Preprocessing.geometry

/** Round half to even, as Python does.
 * @param {number} x */
export function even(x) {
  const below = Math.floor(x);
  if (x - below !== 0.5) return Math.round(x);
  return below % 2 ? below + 1 : below;
}

/** For rows and columns the size of the whole image when resized, and the start of the network's input in it, negative
 * where it is padded.
 * @param {Preprocessing} own @param {number} height @param {number} width @returns {Placed[]} */
export function placed(own, height, width) {
  const lengths = [height, width];
  if (!own.resize_size && height === own.image_size[0] && width === own.image_size[1]) {
    return lengths.map((size) => ({ size, start: 0 })); // not resized
  }
  const rule = own.resize_size && own.center === "floor" ? Math.floor : even;
  return sizes(own, lengths).map((size, axis) => {
    const wanted = own.image_size[axis];
    const start = size >= wanted ? rule((size - wanted) / 2) : -Math.floor((wanted - size) / 2);
    return { size, start };
  });
}

/** @param {Preprocessing} own @param {number[]} lengths @returns {number[]} */
function sizes(own, lengths) {
  const [height, width] = lengths;
  if (own.resize === "stretch") return own.resize_size || own.image_size;
  if (own.resize_size) {
    const [tall, wide] = own.resize_size;
    if (own.resize === "crop" && tall === wide) {
      return width <= height
        ? [Math.trunc((tall * height) / width), tall]
        : [tall, Math.trunc((tall * width) / height)];
    }
    const rule = own.resize === "crop" ? Math.min : Math.max;
    const ratio = rule(height / tall, width / wide);
    return lengths.map((length) => Math.max(even(length / ratio), 1));
  }
  const scales = own.image_size.map((wanted, axis) => wanted / lengths[axis]);
  if (own.resize === "crop") {
    const scale = Math.max(...scales) / own.crop_fraction;
    return lengths.map((length, axis) => Math.max(even(length * scale), own.image_size[axis]));
  }
  const scale = Math.min(...scales);
  return lengths.map((length, axis) => Math.min(Math.max(even(length * scale), 1), own.image_size[axis]));
}
