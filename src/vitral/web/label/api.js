// Requests to the server of vitral label. The token comes in the address and is kept for this tab alone.

const KEY = "vitral-label-token";

/** Take the token out of the address, where it would stay in the history. */
export function takeToken() {
  const token = location.hash.slice(1);
  if (token.length > 20) {
    sessionStorage.setItem(KEY, token);
    history.replaceState(null, "", location.pathname);
  }
}

/** A request that was refused: `title`, `detail` and `hint` for a person, `status` for programs; 0 without an answer. */
export class Refusal extends Error {
  constructor(problem) {
    super([problem.title, problem.detail].filter(Boolean).join(": "));
    this.hint = problem.try || "";
    this.status = problem.status;
  }
}

async function ask(path, options = {}) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(KEY) || ""}`, ...options.headers };
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Refusal({ title: "The server does not answer", try: "start vitral label again; your labels are saved", status: 0 });
  }
  if (response.ok) return response;
  const type = response.headers.get("Content-Type") || "";
  const problem = type.startsWith("application/problem+json") ? await response.json() : { title: `The server answered ${response.status}` };
  throw new Refusal({ ...problem, status: response.status });
}

/** Everything: names of the images, classes and marks. */
export async function state() {
  return (await ask("v1/state")).json();
}

/** What changed since a version; the answer waits until there is something. */
export async function changes(version, insight) {
  return (await ask(`v1/changes?since=${version}&insight=${insight}`)).json();
}

/** All images, the most similar to one first. */
export async function similar(number) {
  return (await ask(`v1/images/${number}/similar`)).json();
}

/** The nearest images of the label of an image, `own`, and of the class that is suggested for it, `other`. */
export async function neighbors(number) {
  return (await ask(`v1/images/${number}/neighbors`)).json();
}

/** Apply an action: `do`, and `images`, `label`, `labels`, `name` where it needs them. */
export async function act(action, version) {
  const body = JSON.stringify({ ...action, version });
  return (await ask("v1/actions", { method: "POST", body, headers: { "Content-Type": "application/json" } })).json();
}

/** The run that was started last. */
export async function training() {
  return (await ask("v1/training")).json();
}

/** Start a run of some minutes. */
export async function train(minutes) {
  const body = JSON.stringify({ minutes });
  return (await ask("v1/training", { method: "POST", body, headers: { "Content-Type": "application/json" } })).json();
}

/** Ask the run to save itself and end. */
export async function stopTraining() {
  return (await ask("v1/training", { method: "DELETE" })).json();
}

/** End the server. */
export async function finish() {
  return (await ask("v1/finish", { method: "POST" })).json();
}

/** An image as a blob; `size` is small or large. */
export async function image(number, size, signal) {
  return (await ask(`v1/images/${number}/${size}`, { signal })).blob();
}
