// The measure: accuracy with its interval, and the temperature of the probabilities. It is that of `vitral label`
// (src/vitral/labeling/insight.py, src/vitral/evaluation/intervals.py and calibration.py).

import { logSum } from "./probe.js";

/** Images, or groups of them, below which no accuracy is stated. */
export const FOR_ADVICE = 30;
const FOR_A_FIT = 50; // images, or groups, that a temperature is fitted to
const FOLDS = 5;
const Z = 1.959963984540054; // of a 95% interval
const HOTTEST = 50; // highest temperature
const LIMITS = [0.05, 20]; // of a fitted temperature

/** The fold of each image, with about the same share of every class; the images of a group are in one.
 * @param {number[]} labels @param {number[]} groups @returns {number[]} */
export function foldsOf(labels, groups) {
  const random = generator(0);
  const first = new Map(); // group → label of its first image
  labels.forEach((label, i) => first.has(groups[i]) || first.set(groups[i], label));
  const order = [...first].map(([group, label]) => ({ group, label, place: random() }));
  order.sort((a, b) => a.label - b.label || a.place - b.place);
  const count = Math.max(2, Math.min(FOLDS, order.length));
  const folds = new Map(order.map(({ group }, rank) => [group, rank % count]));
  return groups.map((group) => folds.get(group) ?? 0);
}

/** Numbers from 0 to 1, always the same ones for a seed (mulberry32).
 * @param {number} seed */
function generator(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** The 95% interval of the share of `right` of images in groups.
 * @param {boolean[]} right @param {number[]} groups @returns {number[]} */
export function proportionInterval(right, groups) {
  const count = right.length;
  const hits = right.filter(Boolean).length;
  const number = new Set(groups).size;
  if (number === count) return wilson(hits, count);
  if (number === 1) return [0, 1];
  const share = (hits + 0.5) / (count + 1); // if all are right, a variance of 0 would hide how alike groups are
  const trials = count / designEffect(right.map(Number), groups, share * (1 - share));
  return wilson((hits / count) * trials, trials);
}

/** Wilson's interval (1927) of so many independent trials.
 * @param {number} successes @param {number} trials @param {number} z standard deviations */
function wilson(successes, trials, z = Z) {
  const rate = successes / trials;
  const z2 = z ** 2;
  const center = (rate + z2 / (2 * trials)) / (1 + z2 / trials);
  const half = (z / (1 + z2 / trials)) * Math.sqrt(Math.max(0, rate * (1 - rate)) / trials + z2 / (4 * trials ** 2));
  return [successes === 0 ? 0 : Math.max(0, center - half), successes === trials ? 1 : Math.min(1, center + half)];
}

/** By how much groups multiply the variance of a mean; `variance` is that of a value.
 * @param {number[]} values @param {number[]} groups @param {number} variance */
function designEffect(values, groups, variance) {
  const count = values.length;
  /** @type {Map<number, number[]>} */
  const members = new Map();
  values.forEach((value, i) => members.set(groups[i], [...(members.get(groups[i]) ?? []), value]));
  const all = [...members.values()];
  const most = sum(all.map((one) => one.length ** 2)) / count;
  const mean = sum(values) / count;
  const measured = sum(values.map((one) => (one - mean) ** 2)) / count;
  if (measured <= 0) return most;
  const within = sum(all.map((one) => sum(one.map((value) => (value - sum(one) / one.length) ** 2))));
  const alike = 1 - within / ((count - all.length) * variance);
  const apart = sum(all.map((one) => (sum(one) - one.length * mean) ** 2));
  const linearized = ((all.length / (all.length - 1)) * apart) / (count * measured);
  return Math.min(Math.max(1, 1 + alike * (most - 1), linearized), most);
}

/** @param {number[]} values */
const sum = (values) => values.reduce((total, one) => total + one, 0);

/** The temperature of the lowest loss, or one that makes the predictions less sure if few labels say so: their mean
 * probability is at most the lower end of the accuracy's interval of one standard deviation. `numbers` are the images
 * that count.
 * @param {Float64Array} logits @param {number[]} labels @param {number[]} groups @param {number} classes
 * @param {number[]} numbers */
export function temperatureOf(logits, labels, groups, classes, numbers) {
  if (!numbers.length) return HOTTEST;
  const count = new Set(numbers.map((i) => groups[i])).size;
  const rate = numbers.filter((i) => predicted(logits, i, classes) === labels[i]).length / numbers.length;
  const expected = wilson(rate * count, count, 1)[0];
  const fit = fitTemperature(logits, labels, classes, numbers, count, rate);
  if (meanMost(logits, classes, numbers, fit) <= expected) return fit;
  let [low, high] = [fit, HOTTEST];
  for (let step = 0; step < 30; step++) {
    const middle = Math.sqrt(low * high); // the mean probability falls as the temperature rises
    if (meanMost(logits, classes, numbers, middle) > expected) low = middle;
    else high = middle;
  }
  return high;
}

/** The predicted class of an image.
 * @param {Float64Array} logits @param {number} image @param {number} classes */
export function predicted(logits, image, classes) {
  let best = 0;
  for (let k = 1; k < classes; k++) if (logits[image * classes + k] > logits[image * classes + best]) best = k;
  return best;
}

/** The mean of the largest probabilities at a temperature.
 * @param {Float64Array} logits @param {number} classes @param {number[]} numbers @param {number} temperature */
function meanMost(logits, classes, numbers, temperature) {
  return sum(numbers.map((i) => Math.exp(scaled(logits, i, classes, 1 / temperature, predicted(logits, i, classes))))) / numbers.length;
}

/** The logarithm of a probability, with logits times `inverse`.
 * @param {Float64Array} logits @param {number} image @param {number} classes @param {number} inverse @param {number} label */
function scaled(logits, image, classes, inverse, label) {
  const own = logits.subarray(image * classes, (image + 1) * classes).map((one) => one * inverse);
  return own[label] - logSum(own, 0, classes);
}

/** The temperature of the lowest loss, which is convex in 1 / temperature: golden-section search.
 * @param {Float64Array} logits @param {number[]} labels @param {number} classes @param {number[]} numbers
 * @param {number} count @param {number} rate */
function fitTemperature(logits, labels, classes, numbers, count, rate) {
  if (count < FOR_A_FIT || rate === 0 || rate === 1) return 1;
  /** @param {number} inverse */
  const loss = (inverse) => -sum(numbers.map((i) => scaled(logits, i, classes, inverse, labels[i])));
  const golden = (Math.sqrt(5) - 1) / 2;
  let [low, high] = [1 / LIMITS[1], 1 / LIMITS[0]];
  let [left, right] = [high - golden * (high - low), low + golden * (high - low)];
  let [atLeft, atRight] = [loss(left), loss(right)];
  while (high - low > 1e-6) {
    if (atLeft < atRight) {
      [high, right, atRight] = [right, left, atLeft];
      left = high - golden * (high - low);
      atLeft = loss(left);
    } else {
      [low, left, atLeft] = [left, right, atRight];
      right = low + golden * (high - low);
      atRight = loss(right);
    }
  }
  return 2 / (low + high);
}

/** @typedef {{ images: number, groups: number, right: number, accuracy?: number, interval?: number[] }} Accuracy */

/** Counts, accuracy and interval; no accuracy for fewer than `FOR_ADVICE` images or groups.
 * @param {boolean[]} right @param {number[]} groups @returns {Accuracy} */
export function accuracyOf(right, groups) {
  const found = { images: right.length, groups: new Set(groups).size, right: right.filter(Boolean).length };
  if (found.groups < FOR_ADVICE) return found;
  return { ...found, accuracy: found.right / found.images, interval: proportionInterval(right, groups) };
}
