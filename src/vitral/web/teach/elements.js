// Small helpers for the elements of the page.

export const at = (id) => document.getElementById(id);
export const percent = (share) => `${Math.round(100 * share)}%`;
export const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** Make an element with properties and children. */
export function element(name, values = {}, ...children) {
  const made = Object.assign(document.createElement(name), values);
  made.append(...children);
  return made;
}

/** Show what went wrong; an empty error hides it. */
export function showProblem(error) {
  const { title, detail, try: hint } = error?.problem ?? { title: error?.title ?? "The page failed", detail: error?.message };
  const lines = error ? [element("p", {}, element("b", { textContent: title }))] : [];
  for (const text of [detail, hint && `Try: ${hint}.`]) if (error && text) lines.push(element("p", { textContent: text }));
  at("problem").replaceChildren(...lines);
  at("problem").hidden = !error;
}

/** An error for a person, with a title and a hint. */
export function problem(title, detail, hint) {
  return Object.assign(new Error(detail), { problem: { title, detail, try: hint } });
}

/** Let files be dropped on an element. */
export function droppable(target, take) {
  let inside = 0;
  const over = (change) => {
    inside = Math.max(0, inside + change);
    target.classList.toggle("over", inside > 0);
  };
  target.addEventListener("dragenter", () => over(1));
  target.addEventListener("dragleave", () => over(-1));
  target.addEventListener("dragover", (event) => event.preventDefault());
  target.addEventListener("drop", (event) => {
    event.preventDefault();
    over(-inside);
    take([...event.dataTransfer.files]);
  });
}

const addresses = new WeakMap(); // bytes of a thumbnail → address of its image

/** The address of a thumbnail, made once. */
export function addressOf(thumbnail) {
  if (!addresses.has(thumbnail)) addresses.set(thumbnail, URL.createObjectURL(new Blob([thumbnail], { type: "image/jpeg" })));
  return addresses.get(thumbnail);
}
