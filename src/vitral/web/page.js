// The page: an image in, classes and their evidence out. Answers come from source.js: a server, or this browser.

import { Refusal } from "./refusal.js";
import { tint } from "./overlay.js";
import * as source from "./source.js";
import { STYLES } from "./styles.js";

const MOST = 24; // images in the history
const SMALL = 96; // pixels; smaller images are enlarged without smoothing
const at = (id) => document.getElementById(id);
const SHOWN = /^image\/(png|jpeg|webp|gif|avif|bmp)$/; // formats that browsers show
const MAP = 448; // pixels of a map, along its longer side
const MOST_NAMES = 200; // classes that are listed
const FIRST_NAMES = 8; // classes in the line below the title
const COUNTS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"];
const percent = (share) => `${(100 * share).toFixed(1)}%`;

const megabytes = (bytes) => `${(bytes / 2 ** 20).toFixed(0)} MiB`;

let known = []; // models
let limits = {};
let history = []; // { name, url, file, model, prediction, target }, newest first
let current = null;
let ready; // settled when the models are known, or asked for with another token
let asked = 0; // number of the latest question: an older answer that comes late is not shown

// ---- the start

async function start() {
  at("about").textContent = "Loading the model …";
  try {
    ({ models: known, limits } = await source.models());
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) {
      askForToken(true);
      at("about").textContent = "";
      at("token-field").focus();
      return;
    }
    at("about").textContent = "";
    showProblem(error);
    return;
  }
  askForToken(false);
  at("problem").hidden = true;
  at("model").replaceChildren(...known.map((one) => new Option(one.name, one.name)));
  at("model-choice").hidden = known.length < 2;
  describe();
  if (source.warm) (window.requestIdleCallback ?? setTimeout)(warm);
}

/** Load what the first answer needs while the visitor looks for an image. */
async function warm() {
  const tell = (text) => {
    if (!asked) at("status").textContent = text;
  };
  try {
    await source.warm(tell);
    tell("No image yet.");
  } catch (error) {
    if (!asked) showProblem(error);
  }
}

function askForToken(needed) {
  if (at("token")) at("token").hidden = !needed; // a page without a server has no such form
}

function model() {
  return known.find((one) => one.name === at("model").value) || known[0];
}

function describe() {
  const one = model();
  at("title").textContent = one.name;
  document.title = `${one.name} · vitral`;
  const names = one.classes.filter((name) => !name.startsWith("<")); // a text's start, end and padding have no name
  const millions = (one.parameters / 1e6).toFixed(one.parameters < 1e7 ? 2 : 0);
  at("about").textContent =
    `${one.classes.length} ${one.noun}: ${listed(names, FIRST_NAMES)}. ` +
    `${millions} million parameters, images of ${one.image_size.join("\u202f×\u202f")}.`;
  const limits = one.unknown_note || (one.sure ? `Answers are ${one.sure}.` : "");
  at("limits").textContent = limits;
  at("limits").hidden = !limits;
  at("method-choice").hidden = !one.methods.length;
  at("method").replaceChildren(...methodOptions(one.methods), new Option("none", ""));
  describeMethod();
  at("names-title").textContent = `${names.length} ${one.noun}`;
  at("names-list").textContent = listed(names, MOST_NAMES);
  at("names").hidden = !names.length;
}

/** Names in a line, of which at most so many are listed. */
function listed(names, most) {
  const more = names.length - most;
  return names.slice(0, most).join(", ") + (more > 0 ? ` and ${more} more` : "");
}

/** The recommended method by that word, all others by their names below it. */
function methodOptions([first, ...others]) {
  if (!first) return [];
  const group = element("optgroup", { label: "other methods" });
  group.append(...others.map((method) => new Option(method.title, method.name)));
  return [new Option("recommended", first.name), ...(others.length ? [group] : [])];
}

function describeMethod() {
  const method = model().methods.find((one) => one.name === at("method").value);
  at("method-note").textContent = method ? `${method.title}: ${method.note || `costs about ${method.passes} predictions`}` : "";
}

// ---- questions

async function take(files) {
  const given = [...files]; // now: the browser empties the list after the event
  await ready; // an image may be given before the model is known
  const images = given.filter((file) => !file.type || file.type.startsWith("image/"));
  if (!known.length || !given.length) return;
  if (!images.length) {
    refuse(given[0].name, new Refusal({ title: "This is not an image", detail: given[0].name, try: "drop a JPEG, PNG or WebP" }));
    return;
  }
  for (const file of images) {
    if (file.size > limits.body - 10_000) {
      const detail = `${file.name} has ${megabytes(file.size)}; the limit is ${megabytes(limits.body)}`;
      refuse(file.name, new Refusal({ title: "The file is too large", detail, try: "make the image smaller" }));
      continue;
    }
    const name = file.name || "pasted image";
    await question({ name, file, url: URL.createObjectURL(file), model: model().name, target: "" });
  }
}

async function tryExample() {
  const name = at("example").value;
  try {
    const answer = await fetch(name);
    if (!answer.ok) throw new Refusal({ title: "The example is gone", detail: `${answer.status}`, try: "choose an image of your own" });
    await take([new File([await answer.blob()], name, { type: "image/png" })]);
  } catch (error) {
    refuse(name, error);
  }
}

async function question(entry) {
  const number = ++asked;
  const method = at("method").value;
  at("problem").hidden = true;
  const tell = (text) => {
    if (number === asked) at("status").textContent = text || `Classifying ${entry.name} …`;
  };
  tell();
  at("answer").classList.add("busy");
  try {
    const target = entry.target || defaultTarget(entry.model);
    const seen = SHOWN.test(entry.file.type) ? {} : { overlay: "true" }; // what the network saw, where no browser shows it
    const explaining = method ? { explain: method, target, ...seen } : {};
    const prediction = await source.predict(
      entry.file, entry.name, { model: entry.model, top: "8", ...explaining }, tell,
    );
    const answered = { ...entry, prediction };
    remember(answered);
    if (number === asked) show(answered);
  } catch (error) {
    if (number === asked) {
      refuse(entry.name, error);
    }
  } finally {
    if (number === asked) at("answer").classList.remove("busy");
  }
}

// ---- answers

/** Show why there is no answer, in the place of the last one. */
function refuse(name, error) {
  current = null;
  at("answer").hidden = true;
  at("status").textContent = name;
  showHistory();
  showProblem(error);
}

/** The main line of a prediction, and what stands small beside it: of a class, of labels, of numbers or of a text. */
function headline({ prediction, model: answering }) {
  const { label, labels, numbers, text, confidence, unknown, top, answer } = prediction;
  const many = known.find((one) => one.name === answering)?.classes.length ?? 0;
  if (unknown) {
    return [`none of the ${COUNTS[many] ?? many} classes`, `nearest: ${top[0].class}, ${percent(top[0].probability)}`];
  }
  if (text !== undefined) return [text || "no text", percent(confidence)];
  if (numbers) return [Object.entries(numbers).map(([name, value]) => `${name} ${amount(value)}`).join(", "), ""];
  if (labels) return [labels.map((one) => one.label).join(", ") || "no label", ""];
  if (answer !== undefined) {
    return answer === label ? [label, percent(confidence)] : [answer, `perhaps: ${label}, ${percent(confidence)}`];
  }
  return [label, confidence < sure(many) ? `${percent(confidence)}, unsure` : percent(confidence)];
}

/** The probability below which a class is marked: half way from chance to certainty, 75% for two classes. */
export function sure(classes) {
  return (1 + 1 / Math.max(classes, 2)) / 2;
}

function lines({ top, numbers, characters }) {
  if (characters) {
    return characters.map((one) => ({
      name: spelled(one.character), share: one.probability, text: percent(one.probability),
    }));
  }
  if (numbers) return Object.entries(numbers).map(([name, value]) => ({ name, share: 0, text: amount(value) }));
  return top.map((one) => ({ name: one.class ?? one.label, share: one.probability, text: percent(one.probability) }));
}

function amount(value) {
  return String(Number(value.toPrecision(6)));
}

/** One of several numbers is explained; classes and labels have a predicted one. */
function defaultTarget(name) {
  return known.find((one) => one.name === name)?.target ?? "";
}

function show(entry) {
  current = entry;
  const { prediction } = entry;
  at("problem").hidden = true;
  at("answer").hidden = false;
  const [main, small] = headline(entry);
  at("label").textContent = main;
  at("confidence").textContent = small;
  const spoken = `: ${[main, small].filter(Boolean).join(", ")}`;
  at("status").replaceChildren(entry.name, element("span", { className: "spoken", textContent: spoken }));
  showImage(entry);
  showClasses(entry);
  showHistory();
  if (matchMedia("(max-width: 900px)").matches) at("result").scrollIntoView(); // it lies below the question there
}

/** The map that is shown: of a text, that of the chosen character. */
function mapOf({ prediction: { explanation }, place = 0 }) {
  if (!explanation?.characters) return explanation;
  const chosen = explanation.characters[place];
  return chosen?.values && { ...explanation, ...chosen, label: spelled(chosen.character) };
}

/** A character as it can be read. */
function spelled(character) {
  return character.trim() ? character : "space";
}

function showImage(entry) {
  const { name, url, model: answering, prediction } = entry;
  const found = mapOf(entry);
  const one = known.find((each) => each.name === answering);
  const image = at("image");
  image.onload = () => arrange(found, one, image.src === found?.image);
  image.onerror = () => {
    if (found?.image && image.src !== found.image) image.src = found.image;
  };
  if (image.src !== url) image.src = url;
  else if (image.complete) image.onload(); // the same picture again, with another map
  image.alt = name;
  at("overlay").hidden = at("opacity-row").hidden = !found;
  at("legend").hidden = at("brightness").hidden = true;
  if (!found) {
    at("image").style.filter = "";
    at("caption").textContent = "";
    return;
  }
  const signed = one.methods.find((each) => each.name === found.method)?.signed;
  const subject = `the ${signed && prediction.text === undefined ? "evidence" : "attention"} for ${found.label}`;
  at("overlay").alt = `heat map of ${subject}`;
  const method = one.methods.find((each) => each.name === found.method);
  const title = method?.title || found.method;
  at("legend").hidden = !signed;
  at("brightness").hidden = signed;
  const note = found.note ? `: ${found.note}` : "";
  const what = subject.replace(/^the (.)/, (_, first) => first.toUpperCase());
  at("caption").textContent = `${what}, by ${title}${note}. The network sees ${one.image_size.join("\u202f×\u202f")} pixels.`;
  fade();
}

/** Give the picture its room, and lay the map over the part of it that the network saw; `seen`: it is that part. */
function arrange(found, one, seen) {
  const { naturalWidth: width, naturalHeight: height } = at("image");
  at("image").classList.toggle("pixelated", Math.max(width, height) < SMALL);
  at("stack").style.aspectRatio = `${width} / ${height}`;
  at("stack").style.maxWidth = `${(60 * width) / height}vh`;
  if (!found) return;
  const { share, size } = region([height, width], seen ? {} : one.preprocessing);
  const method = one.methods.find((each) => each.name === found.method);
  at("overlay").src = drawn(found, size, STYLES[method?.signed ? "signed" : "unsigned"]);
  const [tall, wide] = share;
  const place = { left: (1 - wide) / 2, top: (1 - tall) / 2, width: wide, height: tall };
  for (const [side, value] of Object.entries(place)) at("overlay").style[side] = `${100 * value}%`;
}

/** The part of an image that a network sees, from its middle: `share` of height and width, and its `size`. */
export function region([height, width], { resize, image_size: size, resize_size: before, crop_fraction: fraction }) {
  if (!resize || resize === "native") return { share: [1, 1], size: [height, width] };
  const sides = before ?? size;
  const ratios = [sides[0] / height, sides[1] / width];
  if (resize === "stretch") return { share: [size[0] / sides[0], size[1] / sides[1]], size };
  const scale = resize === "letterbox" ? Math.min(...ratios) : Math.max(...ratios) / (before ? 1 : fraction);
  return { share: [size[0] / (height * scale), size[1] / (width * scale)], size };
}

/** A map as the address of a picture. */
function drawn({ values, grid }, [height, width], style) {
  const rows = grid ?? [values.length, values[0].length];
  const scale = MAP / Math.max(height, width);
  const size = [height, width].map((side) => Math.max(1, Math.round(side * scale)));
  const { data } = tint(values.flat(), rows, size, { ...style, opacity: 1 }); // the slider sets the opacity
  const canvas = element("canvas", { width: size[1], height: size[0] });
  canvas.getContext("2d").putImageData(new ImageData(data, size[1], size[0]), 0, 0);
  return canvas.toDataURL();
}

function fade() {
  const value = at("opacity").value;
  at("overlay").style.opacity = value / 100;
  at("image").style.filter = `grayscale(${Math.max(0, 2 * value - 100)}%)`; // a strong map hides the colors anyway
  at("opacity").setAttribute("aria-valuetext", `${value} percent`);
  at("opacity-value").textContent = `${value}%`;
}

function showClasses(entry) {
  const { explanation, numbers, characters } = entry.prediction;
  const top = lines(entry.prediction);
  at("classes-title").textContent = numbers ? "Numbers" : characters ? "Characters" : "Probabilities";
  const rows = top.map((one, place) => classRow(entry, one, explanation, place));
  const focused = at("classes").contains(document.activeElement) ? explanation?.label : null;
  at("classes").replaceChildren(...rows);
  rows[top.findIndex((one) => one.name === focused)]?.firstChild.focus();
  const all = known.find((one) => one.name === entry.model)?.classes.length || top.length;
  const parts = [];
  if (top.length < all && !characters) parts.push(`The first ${top.length} of ${all} classes.`);
  if (explanation && !characters) parts.push("Choose a class to see the evidence for it.");
  if (explanation && characters?.length) parts.push("Choose a character to see where the network looked.");
  at("classes-note").textContent = parts.join(" ");
}

function classRow(entry, one, explanation, place) {
  const maps = explanation?.characters;
  const button = element("button", { type: "button", disabled: maps ? !maps[place]?.values : !explanation });
  const fill = element("i");
  fill.style.width = percent(one.share);
  const bar = element("span", { className: "bar", ariaHidden: "true" }, fill);
  button.append(
    element("span", { className: "name", textContent: one.name }),
    element("span", { className: "share", textContent: one.text }),
    bar,
  );
  if (maps) {
    button.setAttribute("aria-pressed", String(place === (entry.place ?? 0)));
    button.onclick = () => {
      show({ ...entry, place });
      at("classes").children[place].firstChild.focus();
    };
  } else if (explanation) {
    button.setAttribute("aria-pressed", String(explanation.label === one.name));
    button.onclick = () => question({ ...entry, target: one.name });
  }
  return element("li", {}, button);
}

function remember(entry) {
  const same = history.findIndex((one) => one.url === entry.url);
  if (same >= 0) history[same] = entry;
  else history.unshift(entry);
  for (const one of history.splice(MOST)) URL.revokeObjectURL(one.url);
}

function showHistory() {
  at("history").hidden = !history.length;
  at("gallery").replaceChildren(
    ...history.map((entry) => {
      const image = element("img", { src: entry.url, alt: "" });
      image.onload = () => image.classList.toggle("pixelated", image.naturalWidth < SMALL);
      const label = headline(entry).filter(Boolean).join(", ");
      const button = element(
        "button", { type: "button", title: entry.name }, image,
        element("span", { textContent: label }), element("span", { className: "file", textContent: entry.name }),
      );
      if (current && entry.url === current.url) button.setAttribute("aria-current", "true");
      button.onclick = () => {
        asked += 1; // an answer that is on its way would replace this one
        at("answer").classList.remove("busy");
        show(entry);
        at("result-title").focus();
      };
      return element("li", {}, button);
    }),
  );
}

function showProblem(error) {
  const title = error instanceof Refusal ? error.title : "The page failed";
  const lines = [element("b", { textContent: title })];
  const detail = error instanceof Refusal ? error.detail : String(error);
  at("problem").replaceChildren(
    element("p", {}, ...lines),
    ...[detail, error.hint && `Try: ${error.hint}.`].filter(Boolean).map((text) => element("p", { textContent: text })),
  );
  at("problem").hidden = false;
}

function element(name, values = {}, ...children) {
  const made = Object.assign(document.createElement(name), values);
  made.append(...children);
  return made;
}

// ---- the camera

let stream = null; // while the dialog is open

async function openCamera() {
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: 1280 } });
  } catch (error) {
    const hint = "allow it for this page, or choose a file";
    showProblem(new Refusal({ title: "The camera cannot be used", detail: error.message, try: hint }));
    return;
  }
  at("camera-view").srcObject = stream;
  at("camera-dialog").showModal();
}

function closeCamera() {
  for (const track of stream?.getTracks() || []) track.stop();
  stream = at("camera-view").srcObject = null;
}

async function photograph() {
  const view = at("camera-view");
  const canvas = element("canvas", { width: view.videoWidth, height: view.videoHeight });
  canvas.getContext("2d").drawImage(view, 0, 0);
  at("camera-dialog").close();
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  await take([new File([blob], `photo ${new Date().toLocaleTimeString()}`, { type: "image/png" })]);
}

// ---- events

if (navigator.mediaDevices?.getUserMedia) at("camera").hidden = false; // only in a secure context
at("camera").addEventListener("click", openCamera);
at("example")?.addEventListener("click", tryExample);
at("camera-dialog").addEventListener("close", closeCamera);
at("camera-cancel").addEventListener("click", () => at("camera-dialog").close());
at("camera-view").addEventListener("playing", () => {
  at("camera-take").disabled = false;
});
at("camera-take").addEventListener("click", photograph);

at("file").addEventListener("change", (event) => {
  take(event.target.files);
  event.target.value = ""; // so that the same file can be chosen again
});
document.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) take(event.clipboardData.files);
});
let inside = 0;
document.addEventListener("dragenter", () => {
  inside += 1;
  at("drop").classList.add("over");
});
document.addEventListener("dragleave", () => {
  inside -= 1;
  if (inside <= 0) at("drop").classList.remove("over");
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  inside = 0;
  at("drop").classList.remove("over");
  take(event.dataTransfer.files);
});
at("opacity").addEventListener("input", fade);
at("model").addEventListener("change", () => {
  describe();
  if (current) question({ ...current, model: model().name, target: "" });
});
at("method").addEventListener("change", () => {
  describeMethod();
  if (current) question(current);
});
at("clear").addEventListener("click", () => {
  for (const one of history) if (one.url !== current?.url) URL.revokeObjectURL(one.url);
  history = [];
  showHistory();
  at("result-title").focus();
});
at("token-form")?.addEventListener("submit", (event) => {
  event.preventDefault();
  source.setToken(at("token-field").value.trim());
  at("token-field").value = "";
  ready = start();
});

ready = start();
