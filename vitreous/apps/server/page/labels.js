// The zero-shot panel: labels that the user types, whose scores for the current image are requested.

import { numbers, Refused, upload } from "./api.js";
import { chosen, part } from "./page.js";

const PAUSE = 400; // milliseconds after the last key before scores are requested
const EXAMPLES = "cat\ndog\nsomething else";

/** Split text at commas and line ends into distinct labels. */
const parsed = (text) => [...new Set(text.split(/[,\n]/).map((label) => label.trim()).filter(Boolean))];

export class Labels {
  /** `show(entry)` is called when an entry has new scores, `busy(flag)` while they are computed, `failed` for errors. */
  constructor(show, busy, failed) {
    Object.assign(this, { show, busy, failed, entry: null, timer: 0, request: null });
    part("labels").value = EXAMPLES;
    part("labels").addEventListener("input", () => { clearTimeout(this.timer); this.timer = setTimeout(() => this.update(), PAUSE); });
    for (const input of document.querySelectorAll("#templates, input[name=scores]")) input.addEventListener("change", () => this.update());
    part("labels-panel").hidden = part("answer").hidden = false;
  }

  /** Whether scores are independent. */
  get multilabel() { return chosen("scores") === "sigmoid"; }

  /** Describe a problem with the labels below them; an empty text removes it. */
  note(text) { part("labels-problem").textContent = text || "\u00a0"; }

  /** Show another entry of the history, with the scores of the current labels; null for none. */
  select(entry) {
    this.entry = entry;
    if (entry) this.update();
  }

  /** Request the scores of the current labels for the current entry, if they have changed. */
  async update() {
    const { entry } = this;
    if (!entry) return;
    const labels = parsed(part("labels").value), settings = JSON.stringify({ labels, templates: part("templates").value || null, multilabel: this.multilabel });
    this.request?.abort();
    if (labels.length < (this.multilabel ? 1 : 2)) return this.note(this.multilabel ? "Type a label." : "Type at least two labels.");
    this.note("");
    if (entry.labelled === settings) return this.show(entry);
    const request = this.request = new AbortController(), form = upload(entry.file, entry.name);
    form.append("settings", settings);
    this.busy(true);
    try {
      const { classes } = await numbers("v1/zero_shot", form, request.signal);
      entry.prediction = { ...entry.prediction, classes, unsure: false };
      entry.labelled = settings;
      if (this.entry === entry && this.request === request) this.show(entry);
    } catch (error) {
      if (error instanceof Refused && error.code === "bad_parameter") this.note(`${error.message}: ${error.hint}`);
      else this.failed(error, () => this.update());
    } finally {
      if (this.request === request) this.busy(false);
    }
  }
}
