// The panels of position embedding similarity and patch embedding filters, which are requested when they scroll into view.

import { blob, numbers } from "./api.js";
import { alike, coloured, painted } from "./colours.js";
import { at, part, say } from "./page.js";

/** Show the panels that the model supports; `can` are its capabilities. */
export function inside(can) {
  if (!can.positions && !can.filters) return;
  part("inside").hidden = false;
  part("positions").hidden = !can.positions;
  part("filters").hidden = !can.filters;
  const watcher = new IntersectionObserver((changes) => {
    if (!changes.some((change) => change.isIntersecting)) return;
    watcher.disconnect();
    if (can.positions) numbers("v1/positions").then((document) => new Positions(document), () => { part("positions").hidden = true; });
    if (can.filters) blob("v1/filters").then(filters, () => { part("filters").hidden = true; });
  }, { rootMargin: "200px" });
  watcher.observe(part("inside"));
}

/** Show the PNG of the filters. */
function filters(file) {
  const image = part("filters-image");
  image.addEventListener("load", () => URL.revokeObjectURL(image.src), { once: true });
  image.src = URL.createObjectURL(file);
}

/** Replace the hyphen of a negative number by a minus sign. */
const minus = (text) => text.replace("-", "−");

/** The panel of position embeddings: one tile per position with its similarity to all others, and the selected tile enlarged. */
class Positions {
  constructor({ grid, similarity, range }) {
    const [rows, columns] = grid, tiles = part("mosaic");
    Object.assign(this, { grid, similarity, range, tiles, at: [Math.floor(rows / 2), Math.floor(columns / 2)] });
    this.whole = this.mosaic();
    for (const canvas of [tiles, part("one")]) canvas.style.aspectRatio = `${columns} / ${rows}`;
    part("scale").getContext("2d").drawImage(painted(Array.from({ length: 200 }, (_, step) => step / 199), 200, coloured(alike)), 0, 0);
    const decimals = range[1] - range[0] < 0.1 ? 3 : 2; // enough to distinguish the ends
    this.ends = range.map((end) => minus(end.toFixed(decimals)));
    [part("scale-least").textContent, part("scale-most").textContent] = this.ends;
    tiles.addEventListener("click", (event) => {
      const frame = tiles.getBoundingClientRect();
      const inside = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
      this.go([inside((event.clientY - frame.top) / frame.height, rows), inside((event.clientX - frame.left) / frame.width, columns)]);
    });
    tiles.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      this.go([Math.min(rows - 1, Math.max(0, this.at[0] + step[0])), Math.min(columns - 1, Math.max(0, this.at[1] + step[1]))], true);
    });
    this.go(this.at);
  }

  /** Draw all tiles in a grid. `side` is the height and width of a value, `gap` the distance between tiles, in pixels. */
  mosaic() {
    const [rows, columns] = this.grid, canvas = document.createElement("canvas");
    this.side = Math.max(1, Math.round(1200 / (columns * columns)));
    this.gap = Math.max(1, Math.round((this.side * columns) / 16));
    Object.assign(canvas, { width: this.left(columns) - this.gap, height: this.top(rows) - this.gap });
    const pen = canvas.getContext("2d");
    pen.imageSmoothingEnabled = false;
    this.similarity.forEach((values, index) => {
      const tile = [this.left(index % columns), this.top(Math.floor(index / columns)), columns * this.side, rows * this.side];
      pen.drawImage(this.tile(values), ...tile);
    });
    return canvas;
  }

  /** The left and the upper edge of a tile in pixels. */
  left(column) { return column * (this.grid[1] * this.side + this.gap); }
  top(row) { return row * (this.grid[0] * this.side + this.gap); }

  /** Draw the similarities of one position as a tile with one pixel per value. */
  tile(values) {
    const [least, most] = this.range;
    return painted(values.map((value) => (value - least) / (most - least)), this.grid[1], coloured(alike));
  }

  /** Select the position [row, column]; with `aloud`, announce it to screen readers. */
  go([row, column], aloud = false) {
    const [rows, columns] = this.grid, { tiles, whole, side } = this, large = part("one");
    this.at = [row, column];
    Object.assign(tiles, { width: whole.width, height: whole.height });
    const pen = tiles.getContext("2d"), thick = Math.max(3, Math.round(whole.width / 160));
    pen.drawImage(whole, 0, 0);
    for (const [lineWidth, colour] of [[thick + 4, "#000"], [thick, "#fff"]]) {
      Object.assign(pen, { lineWidth, strokeStyle: colour });
      pen.strokeRect(this.left(column), this.top(row), columns * side, rows * side);
    }
    Object.assign(large, { width: columns, height: rows });
    const values = this.similarity[row * columns + column];
    large.getContext("2d").drawImage(this.tile(values), 0, 0);
    const others = values.filter((_, index) => index !== row * columns + column);
    const rangeText = others.length ? `: ${minus(Math.min(...others).toFixed(2))} to ${minus(Math.max(...others).toFixed(2))}` : "";
    const text = `Cosine similarity of the position embedding at ${at([row, column])} to all others${rangeText}.` +
      ` Colour scale: ${this.ends.join(" to ")}, the range over all pairs.`;
    part("positions-text").textContent = text;
    large.setAttribute("aria-label", text);
    if (aloud) say(text);
  }
}
