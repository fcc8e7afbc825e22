// Names with probabilities, and the nearest training images.

import { make, makeName, part, percent, rounded } from "./page.js";

const FEW = 5;
export const MOST = 20; // names that are asked for

let shown = null, all = false;
part("more").addEventListener("click", () => { all = !all; list(); });

/** Rows of nothing, as high as those to come. */
export function blank(classes) {
  shown = null;
  part("answers").replaceChildren(...Array.from({ length: Math.min(FEW, classes) }, () => row("–", 0, "wait")));
  part("note").textContent = "\u00a0";
  part("more").hidden = true;
}

/** One prediction; with `multilabel`, a class is named that is likelier than not. */
export function answers(prediction, multilabel) {
  shown = { prediction, multilabel };
  all = false;
  list();
}

/** The values of a prediction, a line for each target. */
export function values(prediction) {
  shown = null;
  part("answers").replaceChildren(...Object.entries(prediction.values).map(([name, value]) => {
    const line = make("li"), number = make("span", "share", rounded(value));
    number.title = String(value);
    line.append(makeName("span", "name", name), number);
    return line;
  }));
  part("note").textContent = "\u00a0";
  part("more").hidden = true;
}

function list() {
  const { prediction, multilabel } = shown, { classes } = prediction;
  const rows = classes.slice(0, all ? MOST : FEW);
  const made = rows.map((one) => row(one.class, one.probability, multilabel && one.probability <= 0.5 ? "weak" : ""));
  part("answers").replaceChildren(...made.map(([line]) => line));
  requestAnimationFrame(() => made.forEach(([, fill]) => fill()));
  const note = part("note");
  note.className = prediction.unsure ? "unsure" : "dim";
  note.textContent = prediction.unsure ? "The model is unsure: no class is likely enough." : multilabel ? "Several may hold; pale ones are below one half." : "\u00a0";
  part("more").hidden = classes.length <= FEW;
  part("more").textContent = all ? "Show fewer" : `Show ${classes.length}`;
}

/** A line, and what fills its bar. */
function row(name, share, kind) {
  const line = make("li", kind), bar = make("div", "bar"), fill = make("i");
  const value = make("span", "share", percent(share));
  value.title = String(share);
  bar.append(fill);
  line.append(makeName("span", "name", name), value, bar);
  if (kind === "wait") {
    line.setAttribute("aria-hidden", "true");
    return line;
  }
  return [line, () => { fill.style.width = `${100 * share}%`; }];
}

/** Training images like this one. */
export function neighbours(found) {
  part("near").hidden = false;
  part("neighbours").replaceChildren(...found.map((one) => {
    const tile = make("li");
    if (one.thumbnail?.startsWith("data:image/")) {
      const picture = make("img");
      Object.assign(picture, { src: one.thumbnail, alt: "" });
      picture.addEventListener("load", () => picture.classList.toggle("tiny", picture.naturalWidth < 48));
      tile.append(picture);
    }
    if (one.label) tile.append(makeName("p", "", one.label));
    tile.append(makeName("p", "dim", `${one.name} · cosine ${one.similarity.toFixed(3)}`));
    return tile;
  }));
}
