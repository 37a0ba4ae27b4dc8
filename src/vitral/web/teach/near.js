// Near-duplicates: the same image resized, compressed again, mirrored or cropped by up to a tenth of its sides.
//
// The hashes and filters of src/vitral/data/checks/near.py. A look is a Uint8Array: 32 × 32 pixels of gray, then the means
// of Cb and Cr.

const SIDE = 32;
export const LENGTH = SIDE * SIDE + 2;
const FLAT = 3; // standard deviation of gray below which an image has nothing to compare
const CHROMA = 12; // largest difference of the mean colors
const WHOLE = [1, 0.5, 0.5];
const QUARTERS = [0, 0.25, 0.5, 0.75, 1];
/** @typedef {{ size: number, power: number, least: number, crops: number[][] }} Filter */

/** @param {number} share @param {number[]} places */
const crops = (share, places) => places.flatMap((top) => places.map((left) => [share, top, left]));

/** Lowest frequencies of each axis, exponent of the frequency in a weight, least similarity to pass, and the crops of one
 * image, (share of the side, vertical and horizontal place), that are compared with the whole other one.
 * @type {Filter[]} */
const FILTERS = [
  { size: 6, power: 0.5, least: 0.66, crops: [[0.9, 0.5, 0.5]] },
  { size: 8, power: 1, least: 0.9, crops: [WHOLE, [0.95, 0.5, 0.5], ...crops(0.9, [0.2, 0.8])] },
  { size: 12, power: 0.5, least: 0.92, crops: [WHOLE, ...crops(0.95, [0, 0.5, 1]), ...crops(0.9, QUARTERS)] },
];

/** The look of the bytes (channels, height, width) that the network sees.
 * @param {Uint8Array} pixels @param {number} channels @param {number[]} size */
export function lookOf(pixels, channels, [height, width]) {
  const plane = height * width;
  /** @param {number} c @param {number} i */
  const at = (c, i) => pixels[(channels === 1 ? 0 : c * plane) + i];
  const sums = new Float64Array(SIDE * SIDE);
  const counts = new Float64Array(SIDE * SIDE);
  let [blue, red] = [0, 0];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const [r, g, b] = [0, 1, 2].map((c) => at(c, y * width + x));
      const place = Math.floor((y * SIDE) / height) * SIDE + Math.floor((x * SIDE) / width);
      sums[place] += 0.299 * r + 0.587 * g + 0.114 * b;
      counts[place] += 1;
      blue += (-0.168736 * r - 0.331264 * g + 0.5 * b) / plane;
      red += (0.5 * r - 0.418688 * g - 0.081312 * b) / plane;
    }
  }
  const found = new Uint8Array(LENGTH);
  sums.forEach((sum, i) => (found[i] = Math.round(sum / Math.max(counts[i], 1))));
  found[LENGTH - 2] = Math.round(128 + blue);
  found[LENGTH - 1] = Math.round(128 + red);
  return found;
}

/** True if two looks are those of near-duplicates.
 * @param {Uint8Array} one @param {Uint8Array} other */
export function near(one, other) {
  for (const end of [1, 2]) if (Math.abs(one[LENGTH - end] - other[LENGTH - end]) > CHROMA) return false;
  return FILTERS.every((_, stage) => Math.max(similarity(one, other, stage), similarity(other, one, stage)) >= FILTERS[stage].least);
}

/** The largest similarity of a crop of one look with the whole other one.
 * @param {Uint8Array} one @param {Uint8Array} other @param {number} stage */
function similarity(one, other, stage) {
  const { size } = FILTERS[stage];
  const whole = hashes(other, stage).whole;
  return hashes(one, stage).crops.reduce((most, crop) => {
    let [even, odd] = [0, 0]; // a mirror changes the sign of odd horizontal frequencies only
    for (let i = 0; i < crop.length; i++) {
      if ((i % size) % 2) odd += crop[i] * whole[i];
      else even += crop[i] * whole[i];
    }
    return Math.max(most, even + Math.abs(odd));
  }, -1);
}

/** Look → hashes of each stage.
 * @type {WeakMap<Uint8Array, { whole: Float32Array, crops: Float32Array[] }[]>} */
const known = new WeakMap();

/** @param {Uint8Array} look @param {number} stage */
function hashes(look, stage) {
  const stages = known.get(look) ?? [];
  known.set(look, stages);
  stages[stage] ??= {
    whole: hash(look, FILTERS[stage], WHOLE),
    crops: FILTERS[stage].crops.map((crop) => hash(look, FILTERS[stage], crop)),
  };
  return stages[stage];
}

/** The lowest coefficients of the DCT of a crop, weighted by their frequency and of unit length; zeros for a flat image.
 * @param {Uint8Array} look @param {Filter} filter @param {number[]} crop */
function hash(look, { size, power }, [share, top, left]) {
  const gray = look.subarray(0, SIDE * SIDE);
  const mean = gray.reduce((sum, one) => sum + one, 0) / gray.length;
  const variance = gray.reduce((sum, one) => sum + (one - mean) ** 2, 0) / gray.length;
  const found = new Float32Array(size * size);
  if (Math.sqrt(variance) < FLAT) return found;
  const [vertical, horizontal] = [top, left].map((place) => projection(size, share, place));
  const rows = new Float64Array(size * SIDE); // vertical frequencies of each column
  for (let f = 0; f < size; f++) {
    for (let y = 0; y < SIDE; y++) {
      for (let x = 0; x < SIDE; x++) rows[f * SIDE + x] += vertical[f * SIDE + y] * gray[y * SIDE + x];
    }
  }
  for (let f = 0; f < size; f++) {
    for (let g = 0; g < size; g++) {
      const frequency = Math.hypot(f, g);
      if (!frequency) continue;
      for (let x = 0; x < SIDE; x++) found[f * size + g] += rows[f * SIDE + x] * horizontal[g * SIDE + x];
      found[f * size + g] *= Math.max(frequency, 1) ** power;
    }
  }
  const length = Math.sqrt(found.reduce((sum, one) => sum + one ** 2, 0));
  return found.map((one) => one / Math.max(length, 1e-6));
}

/** @type {Map<string, Float64Array>} */
const projections = new Map();

/** The matrix (size × 32) from a row to the lowest vectors of the DCT of a window of it, stretched to a whole row.
 * @param {number} size @param {number} share @param {number} place */
function projection(size, share, place) {
  const key = `${size} ${share} ${place}`;
  const made = projections.get(key);
  if (made) return made;
  const found = new Float64Array(size * SIDE);
  for (let i = 0; i < SIDE; i++) {
    const [first, last] = [i, i + 1].map((edge) => SIDE * (place * (1 - share) + (share * edge) / SIDE));
    for (let x = 0; x < SIDE; x++) {
      const covered = Math.max(0, Math.min(last, x + 1) - Math.max(first, x)) / (last - first);
      for (let f = 0; f < size && covered; f++) {
        const wave = f ? Math.sqrt(2 / SIDE) * Math.cos((Math.PI * f * (i + 0.5)) / SIDE) : Math.sqrt(1 / SIDE);
        found[f * SIDE + x] += wave * covered;
      }
    }
  }
  projections.set(key, found);
  return found;
}
