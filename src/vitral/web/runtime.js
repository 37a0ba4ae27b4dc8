// Run a network in ONNX Runtime Web: WebGPU where there is one, else WebAssembly.

/** @typedef {"wasm" | "webgpu"} Runtime */
/** @typedef {(text: string) => void} Tell is called with the current activity. */
/** @typedef {(session: any) => Promise<void>} Check throws for a session that computes something else. */

/** Load model.onnx and its runtime, and open a session that passes `check`.
 * @param {Check} check @param {Tell} tell */
export async function start(check, tell) {
  const bytes = await load("model.onnx", "the network", tell);
  if (await hasGPU()) {
    try {
      return await open("webgpu", bytes, check, tell);
    } catch (error) {
      console.info(`WebGPU is not used: ${/** @type {Error} */ (error).message}`);
    }
  }
  return open("wasm", bytes, check, tell);
}

async function hasGPU() {
  try {
    return Boolean(await /** @type {any} */ (navigator).gpu?.requestAdapter()); // TypeScript does not know WebGPU
  } catch {
    return false;
  }
}

const PROGRAM = { wasm: "ort-wasm-simd-threaded.wasm", webgpu: "ort-wasm-simd-threaded.asyncify.wasm" };

/** @param {Runtime} runtime @param {Uint8Array} bytes @param {Check} check @param {Tell} tell */
async function open(runtime, bytes, check, tell) {
  const name = `runtime/ort.${runtime}.bundle.min.js`;
  const ort = await import(`./${name}`).catch(() => {
    throw incomplete(`${name} cannot be loaded`);
  });
  ort.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(navigator.hardwareConcurrency || 1, 8) : 1;
  ort.env.logLevel = "error";
  // Fetched here, since browsers complain of hosts that do not know the type of .wasm.
  ort.env.wasm.wasmBinary = (await load(`runtime/${PROGRAM[runtime]}`, "its runtime", tell)).buffer;
  tell("Starting the network …");
  const session = await ort.InferenceSession.create(bytes, { executionProviders: [runtime], logSeverityLevel: 3 });
  session.ort = ort;
  await check(session);
  return { session, runtime };
}

/** @param {string} name @param {string} what @param {Tell} tell */
async function load(name, what, tell) {
  const response = await fetch(new URL(name, import.meta.url)).catch(() => {
    throw incomplete(`${name} cannot be loaded`);
  });
  if (!response.ok || !response.body) throw incomplete(`${name}: the server answered ${response.status}`);
  const total = Number(response.headers.get("Content-Length")) || 0;
  const parts = [];
  let received = 0;
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    received += value.length;
    // Compressed by the server, the file is longer than its Content-Length.
    const of = received <= total ? ` of ${megabytes(total)}` : "";
    tell(`Loading ${what}: ${megabytes(received)}${of} …`);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

/** @param {number} bytes */
const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)}\u202fMB`;

/** @param {string} detail */
function incomplete(detail) {
  const problem = { title: "The page is not complete", detail, try: "check the connection, and load the page again" };
  return Object.assign(new Error(detail), { problem });
}
