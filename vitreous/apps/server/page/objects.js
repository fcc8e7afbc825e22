// The object detection panel: boxes and masks over the image, a checkbox per class, a score threshold, and a list of objects.

import { make, makeName, part, percent } from "./page.js";

const LARGEST = 1600; // maximum height and width of the mask overlay in pixels
const FEW = 12; // maximum number of objects for which labels are drawn on the image
export const LEAST = 0.05; // minimum score of the requested objects

export class Objects {
  /** `model` is the description of the served model, with the names and colours of the classes. */
  constructor(stage, model) {
    Object.assign(this, { stage, model, hidden: new Set(), entry: null, all: [], shown: [], lit: null, pinned: null, masks: new Map() });
    stage.objects = (pen, whole, times) => this.draw(pen, whole, times);
    this.slider("least-score", "least-score-text", () => this.update());
    this.slider("fill", "fill-text", () => stage.draw(), () => { stage.cover = part("fill").value / 100; });
    stage.canvas.addEventListener("pointermove", (event) => this.light(this.under(event)));
    stage.canvas.addEventListener("pointerdown", (event) => this.light(this.under(event)));
    stage.canvas.addEventListener("pointerleave", () => this.light(null));
    part("objects").hidden = false;
  }

  /** Connect a slider in per cent with its text. `set` is called now and on each change, `moved` after it on each change. */
  slider(id, text, moved, set = () => {}) {
    const slider = part(id), read = () => { part(text).textContent = `${slider.value}\u00a0%`; set(); };
    slider.addEventListener("input", () => { read(); moved(); });
    read();
  }

  /** Show the objects of an entry over its image; null removes them. */
  show(entry) {
    Object.assign(this, { entry, lit: null, pinned: null, masks: new Map() });
    const { objects = [], size = [1, 1] } = entry?.prediction ?? {};
    const share = Math.min(1, LARGEST / Math.max(...size));
    this.all = objects.map((object, place) => ({ ...object, place, number: this.model.classes.indexOf(object.label) }));
    this.size = size;
    this.stage.size = entry && { width: size[1], height: size[0] };
    this.layer = { width: Math.max(1, Math.round(size[1] * share)), height: Math.max(1, Math.round(size[0] * share)) };
    this.withMasks = objects.some((object) => object.segmentation);
    part("fill-row").hidden = !this.withMasks;
    part("objects-title").textContent = this.withMasks ? "Instance segmentation" : "Object detection";
    this.classes();
    this.update();
  }

  /** List the classes of the objects, with checkboxes. */
  classes() {
    const counts = new Map();
    for (const { number } of this.all) counts.set(number, 0);
    part("kinds").replaceChildren(...[...counts.keys()].sort((a, b) => a - b).map((number) => {
      const line = make("li"), label = make("label"), box = make("input"), count = make("span", "share");
      Object.assign(box, { type: "checkbox", checked: !this.hidden.has(number) });
      box.addEventListener("change", () => { this.hidden[box.checked ? "delete" : "add"](number); this.update(); });
      count.dataset.number = number;
      label.append(box, this.swatch(number), makeName("span", "name", this.model.classes[number]), count);
      line.append(label);
      return line;
    }));
  }

  /** Create a square with the colour of a class. */
  swatch(number) {
    const swatch = make("span", "swatch");
    swatch.style.background = colour(this.model.class_colours[number]);
    return swatch;
  }

  /** Update the list and the image: only objects of visible classes above the score threshold are shown. */
  update() {
    const least = part("least-score").value / 100;
    const above = this.all.filter((object) => object.score >= least);
    this.shown = above.filter((object) => !this.hidden.has(object.number));
    for (const count of part("kinds").querySelectorAll(".share")) {
      count.textContent = above.filter((object) => object.number === Number(count.dataset.number)).length;
    }
    const numHidden = above.length - this.shown.length, none = this.all.length ? "No objects above this score" : "No objects detected";
    part("count").textContent = !this.entry ? "\u00a0" : `${this.shown.length || (numHidden ? 0 : none)}${this.shown.length || numHidden ? (this.shown.length === 1 ? " object" : " objects") : ""}${numHidden ? `, ${numHidden} hidden` : ""}`;
    this.rows = new Map(this.shown.map((object) => [object, this.row(object)]));
    part("object-list").replaceChildren(...[...this.rows.values()].map((row) => row.parentElement));
    if (!this.shown.includes(this.pinned)) this.pinned = null;
    this.paint();
    this.light(null);
  }

  /** Create a line of the list: a button that highlights its object, and pins it on a click. */
  row(object) {
    const line = make("li"), button = make("button", "object");
    button.type = "button";
    button.append(this.swatch(object.number), makeName("span", "name", object.label), make("span", "share", percent(object.score)));
    for (const eventName of ["pointerenter", "focus"]) button.addEventListener(eventName, () => this.light(object));
    for (const eventName of ["pointerleave", "blur"]) button.addEventListener(eventName, () => this.light(null));
    button.addEventListener("click", () => {
      this.pinned = this.pinned === object ? null : object;
      this.light(object);
    });
    line.append(button);
    return button;
  }

  /** Highlight an object; with null, highlight the pinned object, if any. */
  light(highlighted) {
    this.lit = highlighted ?? this.pinned;
    for (const [object, row] of this.rows ?? []) {
      row.classList.toggle("lit", object === this.lit);
      row.setAttribute("aria-pressed", String(object === this.pinned));
    }
    if (this.entry) part("readout").textContent = this.lit ? words(this.lit) : this.entry.name;
    this.stage.draw();
  }

  /** Draw the overlay of the visible masks, highest scores on top. */
  paint() {
    this.stage.layer = null;
    if (!this.withMasks || !this.shown.length) return;
    const { width, height } = this.layer, image = new ImageData(width, height);
    for (const object of [...this.shown].reverse()) {
      const mask = this.mask(object), [r, g, b] = this.model.class_colours[object.number];
      for (const place of mask) image.data.set([r, g, b, 255], 4 * place);
    }
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    canvas.getContext("2d").putImageData(image, 0, 0);
    this.stage.layer = canvas;
  }

  /** The indices of the overlay's pixels that an object's mask covers. */
  mask(object) {
    if (!this.masks.has(object.place)) this.masks.set(object.place, places(object.segmentation?.counts ?? [], this.size, this.layer));
    return this.masks.get(object.place);
  }

  /** The smallest object under the pointer. */
  under(event) {
    const [rows, columns] = this.size ?? [1, 1], spot = this.stage.spot(event);
    if (!spot) return null;
    const [x, y] = [spot[0] * columns, spot[1] * rows];
    const area = (object) => (object.right - object.left) * (object.bottom - object.top);
    const hits = this.shown.filter((object) => x >= object.left && x < object.right && y >= object.top && y < object.bottom);
    return hits.sort((a, b) => area(a) - area(b))[0] ?? null;
  }

  /** Draw the boxes on the canvas, highest scores on top. Labels are drawn if there are few objects; else only that of the highlighted object. */
  draw(pen, whole, times) {
    const [rows, columns] = this.size ?? [1, 1], across = whole.width / columns, down = whole.height / rows;
    const order = [...this.shown].reverse();
    if (this.lit) order.push(...order.splice(order.indexOf(this.lit), 1));
    for (const object of order) {
      const box = { left: whole.left + object.left * across, top: whole.top + object.top * down, width: (object.right - object.left) * across, height: (object.bottom - object.top) * down };
      const lit = object === this.lit, paint = colour(this.model.class_colours[object.number]);
      pen.globalAlpha = this.lit && !lit ? 0.45 : 1;
      pen.lineWidth = (lit ? 6 : 3.5) * times;
      pen.strokeStyle = lit ? "#fff" : "rgb(0 0 0 / .7)";
      pen.strokeRect(box.left, box.top, box.width, box.height);
      pen.lineWidth = (lit ? 3 : 2) * times;
      pen.strokeStyle = paint;
      pen.strokeRect(box.left, box.top, box.width, box.height);
      if (lit || (!this.lit && this.shown.length <= FEW)) this.label(pen, box, object, paint, times);
    }
    pen.globalAlpha = 1;
  }

  /** Draw the label of an object above or inside its box. */
  label(pen, box, object, paint, times) {
    const text = `${object.label} ${percent(object.score)}`, high = 18 * times;
    pen.font = `600 ${12 * times}px system-ui, sans-serif`;
    const wide = Math.min(pen.measureText(text).width + 8 * times, pen.canvas.width);
    const left = Math.max(0, Math.min(box.left - times, pen.canvas.width - wide));
    const top = box.top >= high ? box.top - high : Math.max(0, box.top);
    pen.fillStyle = paint;
    pen.fillRect(left, top, wide, high);
    pen.fillStyle = light(this.model.class_colours[object.number]) ? "#000" : "#fff";
    pen.textBaseline = "middle";
    pen.fillText(text, left + 4 * times, top + high / 2, wide - 6 * times);
  }
}

/** Format the number of objects per class with a score of at least `least`. */
export function counted(objects, least = 0.5) {
  const counts = new Map();
  for (const object of objects) if (object.score >= least) counts.set(object.label, (counts.get(object.label) ?? 0) + 1);
  return [...counts].map(([label, count]) => `${count} ${label}`).join(", ") || "no objects";
}

/** Describe an object: class, score, and size of its box. */
const words = (object) => `${object.label} ${percent(object.score)}, ${Math.round(object.right - object.left)} × ${Math.round(object.bottom - object.top)} pixels`;
const colour = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

/** Whether black text has more contrast on a colour than white text. */
function light(rgb) {
  const [r, g, b] = rgb.map((value) => (value <= 10 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.3;
}

/** Convert the column-major run lengths of a mask to the row-major indices of its pixels in the overlay, which may be smaller. */
function places(counts, [rows, columns], { width, height }) {
  const indices = [], down = height / rows, across = width / columns;
  let begin = 0;
  counts.forEach((length, number) => {
    const end = begin + length;
    if (number % 2) {
      for (let column = Math.floor(begin / rows); column * rows < end; column++) {
        const first = Math.max(0, begin - column * rows), last = Math.min(rows, end - column * rows);
        // a pixel of the overlay shows the image pixel at its centre
        const low = Math.max(0, Math.ceil(column * across - 0.5)), high = Math.min(width, Math.ceil((column + 1) * across - 0.5));
        const upper = Math.max(0, Math.ceil(first * down - 0.5)), lower = Math.min(height, Math.ceil(last * down - 0.5));
        for (let x = low; x < high; x++) for (let y = upper; y < lower; y++) indices.push(y * width + x);
      }
    }
    begin = end;
  });
  return Uint32Array.from(indices);
}
