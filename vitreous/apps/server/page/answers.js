// Predicted classes with probabilities, predicted values, and the nearest training images.

import { make, makeName, part, percent, rounded } from "./page.js";

const FEW = 5;
export const MOST = 20; // maximum number of requested classes

let shown = null, all = false;
part("more").addEventListener("click", () => { all = !all; list(); });

/** Placeholder rows with the height of the predictions to come. */
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

function list() {
  const { prediction, multilabel } = shown, { classes } = prediction;
  const rows = classes.slice(0, all ? MOST : FEW);
  const made = rows.map((one) => row(one.class, one.probability, multilabel && one.probability <= 0.5 ? "weak" : ""));
  part("answers").replaceChildren(...made.map(([line]) => line));
  requestAnimationFrame(() => made.forEach(([, fill]) => fill()));
  const note = part("note");
  note.className = prediction.unsure ? "unsure" : "dim";
  note.textContent = prediction.unsure ? "Uncertain: no class reaches the confidence threshold." : multilabel ? "Multi-label: classes below 50\u00a0% are dimmed." : "\u00a0";
  part("more").hidden = classes.length <= FEW;
  part("more").textContent = all ? "Show fewer" : `Show ${classes.length} classes`;
}

/** A line, and a function that fills its bar. */
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

/** Show the nearest training images. */
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
