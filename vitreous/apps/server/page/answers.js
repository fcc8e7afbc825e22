// The panels of predicted classes with probabilities, of predicted values, and of the nearest training images.

import { make, makeName, part, percent, rounded } from "./page.js";

const FEW = 5; // number of classes that are shown at first
export const MOST = 20; // maximum number of requested classes

let shown = null, all = false;
part("more").addEventListener("click", () => { all = !all; list(); });

/** Show placeholder rows, which have the height of the predictions to come. */
export function blank(classes) {
  shown = null;
  part("answers").replaceChildren(...Array.from({ length: Math.min(FEW, classes) }, () => row("–", 0, "wait")));
  part("note").textContent = "\u00a0";
  part("more").hidden = true;
}

/** Show a prediction; with `multilabel`, classes below a probability of 0.5 are dimmed. */
export function answers(prediction, multilabel) {
  shown = { prediction, multilabel };
  all = false;
  list();
}

/** Show predicted values, one line per target. */
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

/** List the classes of the current prediction: the first few, or all requested ones. */
function list() {
  const { prediction, multilabel } = shown, { classes } = prediction;
  const rows = classes.slice(0, all ? MOST : FEW);
  const lines = rows.map((entry) => row(entry.class, entry.probability, multilabel && entry.probability <= 0.5 ? "weak" : ""));
  part("answers").replaceChildren(...lines.map(([line]) => line));
  requestAnimationFrame(() => lines.forEach(([, fill]) => fill()));
  const note = part("note");
  note.className = prediction.unsure ? "unsure" : "dim";
  note.textContent = prediction.unsure ? "Uncertain: no class reaches the confidence threshold." : multilabel ? "Multi-label: classes below 50\u00a0% are dimmed." : "\u00a0";
  part("more").hidden = classes.length <= FEW;
  part("more").textContent = all ? "Show fewer" : `Show ${classes.length} classes`;
}

/** Create a line of the list, and a function that fills its bar; a placeholder ("wait") is only a line. */
function row(name, share, className) {
  const line = make("li", className), bar = make("div", "bar"), fill = make("i");
  const value = make("span", "share", percent(share));
  value.title = String(share);
  bar.append(fill);
  line.append(makeName("span", "name", name), value, bar);
  if (className === "wait") {
    line.setAttribute("aria-hidden", "true");
    return line;
  }
  return [line, () => { fill.style.width = `${100 * share}%`; }];
}

/** Show the nearest training images. */
export function neighbours(nearest) {
  part("near").hidden = false;
  part("neighbours").replaceChildren(...nearest.map((neighbour) => {
    const tile = make("li");
    if (neighbour.thumbnail?.startsWith("data:image/")) {
      const image = make("img");
      Object.assign(image, { src: neighbour.thumbnail, alt: "" });
      image.addEventListener("load", () => image.classList.toggle("tiny", image.naturalWidth < 48));
      tile.append(image);
    }
    if (neighbour.label) tile.append(makeName("p", "", neighbour.label));
    tile.append(makeName("p", "dim", `${neighbour.name} · cosine ${neighbour.similarity.toFixed(3)}`));
    return tile;
  }));
}
