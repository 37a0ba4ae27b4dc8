// A worker that fits the classes to the features, and measures the fit.

import { accuracyOf, foldsOf, predicted, temperatureOf } from "./figures.js";
import { fitted, folded, outOfFold, standardized } from "./probe.js";

const FEWEST = 3; // images of a class, and of another one, from which they are fitted

self.onmessage = ({ data: { id, question } }) => {
  try {
    self.postMessage({ id, answer: taught(question) });
  } catch (error) {
    self.postMessage({ id, problem: { title: "The classes cannot be fitted", detail: String(error), try: "remove the last images" } });
  }
};

/** The head of the features (Float32Array, images × width) and labels, with its measure; null for too few images.
 * @param {{ features: Float32Array, width: number, labels: number[], groups: number[], classes: number }} question */
export function taught({ features, width, labels, groups, classes }) {
  const sizes = Array.from({ length: classes }, (_, k) => labels.filter((label) => label === k).length);
  if (sizes.filter((size) => size >= FEWEST).length < 2) return null;
  const scale = standardized({ data: Float64Array.from(features), count: labels.length, width });
  const { logits, strength, known } = outOfFold(scale.rows, labels, classes, foldsOf(labels, groups));
  const measured = [...labels.keys()].filter((i) => known[i]);
  const temperature = temperatureOf(logits, labels, groups, classes, measured);
  const confusion = sizes.map(() => new Array(classes).fill(0));
  for (const i of measured) confusion[labels[i]][predicted(logits, i, classes)] += 1;
  const right = measured.map((i) => predicted(logits, i, classes) === labels[i]);
  const head = folded(fitted(scale.rows, labels, classes, strength), scale);
  return {
    weight: Float32Array.from(head.weight),
    bias: Float32Array.from(head.bias),
    temperature,
    strength,
    confusion,
    crossed: accuracyOf(right, measured.map((i) => groups[i])),
  };
}
