// Project files: safetensors, which src/vitral/weights/project.py reads, too. Nothing in a file is trusted.

import { LENGTH } from "./near.js";
import { className, LONGEST_NAME, MOST_CLASSES, MOST_IMAGES } from "./store.js";

/** @typedef {import("./store.js").State} State */
/** @typedef {import("./store.js").Model} Model */
/** @typedef {{ weight: Float32Array, bias: Float32Array, temperature: number }} Head */
/** @typedef {Float32Array | Int32Array | Uint8Array} Values */
/** @typedef {{ data: Values, shape: number[] }} Tensor */

const FORMAT = 1;
const MOST_BYTES = 256 * 2 ** 20;
const LONGEST_HEADER = 16 * 2 ** 20;
/** @type {Record<string, any>} */
const KINDS = { F32: Float32Array, I32: Int32Array, U8: Uint8Array };

/** The bytes of a project. `head` is null before the first fit; `model` is the content of model.json.
 * @param {State} state @param {Head | null} head @param {Model} model */
export function written(state, head, model, { thumbnails = true } = {}) {
  const { images, classes } = state;
  const description = {
    format: FORMAT,
    vitral: model.vitral,
    model: model.name,
    weights: model.weights,
    classes,
    temperature: head?.temperature ?? 1,
    names: images.map((one) => one.name.slice(0, LONGEST_NAME).replace(/\p{Cs}/gu, "\ufffd")),
  };
  /** @type {Record<string, Tensor>} */
  const tensors = {};
  if (head) {
    tensors["head.weight"] = { data: head.weight, shape: [classes.length, model.width] };
    tensors["head.bias"] = { data: head.bias, shape: [classes.length] };
  }
  const features = new Float32Array(images.length * model.width);
  images.forEach((one, i) => features.set(one.features, i * model.width));
  tensors.features = { data: features, shape: [images.length, model.width] };
  tensors.labels = vector(Int32Array.from(images, (one) => one.label));
  tensors.groups = vector(Int32Array.from(images, (one) => one.group));
  if (thumbnails) {
    let end = 0;
    const ends = Int32Array.from(images, (one) => (end += one.thumbnail?.length ?? 0));
    const bytes = new Uint8Array(end);
    const looks = new Uint8Array(images.length * LENGTH); // zeros are like no image
    images.forEach(({ thumbnail, look }, i) => {
      if (thumbnail) bytes.set(thumbnail, ends[i] - thumbnail.length);
      if (look) looks.set(look, i * LENGTH);
    });
    Object.assign(tensors, { thumbnail_ends: vector(ends), thumbnails: vector(bytes), looks: vector(looks) });
  }
  return packed(description, tensors);
}

/** @param {Values} data @returns {Tensor} */
const vector = (data) => ({ data, shape: [data.length] });

/** @param {any} description @param {Record<string, Tensor>} tensors */
function packed(description, tensors) {
  /** @type {Record<string, any>} */
  const header = { __metadata__: { vitral_project: JSON.stringify(description) } };
  let end = 0;
  for (const [name, { data, shape }] of Object.entries(tensors)) {
    const dtype = Object.keys(KINDS).find((one) => data instanceof KINDS[one]);
    header[name] = { dtype, shape, data_offsets: [end, (end += data.byteLength)] };
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const begin = 8 * Math.ceil((8 + text.length) / 8); // tensors begin at a multiple of 8 bytes
  const bytes = new Uint8Array(begin + end).fill(32, 0, begin); // spaces fill the header
  new DataView(bytes.buffer).setBigUint64(0, BigInt(begin - 8), true);
  bytes.set(text, 8);
  for (const [name, { data }] of Object.entries(tensors)) {
    bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), begin + header[name].data_offsets[0]);
  }
  return bytes;
}

/** The state that a project file holds; throws an Error with the reason for any other file.
 * @param {Uint8Array} bytes @param {Model} model @returns {State} */
export function read(bytes, model) {
  const { description, tensors } = unpacked(bytes);
  if (description.format !== FORMAT) throw new Error("it was saved by another version of this page");
  if (description.model !== model.name || description.weights !== model.weights) {
    throw new Error(`it was taught with another model: ${String(description.model).slice(0, 40)} of vitral ${String(description.vitral).slice(0, 20)}`);
  }
  const classes = classesOf(description.classes);
  const { features, labels, groups, thumbnails, looks, thumbnail_ends: ends } = tensors;
  if (!(features?.data instanceof Float32Array) || features.shape.length !== 2) throw new Error("it has no features");
  const [count, width] = features.shape;
  if (width !== model.width) throw new Error(`it has ${width} features for each image, and the model ${model.width}`);
  if (count > MOST_IMAGES) throw new Error(`it has ${count.toLocaleString("en")} images; at most ${MOST_IMAGES.toLocaleString("en")} are opened`);
  if (!features.data.every(Number.isFinite)) throw new Error("it has features that are not finite");
  const { names } = description;
  const lists = [labels?.data, groups?.data, ...(ends ? [ends.data] : [])];
  if (!lists.every((one) => one instanceof Int32Array && one.length === count)) throw new Error("it does not have a label and a group for each image");
  if (!Array.isArray(names) || names.length !== count || !names.every((one) => typeof one === "string")) throw new Error("it does not have a name for each image");
  if (!labels.data.every((/** @type {number} */ label) => label >= 0 && label < classes.length)) throw new Error("it has labels of no class");
  if (looks && !(looks.data instanceof Uint8Array && looks.data.length === count * LENGTH)) throw new Error("it does not have a perceptual hash for each image");
  const small = ends ? slices(thumbnails?.data, ends.data) : [];
  const images = names.map((/** @type {string} */ name, /** @type {number} */ i) => ({
    id: i + 1,
    name,
    label: labels.data[i],
    group: groups.data[i],
    features: features.data.slice(i * width, (i + 1) * width),
    thumbnail: small[i]?.length ? small[i] : null,
    look: looks ? looks.data.slice(i * LENGTH, (i + 1) * LENGTH) : null,
  }));
  return { classes, images: renumbered(images) };
}

/** New images have groups by their id, so groups of a file become those of the first image in them.
 * @param {import("./store.js").Taught[]} images */
function renumbered(images) {
  const first = new Map();
  for (const one of images) if (!first.has(one.group)) first.set(one.group, one.id);
  return images.map((one) => ({ ...one, group: first.get(one.group) ?? one.id }));
}

/** @param {any} names @returns {string[]} */
function classesOf(names) {
  if (!Array.isArray(names) || names.length > MOST_CLASSES) throw new Error("it has no list of classes");
  /** @type {string[]} */
  const found = [];
  for (const name of names) {
    if (typeof name !== "string" || className(name, found) !== name) throw new Error("it has a class without a proper name");
    found.push(name);
  }
  return found;
}

/** @param {any} bytes @param {Int32Array} ends @returns {Uint8Array[]} */
function slices(bytes, ends) {
  let before = 0;
  const rises = ends.every((end) => end >= before && ((before = end), true));
  if (!(bytes instanceof Uint8Array) || !rises || before !== bytes.length) throw new Error("the lengths of its thumbnails are wrong");
  return Array.from(ends, (end, i) => bytes.slice(i ? ends[i - 1] : 0, end));
}

/** @param {Uint8Array} bytes @returns {{ description: any, tensors: Record<string, any> }} */
function unpacked(bytes) {
  if (bytes.length > MOST_BYTES) throw new Error(`it has more than ${MOST_BYTES / 2 ** 20} MiB`);
  if (bytes.length < 8) throw new Error("it is not a project of this page");
  const length = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  if (length > LONGEST_HEADER || 8 + length > bytes.length) throw new Error("it is not a project of this page, or it was cut short");
  let header;
  let description;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, 8 + length)));
    description = JSON.parse(header.__metadata__.vitral_project);
  } catch {
    throw new Error("it is not a project of this page");
  }
  if (typeof description !== "object" || description === null) throw new Error("it is not a project of this page");
  delete header.__metadata__;
  const tensors = Object.fromEntries(Object.entries(header).map(([name, entry]) => [name, tensor(bytes, 8 + length, entry)]));
  return { description, tensors };
}

/** @param {Uint8Array} bytes @param {number} begin @param {any} entry */
function tensor(bytes, begin, entry) {
  const kind = KINDS[entry?.dtype];
  const { shape, data_offsets: offsets } = entry ?? {};
  const whole = (/** @type {unknown} */ one) => Number.isSafeInteger(one) && Number(one) >= 0;
  if (!kind || !Array.isArray(shape) || !shape.every(whole) || !Array.isArray(offsets) || !offsets.every(whole)) throw new Error("its header is damaged");
  const [first, last] = offsets;
  const size = shape.reduce((product, one) => product * one, kind.BYTES_PER_ELEMENT);
  if (last - first !== size || begin + last > bytes.length) throw new Error("its header is damaged, or it was cut short");
  const { buffer, byteOffset } = bytes;
  return { shape, data: new kind(buffer.slice(byteOffset + begin + first, byteOffset + begin + last)) };
}
