// The stage: a canvas with the image, the region of it that the model sees, overlays, and the query patch.

import { coloured, darkened, heat, painted } from "./colours.js";
import { part } from "./page.js";

const LARGEST = 1600; // maximum height and width of a displayed image in pixels

/** Open an image file as the browser displays it: upright, and downscaled if it is large. Null if the browser does not support the format. */
export async function opened(file) {
  const image = new Image();
  image.src = URL.createObjectURL(file);
  try {
    await image.decode();
    const { naturalWidth: width, naturalHeight: height } = image;
    const share = Math.min(1, LARGEST / Math.max(width, height));
    const size = { width: Math.max(1, Math.round(width * share)), height: Math.max(1, Math.round(height * share)) };
    const canvas = Object.assign(document.createElement("canvas"), size);
    const pen = canvas.getContext("2d");
    pen.fillStyle = "#fff"; // transparent images are composited on white, as on the server
    pen.fillRect(0, 0, size.width, size.height);
    pen.imageSmoothingQuality = "high";
    pen.drawImage(image, 0, 0, size.width, size.height);
    return { pixels: canvas, width, height };
  } catch {
    return null;
  } finally {
    URL.revokeObjectURL(image.src);
  }
}

export class Stage {
  /** `plain`: a canvas for the image without its map.
      Properties set by the panels: `shown`, the result of `opened`; `layer`, an overlay canvas with opacity `cover`; `objects`, a
      function that draws on an image of `size`; `map`, an attention map {weights, least, most, grid, box, query} with (rows *
      columns) weights and the ends of their colour scale. */
  constructor(canvas, plain = null) {
    Object.assign(this, { canvas, plain, shown: null, map: null, layer: null, size: null, objects: null, cover: 0.55, cursor: null, focused: false, view: "heat", smooth: true, strength: 0.65, zoomed: false, due: false });
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Draw before the browser's next frame; several calls until then draw once. */
  draw() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => { this.due = false; this.paint(); });
  }

  /** The rectangle of the image on the canvas, in canvas pixels. */
  place() {
    const { width: wide, height: high } = this.canvas;
    const [rows, columns] = this.map?.grid ?? [1, 1]; // if the browser cannot display the image
    const { width, height } = this.shown ?? this.layer ?? this.size ?? { width: columns, height: rows };
    const [left, top, right, bottom] = this.zoomed && this.map ? this.map.box : [0, 0, 1, 1];
    const share = Math.min(wide / (width * (right - left)), high / (height * (bottom - top)));
    return {
      left: wide / 2 - (width * share * (left + right)) / 2, top: high / 2 - (height * share * (top + bottom)) / 2,
      width: width * share, height: height * share,
    };
  }

  /** The rectangle on the canvas of the region that the model sees, in canvas pixels. */
  seen() {
    const whole = this.place(), [left, top, right, bottom] = this.map.box;
    return {
      left: whole.left + left * whole.width, top: whole.top + top * whole.height,
      width: (right - left) * whole.width, height: (bottom - top) * whole.height,
    };
  }

  /** Draw the image and its overlays now. */
  paint() {
    const { canvas } = this, times = window.devicePixelRatio || 1;
    const wide = Math.round(canvas.clientWidth * times), high = Math.round(canvas.clientHeight * times);
    if (!wide || !high) return;
    if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, wide, high);
    this.paintPlain(times);
    if (!this.shown && !this.map && !this.layer && !this.size) return;
    const whole = this.place();
    if (this.shown) {
      const { pixels } = this.shown;
      pen.imageSmoothingEnabled = whole.width < 4 * pixels.width; // a tiny image is enlarged without smoothing
      pen.imageSmoothingQuality = "high";
      pen.drawImage(pixels, whole.left, whole.top, whole.width, whole.height);
    }
    if (this.layer) {
      pen.globalAlpha = this.cover;
      pen.imageSmoothingEnabled = whole.width < this.layer.width;
      pen.drawImage(this.layer, whole.left, whole.top, whole.width, whole.height);
      pen.globalAlpha = 1;
    }
    if (this.objects) this.objects(pen, whole, times);
    if (this.map) this.over(pen, whole, times);
  }

  /** Draw the small image without its map, with a frame around the query patch. */
  paintPlain(times) {
    const { plain } = this;
    if (!plain) return;
    plain.hidden = !this.shown && Boolean(this.map); // the browser cannot display the image
    if (!this.shown) Object.assign(plain, { width: 1, height: 1 });
    if (!this.shown) return;
    const { pixels, width, height } = this.shown, whole = this.place();
    const high = Math.round(plain.clientHeight * times), wide = Math.max(1, Math.round((high * width) / height));
    if (plain.width !== wide || plain.height !== high) Object.assign(plain, { width: wide, height: high });
    const pen = plain.getContext("2d"), share = wide / whole.width;
    pen.imageSmoothingEnabled = wide < 4 * pixels.width;
    pen.imageSmoothingQuality = "high";
    pen.drawImage(pixels, 0, 0, wide, high);
    if (!this.map?.query) return;
    const patch = this.patch(this.map.query);
    this.frame(pen, {
      left: (patch.left - whole.left) * share, top: (patch.top - whole.top) * share,
      width: patch.width * share, height: patch.height * share,
    }, 1.5 * times);
  }

  /** The position of the pointer on the image as fractions of its width and height; null outside of it. */
  spot(event) {
    const frame = this.canvas.getBoundingClientRect(), times = this.canvas.width / frame.width, whole = this.place();
    const across = ((event.clientX - frame.left) * times - whole.left) / whole.width;
    const down = ((event.clientY - frame.top) * times - whole.top) / whole.height;
    return across >= 0 && down >= 0 && across < 1 && down < 1 ? [across, down] : null;
  }

  /** The pixel [row, column] of the overlay under the pointer; null outside the image. */
  pixel(event) {
    const spot = this.spot(event);
    return spot && [Math.floor(spot[1] * this.layer.height), Math.floor(spot[0] * this.layer.width)];
  }

  /** Draw the attention map over the region that the model sees, and fade the other regions of the image. */
  over(pen, whole, times) {
    const { weights, grid, least, most } = this.map, seen = this.seen();
    pen.save();
    pen.beginPath();
    pen.rect(whole.left, whole.top, whole.width, whole.height);
    pen.rect(seen.left, seen.top, seen.width, seen.height);
    pen.globalAlpha = 0.72;
    pen.fillStyle = getComputedStyle(part("stage")).backgroundColor;
    pen.fill("evenodd");
    pen.restore();
    pen.save();
    pen.beginPath();
    pen.rect(seen.left, seen.top, seen.width, seen.height);
    pen.clip();
    if (this.view === "heat" && this.shown && this.strength > 0) {
      pen.filter = "grayscale(1)";
      pen.imageSmoothingEnabled = whole.width < 4 * this.shown.pixels.width;
      pen.drawImage(this.shown.pixels, whole.left, whole.top, whole.width, whole.height);
      pen.filter = "none";
    }
    const paint = this.view === "heat" ? coloured(heat, this.strength, true) : darkened(this.strength);
    const layer = painted(weights.map((weight) => (weight - least) / (most - least)), grid[1], paint);
    pen.imageSmoothingEnabled = this.smooth;
    pen.drawImage(layer, seen.left, seen.top, seen.width, seen.height);
    pen.restore();
    this.frame(pen, seen, 1.5 * times);
    if (this.map.query) this.frame(pen, this.patch(this.map.query), 3 * times);
    if (this.cursor) this.frame(pen, this.patch(this.cursor), 2 * times, true);
  }

  /** Draw a frame that is visible on light and dark backgrounds. */
  frame(pen, { left, top, width, height }, thick, dashed = false) {
    pen.save();
    pen.lineWidth = thick + 2;
    pen.strokeStyle = "rgb(0 0 0 / .75)";
    pen.strokeRect(left, top, width, height);
    pen.lineWidth = thick;
    pen.strokeStyle = "#fff";
    if (dashed) pen.setLineDash([3 * thick, 2 * thick]);
    pen.strokeRect(left, top, width, height);
    pen.restore();
  }

  /** The rectangle of a patch [row, column] on the canvas. */
  patch([row, column]) {
    const seen = this.seen(), [rows, columns] = this.map.grid;
    const width = seen.width / columns, height = seen.height / rows;
    return { left: seen.left + column * width, top: seen.top + row * height, width, height };
  }

  /** The patch [row, column] under the pointer; null outside the region that the model sees. */
  under(event) {
    if (!this.map) return null;
    const frame = this.canvas.getBoundingClientRect(), times = this.canvas.width / frame.width, seen = this.seen();
    const column = Math.floor((((event.clientX - frame.left) * times - seen.left) / seen.width) * this.map.grid[1]);
    const row = Math.floor((((event.clientY - frame.top) * times - seen.top) / seen.height) * this.map.grid[0]);
    return row >= 0 && column >= 0 && row < this.map.grid[0] && column < this.map.grid[1] ? [row, column] : null;
  }
}
