// The semantic segmentation panel: the class map over the image, and a checkbox per class.

import { at, make, makeName, part, percent } from "./page.js";

const NOBODY = 255; // the ignore index of class maps

export class Classes {
  /** `model` is the description of the served model, with the names and colours of the classes. */
  constructor(stage, model) {
    Object.assign(this, { stage, model, hidden: new Set(), numbers: null, entry: null });
    const cover = part("cover");
    const strength = () => {
      stage.cover = cover.value / 100;
      part("cover-text").textContent = `${cover.value}\u00a0%`;
      stage.draw();
    };
    cover.addEventListener("input", strength);
    strength();
    stage.canvas.addEventListener("pointermove", (event) => this.read(event));
    stage.canvas.addEventListener("pointerdown", (event) => this.read(event));
    stage.canvas.addEventListener("pointerleave", () => { if (this.entry) part("readout").textContent = this.entry.name; });
    part("classes").hidden = false;
  }

  /** Show the class map of an entry over its image; null removes it. */
  async show(entry) {
    this.entry = entry;
    this.numbers = this.stage.layer = null;
    this.list(entry?.prediction.class_shares ?? []);
    if (!entry) return this.stage.draw();
    const numbers = await decoded(entry.prediction.class_map);
    if (this.entry !== entry) return;
    this.numbers = numbers;
    this.paint();
  }

  /** Draw the overlay: every pixel in the colour of its class, hidden classes transparent. */
  paint() {
    if (!this.numbers) return;
    const { width, height, data } = this.numbers;
    const layer = Object.assign(document.createElement("canvas"), { width, height });
    const image = new ImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer), isLittleEndian = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1;
    const colours = Array.from({ length: NOBODY + 1 }, (_, number) => {
      const [r, g, b] = this.model.class_colours[number] ?? [0, 0, 0];
      if (this.hidden.has(number) || !(r || g || b)) return 0;
      return isLittleEndian ? ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0 : ((r << 24) | (g << 16) | (b << 8) | 255) >>> 0;
    });
    for (let index = 0; index < pixels.length; index++) pixels[index] = colours[data[4 * index]];
    layer.getContext("2d").putImageData(image, 0, 0);
    this.stage.layer = layer;
    this.stage.draw();
  }

  /** List the classes with their shares of the pixels. */
  list(shares) {
    part("class-list").replaceChildren(...shares.map((entry) => this.row(entry)));
  }

  /** Create a line of the list: a checkbox, the colour, the name and the share of a class. */
  row({ class: name, share }) {
    const number = this.model.classes.indexOf(name), [r, g, b] = this.model.class_colours[number];
    const line = make("li"), label = make("label"), box = make("input"), swatch = make("span", "swatch"), bar = make("div", "bar"), fill = make("i");
    Object.assign(box, { type: "checkbox", checked: !this.hidden.has(number) });
    box.addEventListener("change", () => {
      this.hidden[box.checked ? "delete" : "add"](number);
      this.paint();
    });
    if (r || g || b) swatch.style.background = fill.style.background = `rgb(${r} ${g} ${b})`;
    else box.style.visibility = swatch.style.visibility = "hidden"; // the background has no colour
    fill.style.width = `${100 * share}%`;
    bar.append(fill);
    label.append(box, swatch, makeName("span", "name", name), make("span", "share", percent(share)));
    line.append(label, bar);
    return line;
  }

  /** Show the class of the pixel under the pointer below the image. */
  read(event) {
    const position = this.numbers && this.stage.layer && this.stage.pixel(event);
    if (!position) return;
    const number = this.numbers.data[4 * (position[0] * this.numbers.width + position[1])];
    part("readout").textContent = `${this.model.classes[number] ?? "unknown"} at ${at(position)}`;
  }
}

/** Decode the class map, a PNG in a data URI whose red channel is the class index. */
async function decoded(uri) {
  const bytes = Uint8Array.from(atob(uri.slice(uri.indexOf(",") + 1)), (letter) => letter.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }), { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  const canvas = new OffscreenCanvas(image.width, image.height), pen = canvas.getContext("2d", { willReadFrequently: true });
  pen.drawImage(image, 0, 0);
  return pen.getImageData(0, 0, image.width, image.height);
}
