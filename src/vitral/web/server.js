// Answers from a server that runs vitral serve; browser.js has the same functions.

import { Refusal } from "./refusal.js";

let token = "";

/** Use this token for every request from now on. */
export function setToken(text) {
  token = text;
}

/** `models`, the default first, with name, classes, image_size, parameters, methods; and `limits`: bytes of a `body`. */
export function models() {
  return ask("v1/models");
}

/** The prediction of one image; `options` are parameters: model, top, explain, target, overlay. */
export async function predict(image, name, options) {
  const body = new FormData();
  body.append("image", image, name);
  for (const [key, value] of Object.entries(options)) if (value !== "") body.append(key, value);
  return (await ask("v1/predict", { method: "POST", body })).predictions[0];
}

async function ask(path, options = {}) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch {
    throw new Refusal({ title: "The server does not answer", detail: "", try: "see if it runs, and try again", status: 0 });
  }
  const type = response.headers.get("Content-Type") || "";
  if (response.ok) return response.json();
  if (type.startsWith("application/problem+json")) throw new Refusal(await response.json());
  throw new Refusal({ title: `The server answered ${response.status}`, detail: "", try: "try again", status: response.status });
}
