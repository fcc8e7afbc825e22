// Colour maps with increasing lightness, and functions that colour pixels by values.

const HEAT = [[13, 8, 135], [84, 2, 163], [139, 10, 165], [185, 50, 137], [219, 92, 104], [244, 136, 73], [254, 188, 43], [240, 249, 33]]; // plasma, as in reports
// for similarities
const ALIKE = [[24, 22, 66], [36, 72, 122], [36, 128, 140], [76, 182, 130], [170, 218, 92], [250, 240, 140]];

/** Interpolate colours to a table of 256 RGB colours. */
function ramp(anchors) {
  const table = new Uint8ClampedArray(256 * 3);
  for (let step = 0; step < 256; step++) {
    const position = (step / 255) * (anchors.length - 1);
    const low = Math.min(Math.floor(position), anchors.length - 2);
    for (let c = 0; c < 3; c++) table[3 * step + c] = anchors[low][c] + (position - low) * (anchors[low + 1][c] - anchors[low][c]);
  }
  return table;
}

export const heat = ramp(HEAT);
export const alike = ramp(ALIKE);

/** Draw values in [0, 1], `width` per row, as a canvas with one pixel per value. `paint(value, rgba, at)` sets the pixel at `rgba[at]`. */
export function painted(values, width, paint) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = values.length / width;
  const image = new ImageData(width, canvas.height);
  values.forEach((value, index) => paint(value, image.data, 4 * index));
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

/** Return a `paint` function for a colour map with opacity `alpha` in [0, 1]; if `rising`, low values are more transparent. */
export const coloured = (table, alpha = 1, rising = false) => (value, rgba, at) => {
  const share = Math.min(1, Math.max(0, value)), step = 3 * Math.round(255 * share);
  for (let c = 0; c < 3; c++) rgba[at + c] = table[step + c];
  rgba[at + 3] = 255 * (rising ? alpha ** (2.6 - 2 * share) : alpha);
};

/** Return a `paint` function that darkens low values: black, with opacity `alpha` for 0 and transparent for 1. */
export const darkened = (alpha) => (value, rgba, at) => {
  rgba[at + 3] = 255 * alpha * (1 - Math.min(1, Math.max(0, value)));
};
