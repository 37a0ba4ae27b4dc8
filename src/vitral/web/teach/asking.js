// Questions to a worker, answered in any order.

/** A function `(question, tell, transfer) → promise` of the answers of a module worker.
 * @param {string} file */
export function asking(file) {
  const worker = new Worker(file, { type: "module" });
  /** Number of a question → what waits for its answer.
   * @type {Map<number, any>} */
  const waiting = new Map();
  let questions = 0;
  worker.onmessage = ({ data: { id, doing, answer, problem } }) => {
    const { resolve, reject, tell } = waiting.get(id);
    if (doing !== undefined) {
      tell(doing);
      return;
    }
    waiting.delete(id);
    if (problem) reject(Object.assign(new Error(problem.detail), { problem }));
    else resolve(answer);
  };
  worker.onerror = (event) => {
    for (const { reject } of waiting.values()) reject(new Error(event.message || "the worker did not start"));
    waiting.clear();
  };
  /** @param {any} question @param {(text: string) => void} tell @param {Transferable[]} transfer @returns {Promise<any>} */
  const ask = (question, tell = () => {}, transfer = []) => {
    questions += 1;
    const id = questions;
    return new Promise((resolve, reject) => {
      waiting.set(id, { resolve, reject, tell });
      worker.postMessage({ id, question }, transfer);
    });
  };
  return ask;
}
