// Heat maps over images, with the arithmetic and the colors of src/vitral/explanation/drawing.py.

import { FILTERS, even, weights } from "./resize.js";

/** The network's input, uint8 (channels, height, width), as RGBA for the screen: enlarged if it is small. */
export function enlarged(pixels, [height, width], channels, { size, pixelated }) {
  const longer = Math.max(height, width);
  const target = Math.max(longer, size);
  const shape = [height, width].map((side) => Math.max(1, even((side * target) / longer)));
  const plane = (c) => pixels.subarray(c * height * width, (c + 1) * height * width);
  const filter = longer < pixelated && target > longer ? null : FILTERS.lanczos;
  const planes = Array.from({ length: channels }, (_, c) => resample(plane(c), [height, width], shape, filter));
  const rgba = new Uint8ClampedArray(4 * shape[0] * shape[1]);
  for (let i = 0; i < shape[0] * shape[1]; i++) {
    for (let c = 0; c < 3; c++) rgba[4 * i + c] = planes[channels === 1 ? 0 : c][i]; // rounds and clamps
    rgba[4 * i + 3] = 255;
  }
  return { data: rgba, height: shape[0], width: shape[1] };
}

/** An enlarged image in gray with the map `values` (rows, columns) over it. Strong patches are opaque, weak ones
 * transparent. */
export function overlay(image, values, grid, style) {
  const drawn = tint(values, grid, [image.height, image.width], style);
  for (let i = 0; i < drawn.data.length; i += 4) {
    const opacity = drawn.opacity[i / 4];
    const [r, g, b] = image.data.subarray(i, i + 3);
    const gray = 255 * 0.15 + 0.8 * ((r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16); // dark colors show on black
    for (let c = 0; c < 3; c++) drawn.data[i + c] = gray * (1 - opacity) + drawn.data[i + c] * opacity;
    drawn.data[i + 3] = 255;
  }
  return drawn;
}

/** The map alone, as RGBA of this size, to lie over any picture. */
export function tint(values, grid, [height, width], style) {
  const { strength, low, high } = scaled(values, style.signed);
  const smooth = resample(strength, grid, [height, width], FILTERS.bicubic);
  const data = new Uint8ClampedArray(4 * smooth.length);
  const opacity = new Float32Array(smooth.length);
  for (let i = 0; i < smooth.length; i++) {
    const value = Math.min(Math.max(smooth[i], low), high); // bicubic interpolation overshoots
    const place = style.signed ? (value + 1) / 2 : value;
    const color = style.colors[Math.min(Math.floor(place * style.colors.length), style.colors.length - 1)];
    opacity[i] = style.opacity * Math.abs(value) ** style.power;
    data.set([...color, 255 * opacity[i]], 4 * i);
  }
  return { data, opacity, height, width };
}

/** Values scaled to 0 … 1, or −1 … 1 if signed, and their limits; a constant map is 0. */
function scaled(values, signed) {
  const least = Math.min(...values);
  const most = Math.max(...values);
  const base = signed ? 0 : least;
  const span = Math.max((signed ? Math.max(-least, most) : most) - base, 1.1754943508222875e-38);
  const strength = Float32Array.from(values, (value) => (value - base) / span);
  return { strength, low: Math.min(...strength), high: Math.max(...strength) };
}

/** Resize a plane from [rows, columns] to [rows, columns]; without a filter, to the nearest pixel. */
function resample(plane, [rows, columns], [tall, wide], filter) {
  const along = (length, size) =>
    filter
      ? weights(length, size, 0, size, filter)
      : Array.from({ length: size }, (_, i) => ({ first: Math.floor(((i + 0.5) * length) / size), weights: [1] }));
  const across = along(columns, wide);
  const down = along(rows, tall);
  const narrow = new Float32Array(rows * wide);
  const result = new Float32Array(tall * wide);
  for (let y = 0; y < rows; y++) {
    for (let x = 0; x < wide; x++) {
      const { first, weights: of } = across[x];
      for (let k = 0; k < of.length; k++) narrow[y * wide + x] += of[k] * plane[y * columns + first + k];
    }
  }
  for (let y = 0; y < tall; y++) {
    const { first, weights: of } = down[y];
    for (let k = 0; k < of.length; k++) {
      for (let x = 0; x < wide; x++) result[y * wide + x] += of[k] * narrow[(first + k) * wide + x];
    }
  }
  return result;
}
