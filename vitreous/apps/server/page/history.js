// The history panel: images and predictions, kept in memory only; the oldest are dropped.

import { counted } from "./objects.js";
import { described, make, makeName, part, percent } from "./page.js";

const MOST = 24; // maximum number of entries
const SIDE = 160; // maximum height and width of a thumbnail in pixels

/** The history of entries; `show(entry)` is called for an entry that is clicked. */
export class History {
  constructor(show) {
    Object.assign(this, { entries: [], show });
    part("forget").addEventListener("click", () => { this.entries.splice(0, this.entries.length, ...this.entries.filter((entry) => entry === this.current)); this.draw(); part("file").focus(); });
  }

  /** Add an entry at the front, or update an existing one. */
  keep(entry) {
    if (!this.entries.includes(entry)) this.entries.unshift(entry);
    this.entries.length = Math.min(this.entries.length, MOST);
    this.draw();
  }

  /** Mark the entry that is on the stage. */
  mark(entry) {
    this.current = entry;
    this.draw();
  }

  /** List all entries; the focus stays on the current one. */
  draw() {
    part("past").hidden = !this.entries.length;
    const hasFocus = part("history").contains(document.activeElement);
    part("history").replaceChildren(...this.entries.map((entry) => this.tile(entry)));
    if (hasFocus) part("history").querySelector("[aria-current]")?.focus();
  }

  /** Create the button of an entry: thumbnail, summary of the prediction, and name. */
  tile(entry) {
    const item = make("li"), button = make("button"), { classes, class_shares: shares, objects, values } = entry.prediction, best = (classes ?? shares)?.[0];
    button.type = "button";
    if (entry.small) {
      const image = make("img", entry.tiny ? "tiny" : "");
      Object.assign(image, { src: entry.small, alt: "" });
      button.append(image);
    }
    if (classes ?? shares) button.append(makeName("p", "", best ? `${best.class}, ${percent(best.probability ?? best.share)}` : "no class"));
    if (values) button.append(makeName("p", "", described(values)));
    if (objects) button.append(makeName("p", "", counted(objects)));
    button.append(makeName("p", "dim", entry.name));
    if (entry === this.current) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => this.show(entry));
    item.append(button);
    return item;
  }
}

/** Return a thumbnail of an opened image as a data URL, and whether the image is tiny; empty if the browser cannot display it. */
export function small(shown) {
  if (!shown) return { small: "", tiny: false };
  const { width, height } = shown.pixels, share = Math.min(1, SIDE / Math.max(width, height));
  const canvas = Object.assign(document.createElement("canvas"), { width: Math.max(1, Math.round(width * share)), height: Math.max(1, Math.round(height * share)) });
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(shown.pixels, 0, 0, canvas.width, canvas.height);
  return { small: canvas.toDataURL(width < 48 ? "image/png" : "image/jpeg", 0.8), tiny: width < 48 };
}
