// The history of images, in memory only; the oldest are dropped.

import { counted } from "./objects.js";
import { described, make, makeName, part, percent } from "./page.js";

const MOST = 24;
const SIDE = 160; // pixels of a thumbnail

/** The history; `show(entry)` is called for an entry that is clicked. */
export class History {
  constructor(show) {
    Object.assign(this, { entries: [], show });
    part("forget").addEventListener("click", () => { this.entries.splice(0, this.entries.length, ...this.entries.filter((one) => one === this.current)); this.draw(); part("file").focus(); });
  }

  /** Add an entry, or update it. */
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

  draw() {
    part("past").hidden = !this.entries.length;
    const within = part("history").contains(document.activeElement);
    part("history").replaceChildren(...this.entries.map((entry) => this.tile(entry)));
    if (within) part("history").querySelector("[aria-current]")?.focus();
  }

  tile(entry) {
    const item = make("li"), button = make("button"), { classes, class_shares: shares, objects, values } = entry.prediction, best = (classes ?? shares)?.[0];
    button.type = "button";
    if (entry.small) {
      const picture = make("img", entry.tiny ? "tiny" : "");
      Object.assign(picture, { src: entry.small, alt: "" });
      button.append(picture);
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

/** A thumbnail of the result of `opened` as a data URL; empty for a format that the browser cannot display. */
export function small(shown) {
  if (!shown) return { small: "", tiny: false };
  const { width, height } = shown.pixels, share = Math.min(1, SIDE / Math.max(width, height));
  const canvas = Object.assign(document.createElement("canvas"), { width: Math.max(1, Math.round(width * share)), height: Math.max(1, Math.round(height * share)) });
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(shown.pixels, 0, 0, canvas.width, canvas.height);
  return { small: canvas.toDataURL(width < 48 ? "image/png" : "image/jpeg", 0.8), tiny: width < 48 };
}
