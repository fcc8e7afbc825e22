// The attention panel: it selects block, head and query patch, with one request per image, type of map, and query patch.
// Indices in code and in requests count from 0; blocks, heads, rows and columns in texts count from 1.

import { numbers, upload } from "./api.js";
import { coloured, darkened, heat, painted } from "./colours.js";
import { at, chosen, part, percent, say } from "./page.js";

const FUSIONS = ["mean", "max", "min"];
const OF_FUSION = { mean: "mean over heads", max: "maximum over heads", min: "minimum over heads" };
const KEPT = 12; // maximum responses cached per image

export class Attention {
  /** `failed(error, again)` shows an error; `busy(flag)` marks a request as pending or finished. */
  constructor(stage, model, failed, busy) {
    Object.assign(this, { stage, model, failed, busy, entry: null, query: null, frame: 0, turn: 0, answer: null });
    part("attention").hidden = false;
    part("layer").max = model.layers - 1;
    part("layer").value = model.layers - 1;
    for (const id of ["layer", "head"]) part(id).addEventListener("input", () => this.update());
    for (const radio of document.querySelectorAll("#attention input[type=radio]")) radio.addEventListener("change", () => this.update(radio.name));
    part("opacity").addEventListener("input", () => this.update());
    part("back").addEventListener("click", () => { this.ask(null); stage.canvas.focus(); });
    part("zoom").addEventListener("click", () => {
      stage.zoomed = !stage.zoomed;
      part("zoom").setAttribute("aria-pressed", stage.zoomed);
      stage.draw();
    });
    this.listen(stage.canvas);
    this.update("kind");
  }

  /** Handle mouse and keyboard on the image. */
  listen(canvas) {
    canvas.addEventListener("pointermove", (event) => this.move(this.stage.under(event)));
    canvas.addEventListener("pointerleave", () => this.move(null));
    canvas.addEventListener("click", (event) => {
      const patch = this.stage.under(event);
      if (patch) this.ask(patch);
    });
    canvas.addEventListener("focus", () => { if (canvas.matches(":focus-visible") && this.answer) this.move(this.stage.map.query ?? this.strongest(), true); });
    canvas.addEventListener("blur", () => this.move(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  /** Move the cursor by arrow keys; select its patch by Enter; reset the selection by Escape. */
  key(event) {
    if (!this.answer || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const [rows, columns] = this.stage.map.grid;
    if (step) {
      const [row, column] = this.stage.cursor ?? this.strongest();
      this.move([Math.min(rows - 1, Math.max(0, row + step[0])), Math.min(columns - 1, Math.max(0, column + step[1]))], true);
    } else if ((event.key === "Enter" || event.key === " ") && this.stage.cursor) {
      this.ask(this.stage.cursor);
    } else if (event.key === "Escape" && this.query) {
      this.ask(null);
    } else {
      return;
    }
    event.preventDefault();
  }

  /** Show the map of another entry, or none. The controls stay as they are; the query is the pooled output. */
  show(entry) {
    Object.assign(this, { entry, query: null, answer: null });
    Object.assign(this.stage, { map: null, cursor: null });
    for (const id of ["back", "zoom", "legend"]) part(id).hidden = true;
    this.update();
  }

  /** Select a [row, column] as query patch; null selects the pooled output. */
  ask(patch) {
    this.query = patch && this.model.grid.length > 2 ? [this.slot, ...patch] : patch;
    part("back").hidden = patch === null;
    this.update("query");
  }

  /** Move the cursor to a patch, or remove it (null); with `aloud`, announce the patch to screen readers. */
  move(patch, aloud = false) {
    if (!this.answer) return;
    this.stage.cursor = patch;
    this.stage.draw();
    this.read();
    if (aloud && patch) say(this.words(patch));
  }

  /** The values of the controls. */
  get kind() { return chosen("kind"); }
  get layer() { return Number(part("layer").value); }
  get head() { return Number(part("head").value); }
  get fused() { return FUSIONS[this.head] ?? null; } // in raw maps, single heads follow these
  get heads() {
    if (this.fused) return OF_FUSION[this.fused];
    return `head ${this.head - FUSIONS.length + 1} of ${this.model.heads}`;
  }

  /** Update the map and all texts after a change; `changed` is "kind" or "query" if that has changed. */
  update(changed = "") {
    const { stage } = this;
    if (changed === "kind") {
      const most = this.kind === "raw" ? FUSIONS.length + this.model.heads - 1 : FUSIONS.length - 1;
      Object.assign(part("head"), { max: most });
      part("head").value = 0;
    }
    Object.assign(stage, { view: chosen("view"), smooth: chosen("edges") === "smooth", strength: Number(part("opacity").value) / 100 });
    this.label("layer", `${this.layer + 1} of ${this.model.layers}`);
    this.label("head", this.heads);
    this.label("opacity", `${part("opacity").value} %`);
    if (!this.entry) part("meaning").textContent = this.meaning();
    stage.draw();
    if (this.entry) this.fetch(changed === "query");
  }

  /** Set the text of a slider's value. */
  label(id, text) {
    part(`${id}-text`).textContent = text;
    part(id).setAttribute("aria-valuetext", text);
  }

  /** Describe the map in a sentence. */
  meaning() {
    const from = this.query ? `the patch at ${at(this.query.slice(-2))}${this.query.length > 2 ? ` of time slot ${this.query[0] + 1}` : ""}` : "";
    if (this.kind === "raw") {
      const head = this.fused ? OF_FUSION[this.fused] : `head ${this.head - FUSIONS.length + 1}`;
      return `Raw attention of block ${this.layer + 1}, ${head}, from ${from || "the pooled output"}.`;
    }
    const blocks = this.layer ? `blocks 1 to ${this.layer + 1}` : "block 1";
    return `Attention rollout over ${blocks}, ${OF_FUSION[this.fused]}, from ${from || "the pooled output"}.`;
  }

  /** Request the map unless it is cached, and show it; with `aloud`, announce it to screen readers. */
  async fetch(aloud) {
    const { entry } = this, turn = ++this.turn;
    const query = this.query ? this.query.join(",") : "prediction", head = this.kind === "raw" ? "all" : this.fused;
    const key = `kind=${this.kind}&layer=all&head=${head}&query=${query}`;
    if (!entry.maps.has(key)) {
      const request = numbers(`v1/attention?${key}`, upload(entry.file, entry.name));
      entry.maps.set(key, request);
      request.catch(() => entry.maps.delete(key));
      if (entry.maps.size > KEPT) entry.maps.delete(entry.maps.keys().next().value);
    }
    try {
      this.busy(true);
      const response = await entry.maps.get(key);
      if (turn !== this.turn) return;
      this.answer = response;
      this.stage.map = { ...this.map(response), grid: response.grid.slice(-2), box: this.stage.shown ? response.box : [0, 0, 1, 1] };
      this.at(this.frame);
      part("zoom").hidden = !this.stage.shown || response.box.join() === "0,0,1,1";
      this.stage.draw();
      this.read();
      this.colours();
      part("picture").setAttribute("aria-label", `${entry.name}, ${response.grid.join(" by ")} patches. ${this.meaning()}`);
      if (aloud) say(`${this.meaning()} ${this.words(this.strongest())}.`);
    } catch (error) {
      if (turn === this.turn) this.failed(error, () => this.update());
    } finally {
      if (turn === this.turn) this.busy(false);
    }
  }

  /** Select a map of the response: the weights of all patches, the ends of their colour scale, and the sum over prefix tokens. */
  map(response) {
    const weights = response.weights[this.layer], prefix = response.prefix_weights[this.layer], head = this.head - FUSIONS.length;
    const flat = (rows) => rows.flat(Infinity);
    const [all, prefixWeights] = response.kind === "rollout" ? [flat(weights), prefix]
      : this.fused ? [together(weights.map(flat), this.fused), together(prefix, this.fused)]
      : [flat(weights[head]), prefix[head]];
    return { all, ...range(all), kept: sum(prefixWeights) };
  }

  /** Select the map of a clip's frame; an image has only frame 0. */
  at(frame) {
    this.frame = frame;
    const { map } = this.stage;
    if (!map) return;
    const slot = this.slot, [rows, columns] = map.grid;
    map.weights = map.all.slice(slot * rows * columns, (slot + 1) * rows * columns);
    map.query = this.query && (this.query.length < 3 || this.query[0] === slot) ? this.query.slice(-2) : null;
    this.read();
  }

  /** The time slot of the current frame. A slot has as many frames as a patch is long in time. */
  get slot() {
    const { grid, image_size: image } = this.model;
    return grid.length > 2 ? Math.floor((this.frame * grid[0]) / image[0]) : 0;
  }

  /** The patch [row, column] with the largest weight. */
  strongest() {
    const { weights, grid } = this.stage.map;
    const best = weights.indexOf(weights.reduce((a, b) => Math.max(a, b), 0));
    return [Math.floor(best / grid[1]), best % grid[1]];
  }

  /** Describe the position and the weight of a patch. */
  words([row, column]) {
    const { weights, grid } = this.stage.map;
    return `${at([row, column])}: ${percent(weights[row * grid[1] + column])}`;
  }

  /** Update the line below the image: the patch at the cursor, or the patch with the largest weight. */
  read() {
    if (!this.stage.map) return;
    const text = this.words(this.stage.cursor ?? this.strongest());
    const blind = this.stage.shown ? "" : "; this browser cannot display the image";
    part("readout").textContent = (this.stage.cursor ? `${text[0].toUpperCase()}${text.slice(1)}` : `Maximum at ${text}`) + blind;
  }

  /** Draw the colour legend, and describe the weight of prefix tokens. */
  colours() {
    const { least, most, kept } = this.stage.map, pen = part("legend-bar").getContext("2d");
    const ramp = painted(Array.from({ length: 200 }, (_, step) => step / 199), 200, this.stage.view === "heat" ? coloured(heat) : darkened(1));
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, 200, 1);
    pen.drawImage(ramp, 0, 0);
    part("legend-least").textContent = percent(least);
    part("legend-most").textContent = percent(most);
    part("legend").hidden = false;
    part("meaning").textContent = this.meaning() + (this.answer.prefix_tokens ? ` Prefix tokens (class token, registers) receive ${percent(kept)}.` : "");
  }
}

/** The ends of the colour scale: the 1st and the 99th percentile, to limit the effect of outliers. They differ by at least
    a tenth of the upper end, so that uniform attention shows no contrast. */
function range(values) {
  const sorted = [...values].sort((a, b) => a - b), at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const most = at(0.99) || sorted.at(-1) || 1, least = Math.min(at(0.01), 0.9 * most);
  return { least, most };
}

const sum = (values) => values.reduce((a, b) => a + b, 0);

/** Fuse the maps of all heads, one row per head, by `fusion`: mean, max or min. */
function together(rows, fusion) {
  const fuse = { mean: (values) => sum(values) / values.length, max: (values) => Math.max(...values), min: (values) => Math.min(...values) }[fusion];
  return (rows[0] ?? []).map((_, index) => fuse(rows.map((row) => row[index])));
}
