// Minimize a smooth convex function by L-BFGS (Liu and Nocedal 1989), in double precision.

const MEMORY = 10; // pairs of changes
const SUFFICIENT = 1e-4; // share of the decrease that the slope promises (Armijo)
const SHORTEST = 1e-12; // of a step: below it, rounding hides any decrease

/** @typedef {Float64Array} Point */
/** @typedef {{ change: Point, turned: Point, inverse: number }} Pair */

/** The minimum of `evaluate(x)` from the point `start` on. The search ends where no component of the gradient is above
 * `tolerance`.
 * @param {(x: Point) => { value: number, gradient: Point }} evaluate @param {Point} start @returns {Point} */
export function minimized(evaluate, start, { tolerance = 1e-7, most = 500 } = {}) {
  let x = start;
  let { value, gradient } = evaluate(x);
  /** @type {Pair[]} */
  const pairs = [];
  for (let step = 0; step < most && largest(gradient) > tolerance; step++) {
    const direction = descent(gradient, pairs);
    const slope = dot(gradient, direction);
    let rate = pairs.length ? 1 : Math.min(1, 1 / Math.sqrt(dot(gradient, gradient)));
    let moved = along(x, rate, direction);
    let next = evaluate(moved);
    while (!(next.value <= value + SUFFICIENT * rate * slope)) {
      rate /= 2;
      if (rate < SHORTEST) return x;
      moved = along(x, rate, direction);
      next = evaluate(moved);
    }
    const change = along(moved, -1, x);
    const turned = along(next.gradient, -1, gradient);
    const curvature = dot(change, turned);
    if (curvature > 0) pairs.push({ change, turned, inverse: 1 / curvature });
    if (pairs.length > MEMORY) pairs.shift();
    x = moved;
    ({ value, gradient } = next);
  }
  return x;
}

/** The direction of the next step: the gradient times the inverse of the Hessian that the pairs describe.
 * @param {Point} gradient @param {Pair[]} pairs */
function descent(gradient, pairs) {
  let direction = gradient.map((one) => -one);
  /** @type {number[]} */
  const shares = [];
  for (const { change, turned, inverse } of pairs.toReversed()) {
    const share = inverse * dot(change, direction);
    shares.unshift(share);
    direction = along(direction, -share, turned);
  }
  const last = pairs.at(-1);
  if (last) {
    const scale = 1 / (last.inverse * dot(last.turned, last.turned));
    direction = direction.map((one) => scale * one);
  }
  pairs.forEach(({ change, turned, inverse }, i) => {
    direction = along(direction, shares[i] - inverse * dot(turned, direction), change);
  });
  return direction;
}

/** @param {Point} x @param {number} rate @param {Point} direction */
function along(x, rate, direction) {
  const found = new Float64Array(x.length);
  for (let i = 0; i < x.length; i++) found[i] = x[i] + rate * direction[i];
  return found;
}

/** @param {Point} a @param {Point} b */
function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

/** @param {Point} values */
const largest = (values) => values.reduce((most, one) => Math.max(most, Math.abs(one)), 0);
