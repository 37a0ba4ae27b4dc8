// Linear classifiers on features: the same as src/vitral/evaluation/probe.py fits, with the same names.
//
// Rows are count × width numbers, row after row. A classifier has classes × width weights, and a bias of each class.

import { minimized } from "./lbfgs.js";

/** @typedef {{ data: Float64Array, count: number, width: number }} Rows */
/** @typedef {{ weight: ArrayLike<number>, bias: ArrayLike<number> }} Linear */
/** @typedef {{ weight: Float64Array, bias: Float64Array }} Fit */
/** @typedef {{ mean: Float64Array, deviation: Float64Array }} Scale */

/** Inverse strengths of the regularization, of which the lowest out-of-fold loss chooses. */
export const STRENGTHS = [0.001, 0.01, 0.1, 1];
const SHRINKAGE = 0.5; // share of a multiple of the identity in the covariance
const LEAST_DEVIATION = 1e-5; // a feature that hardly varies is not scaled up
const ABSENT = 1e4; // logit below all others of a class without images

/** Rows with a mean of 0 and a standard deviation of 1 in each column, and both.
 * @param {Rows} given @returns {{ rows: Rows } & Scale} */
export function standardized({ data, count, width }) {
  const mean = new Float64Array(width);
  const deviation = new Float64Array(width);
  for (let i = 0; i < data.length; i++) mean[i % width] += data[i] / count;
  for (let i = 0; i < data.length; i++) deviation[i % width] += (data[i] - mean[i % width]) ** 2 / count;
  for (let k = 0; k < width; k++) deviation[k] = Math.max(Math.sqrt(deviation[k]), LEAST_DEVIATION);
  const rows = { data: data.map((one, i) => (one - mean[i % width]) / deviation[i % width]), count, width };
  return { rows, mean, deviation };
}

/** A classifier of standardized rows as one of the features themselves.
 * @param {Fit} linear @param {Scale} scale @returns {Fit} */
export function folded({ weight, bias }, { mean, deviation }) {
  const width = mean.length;
  const scaled = weight.map((one, i) => one / deviation[i % width]);
  const shifted = bias.map((one, k) => {
    for (let d = 0; d < width; d++) one -= scaled[k * width + d] * mean[d];
    return one;
  });
  return { weight: scaled, bias: shifted };
}

/** Logits (count × classes) of rows.
 * @param {Rows} rows @param {Linear} linear */
export function logitsOf({ data, count, width }, { weight, bias }) {
  const classes = bias.length;
  const found = new Float64Array(count * classes);
  for (let i = 0; i < count; i++) {
    for (let k = 0; k < classes; k++) {
      let sum = bias[k];
      for (let d = 0; d < width; d++) sum += weight[k * width + d] * data[i * width + d];
      found[i * classes + k] = sum;
    }
  }
  return found;
}

/** log Σ exp of `classes` logits from `start` on.
 * @param {ArrayLike<number>} logits @param {number} start @param {number} classes */
export function logSum(logits, start, classes) {
  let most = -Infinity;
  for (let k = 0; k < classes; k++) most = Math.max(most, logits[start + k]);
  let sum = 0;
  for (let k = 0; k < classes; k++) sum += Math.exp(logits[start + k] - most);
  return most + Math.log(sum);
}

/** The images of some numbers.
 * @param {Rows} rows @param {number[]} numbers @returns {Rows} */
export function chosen({ data, width }, numbers) {
  const found = new Float64Array(numbers.length * width);
  numbers.forEach((number, i) => found.set(data.subarray(number * width, (number + 1) * width), i * width));
  return { data: found, count: numbers.length, width };
}

/** Fit a logistic regression to standardized rows, by C × the sum of the losses + ½ ‖weights‖². `start` is an earlier
 * solution.
 * @param {Rows} rows @param {number[]} labels @param {number} classes @param {number} strength
 * @param {{ parameters?: Float64Array } | null} start @returns {Fit & { parameters?: Float64Array }} */
export function regression(rows, labels, classes, strength, start = null) {
  const present = [...new Set(labels)].sort((a, b) => a - b);
  if (present.length < 2) return spread({ weight: new Float64Array(rows.width), bias: new Float64Array(1) }, present, classes, rows.width);
  const own = labels.map((label) => present.indexOf(label));
  // scikit-learn fits two classes by one row w. As rows −w/2 and w/2 of a softmax, they carry half of its penalty.
  const penalty = (present.length === 2 ? 2 : 1) / (strength * rows.count);
  /** @param {Float64Array} x */
  const evaluate = (x) => loss(x, rows, own, present.length, penalty);
  const size = present.length * rows.width;
  const found = minimized(evaluate, start?.parameters ?? new Float64Array(size + present.length));
  const linear = { weight: found.subarray(0, size), bias: found.subarray(size) };
  return { ...spread(linear, present, classes, rows.width), parameters: found };
}

/** Mean loss and its gradient of the parameters: weights (classes × width), then biases.
 * @param {Float64Array} x @param {Rows} rows @param {number[]} labels @param {number} classes @param {number} penalty */
function loss(x, rows, labels, classes, penalty) {
  const { data, count, width } = rows;
  const size = classes * width;
  const weight = x.subarray(0, size);
  const logits = logitsOf(rows, { weight, bias: x.subarray(size) });
  const gradient = new Float64Array(x.length);
  let value = 0;
  for (let i = 0; i < count; i++) {
    const total = logSum(logits, i * classes, classes);
    value += (total - logits[i * classes + labels[i]]) / count;
    for (let k = 0; k < classes; k++) {
      const residual = (Math.exp(logits[i * classes + k] - total) - (labels[i] === k ? 1 : 0)) / count;
      gradient[size + k] += residual;
      for (let d = 0; d < width; d++) gradient[k * width + d] += residual * data[i * width + d];
    }
  }
  for (let j = 0; j < size; j++) {
    value += 0.5 * penalty * weight[j] ** 2;
    gradient[j] += penalty * weight[j];
  }
  return { value, gradient };
}

/** A classifier of the classes that have images, as one of all classes: it never predicts the others.
 * @param {Fit} linear @param {number[]} present @param {number} classes @param {number} width @returns {Fit} */
function spread({ weight, bias }, present, classes, width) {
  const all = { weight: new Float64Array(classes * width), bias: new Float64Array(classes).fill(Math.min(...bias) - ABSENT) };
  present.forEach((label, k) => {
    all.weight.set(weight.subarray(k * width, (k + 1) * width), label * width);
    all.bias[label] = bias[k];
  });
  return all;
}

/** Fit linear discriminant analysis to standardized rows, in closed form.
 * @param {Rows} rows @param {number[]} labels @param {number} classes @returns {Fit} */
export function discriminant(rows, labels, classes) {
  const { data, count, width } = rows;
  const present = [...new Set(labels)].sort((a, b) => a - b);
  const place = labels.map((label) => present.indexOf(label));
  const sizes = present.map((label) => labels.filter((one) => one === label).length);
  const means = new Float64Array(present.length * width);
  for (let i = 0; i < count; i++) {
    for (let d = 0; d < width; d++) means[place[i] * width + d] += data[i * width + d] / sizes[place[i]];
  }
  const solved = solve(covarianceOf(rows, place, means), means, width);
  const bias = Float64Array.from(present, (_, k) => {
    let sum = 0;
    for (let d = k * width; d < (k + 1) * width; d++) sum -= 0.5 * means[d] * solved[d];
    return sum;
  });
  return spread({ weight: solved, bias }, present, classes, width);
}

/** The covariance (width × width) within the classes, shrunk toward a multiple of the identity; only its lower half.
 * @param {Rows} rows @param {number[]} place @param {Float64Array} means */
function covarianceOf({ data, count, width }, place, means) {
  const covariance = new Float64Array(width * width);
  const rest = new Float64Array(width);
  let squares = 0;
  for (let i = 0; i < count; i++) {
    for (let d = 0; d < width; d++) {
      rest[d] = data[i * width + d] - means[place[i] * width + d];
      squares += rest[d] ** 2;
    }
    for (let a = 0; a < width; a++) {
      const share = ((1 - SHRINKAGE) * rest[a]) / count;
      for (let b = 0; b <= a; b++) covariance[a * width + b] += share * rest[b];
    }
  }
  const added = (SHRINKAGE * squares) / (count * width) + 1e-6;
  for (let a = 0; a < width; a++) covariance[a * width + a] += added;
  return covariance;
}

/** Solve `matrix` x = row for each row, by Cholesky's decomposition, which replaces the matrix.
 * @param {Float64Array} matrix @param {Float64Array} rows @param {number} width */
function solve(matrix, rows, width) {
  for (let a = 0; a < width; a++) {
    for (let b = 0; b <= a; b++) {
      let sum = matrix[a * width + b];
      for (let k = 0; k < b; k++) sum -= matrix[a * width + k] * matrix[b * width + k];
      matrix[a * width + b] = a === b ? Math.sqrt(sum) : sum / matrix[b * width + b];
    }
  }
  const found = rows.slice();
  for (let start = 0; start < rows.length; start += width) {
    const x = found.subarray(start, start + width);
    for (let a = 0; a < width; a++) {
      for (let k = 0; k < a; k++) x[a] -= matrix[a * width + k] * x[k];
      x[a] /= matrix[a * width + a];
    }
    for (let a = width - 1; a >= 0; a--) {
      for (let k = a + 1; k < width; k++) x[a] -= matrix[k * width + a] * x[k];
      x[a] /= matrix[a * width + a];
    }
  }
  return found;
}

/** The classifier whose probabilities are the geometric mean of two: its logits are their mean.
 * @param {Fit} one @param {Fit} other @returns {Fit} */
export function mixed(one, other) {
  /** @param {Float64Array} a @param {Float64Array} b */
  const mean = (a, b) => a.map((value, i) => (value + b[i]) / 2);
  return { weight: mean(one.weight, other.weight), bias: mean(one.bias, other.bias) };
}

/** Predict each image by both classifiers, fitted to the other folds: logits (count × classes) of their mixture, the
 * strength of the lowest loss, and for each image whether its class has images in other folds.
 * @param {Rows} rows @param {number[]} labels @param {number} classes @param {number[]} folds */
export function outOfFold(rows, labels, classes, folds) {
  const logits = new Float64Array(rows.count * classes);
  const known = new Array(rows.count).fill(false);
  const losses = STRENGTHS.map(() => 0);
  const parts = [...new Set(folds)].map((fold) => {
    const inside = [...labels.keys()].filter((i) => folds[i] === fold);
    const others = [...labels.keys()].filter((i) => folds[i] !== fold);
    const [own, rest] = [chosen(rows, inside), chosen(rows, others)];
    const taught = others.map((i) => labels[i]);
    for (const i of inside) known[i] = taught.includes(labels[i]);
    /** @type {(Fit & { parameters?: Float64Array }) | null} */
    let fit = null;
    const regressed = STRENGTHS.map((strength, s) => {
      fit = regression(rest, taught, classes, strength, fit);
      const found = logitsOf(own, fit);
      inside.forEach((number, i) => {
        if (known[number]) losses[s] += logSum(found, i * classes, classes) - found[i * classes + labels[number]];
      });
      return found;
    });
    return { inside, regressed, other: logitsOf(own, discriminant(rest, taught, classes)) };
  });
  const best = losses.indexOf(Math.min(...losses));
  for (const { inside, regressed, other } of parts) {
    inside.forEach((number, i) => {
      for (let k = 0; k < classes; k++) logits[number * classes + k] = (regressed[best][i * classes + k] + other[i * classes + k]) / 2;
    });
  }
  return { logits, strength: STRENGTHS[best], known };
}

/** Fit both classifiers to standardized rows, and return their mixture.
 * @param {Rows} rows @param {number[]} labels @param {number} classes @param {number} strength */
export function fitted(rows, labels, classes, strength) {
  return mixed(regression(rows, labels, classes, strength), discriminant(rows, labels, classes));
}
