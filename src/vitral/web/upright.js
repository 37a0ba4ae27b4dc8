// The orientation of a WebP, which browsers do not read: turn its pixels as those of a JPEG are.

const ORIENTATION = 0x0112; // EXIF 2.32, 4.6.4 A

/** EXIF orientation of a WebP file, 1 to 8; 0 for other files, which the browser turns itself.
 * @param {Uint8Array} bytes */
export function orientation(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (bytes.length < 12 || text(view, 0) !== "RIFF" || text(view, 8) !== "WEBP") return 0;
  for (let at = 12; at + 8 <= bytes.length; ) {
    const size = view.getUint32(at + 4, true);
    if (text(view, at) === "EXIF") return tag(bytes.subarray(at + 8, at + 8 + size));
    at += 8 + size + (size % 2);
  }
  return 1;
}

/** The value of the tag in EXIF data; 1 if it is missing or damaged.
 * @param {Uint8Array} exif */
function tag(exif) {
  const start = exif.length > 6 && exif[0] === 0x45 && exif[4] === 0 ? 6 : 0; // some write "Exif\0\0" before it
  const view = new DataView(exif.buffer, exif.byteOffset + start, exif.length - start);
  try {
    const little = view.getUint16(0) === 0x4949;
    const first = view.getUint32(4, little);
    for (let entry = 0; entry < view.getUint16(first, little); entry++) {
      const at = first + 2 + 12 * entry;
      const value = view.getUint16(at + 8, little);
      if (view.getUint16(at, little) === ORIENTATION) return value >= 1 && value <= 8 ? value : 1;
    }
  } catch {
    // cut off
  }
  return 1;
}

/** @param {DataView} view @param {number} at */
const text = (view, at) => String.fromCharCode(...[0, 1, 2, 3].map((k) => view.getUint8(at + k)));

/** Size of the upright image, and the matrix that draws pixels (width × height) upright.
 * @param {number} turn @param {number} width @param {number} height */
export function upright(turn, width, height) {
  /** @type {Record<number, number[]>} */
  const matrices = {
    2: [-1, 0, 0, 1, width, 0],
    3: [-1, 0, 0, -1, width, height],
    4: [1, 0, 0, -1, 0, height],
    5: [0, 1, 1, 0, 0, 0],
    6: [0, 1, -1, 0, height, 0],
    7: [0, -1, -1, 0, height, width],
    8: [0, -1, 1, 0, 0, width],
  };
  const matrix = matrices[turn] ?? [1, 0, 0, 1, 0, 0];
  return { width: turn >= 5 ? height : width, height: turn >= 5 ? width : height, matrix };
}
