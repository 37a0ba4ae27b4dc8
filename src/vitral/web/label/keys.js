// The keyboard.

/** @type {Record<string, string>} */
const SIMPLE = { u: "unsure", x: "exclude", Enter: "confirm", Backspace: "clear", Delete: "clear" };

/** @typedef {import("./main.js").Page} Page */

/**
 * Handle keys of the whole page; `page` has the functions that they call, and the parts of the page.
 * @param {Page} page
 */
export function listen(page) {
  document.addEventListener("keydown", (event) => {
    if (handled(event, page)) event.preventDefault();
  });
}

/**
 * True for a key that did something.
 * @param {KeyboardEvent} event
 * @param {Page} page
 * @returns {unknown}
 */
function handled(event, page) {
  const { key } = event;
  const element = document.activeElement ?? document.body;
  if (event.altKey || element.matches("input[type=text], select") || document.querySelector("dialog[open]:not(#large)")) return false;
  if (event.ctrlKey || event.metaKey) return controlled(event, page);
  if (key === "z" || key === "Z") return page.act({ do: event.shiftKey ? "redo" : "undo" });
  if (key === "y") return page.act({ do: "redo" });
  if (key === "?") return page.help();
  if (key === "c" && !page.large.open) return done(page.classes.focus());
  if (key === "a" || key === "A") return page.take();
  if ((key === "s" || key === "S") && !page.large.open) return done(page.similar());
  if (/^[0-9]$/.test(key)) return digit(Number(key), page);
  if (element.matches("button, input") && (key === "Enter" || key === " ")) return false;
  const simple = SIMPLE[key] || SIMPLE[key.toLowerCase()];
  if (simple) return page.mark(simple);
  return moved(event, page);
}

/** @param {unknown} _ what a key did */
const done = (_) => true;

/**
 * @param {KeyboardEvent} event
 * @param {Page} page
 */
function controlled({ key, shiftKey }, page) {
  if (key === "a" && !page.large.open) return done(page.selection.all());
  if (key === "z" || key === "Z") return page.act({ do: shiftKey ? "redo" : "undo" });
  return false;
}

/**
 * @param {number} number
 * @param {Page} page
 */
function digit(number, page) {
  const name = page.classes.byDigit(number);
  if (name === undefined) return page.say(`There is no class ${number || 10} yet`);
  return page.label(name);
}

/**
 * @param {KeyboardEvent} event
 * @param {Page} page
 */
function moved({ key, shiftKey }, { grid, selection, large }) {
  const rows = Math.max(1, Math.floor(grid.element.clientHeight / grid.row));
  /** @type {Record<string, number>} */
  const steps = {
    ArrowLeft: -1,
    ArrowRight: 1,
    ArrowUp: large.open ? -1 : -grid.columns,
    ArrowDown: large.open ? 1 : grid.columns,
    PageUp: -grid.columns * rows,
    PageDown: grid.columns * rows,
    Home: -Infinity,
    End: Infinity,
  };
  if (key === " ") {
    if (large.open) large.close();
    else large.show();
    return true;
  }
  if (key === "Escape") {
    if (large.open) return false; // the dialog closes itself
    selection.none();
    return true;
  }
  if (!(key in steps) || document.activeElement?.matches("input")) return false;
  selection.move(steps[key], shiftKey && !large.open);
  grid.reveal();
  grid.element.focus();
  return true;
}
