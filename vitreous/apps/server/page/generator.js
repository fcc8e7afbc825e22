// The image generation panel: settings, progress, the grid of generated images, and its PNG file.

import { lines } from "./api.js";
import { calm, make, makeName, part, say, trouble } from "./page.js";

const FEW = 20; // approximate number of images by default
const TINY = 48; // images with fewer pixels per side are enlarged without smoothing
const SAVED = 512; // minimum width of a saved grid in pixels
const GAP = 2; // pixels between the images of a saved grid
const SEEDS = 1_000_000; // random seeds are below this number
const NONE = "\u00a0"; // an empty line

export class Generator {
  /** `model` is the description of the served model; `failed(error, again)` shows an error. */
  constructor(model, failed) {
    Object.assign(this, { model, failed, answer: null, work: null });
    part("look").hidden = true;
    part("gallery").hidden = part("making").hidden = false;
    Object.assign(part("skip"), { href: "#images-count", textContent: "Skip to the settings" });
    this.fill();
    part("request").addEventListener("submit", (event) => { event.preventDefault(); this.run(); });
    part("stop").addEventListener("click", () => this.work?.abort());
    part("new-seed").addEventListener("click", () => { part("seed").value = Math.floor(Math.random() * SEEDS); });
    part("save").addEventListener("click", () => this.save());
    for (const kind of ["pointerover", "pointerdown"]) part("images").addEventListener(kind, (event) => this.name(event.target.closest("li")));
    part("images").addEventListener("pointerleave", () => this.name(null));
  }

  /** Fill the settings with the options, limits and defaults of the model. */
  fill() {
    const { classes, sampling } = this.model, { limits, defaults, samplers } = sampling;
    part("class-row").hidden = part("guidance-row").hidden = !classes.length;
    part("class").append(...classes.map((name) => Object.assign(make("option", "", name), { value: name })));
    part("class").disabled = !classes.length;
    part("sampler").append(...Object.keys(samplers).map((name) => make("option", "", name)));
    part("sampler").addEventListener("change", () => { part("steps").value = samplers[part("sampler").value]; this.check(); });
    Object.assign(part("steps"), { max: limits.steps, value: samplers[defaults.sampler] });
    Object.assign(part("seed"), { max: limits.seed, value: defaults.seed });
    const first = classes.length > 1 && classes.length <= FEW ? classes.length * Math.floor(FEW / classes.length) : 16;
    Object.assign(part("images-count"), { max: limits.count, value: Math.min(first, limits.count) });
    part("guidance").value = defaults.guidance;
    part("guidance-help").textContent = classes.length
      ? "Guidance above 1 makes images more typical of their class and less diverse. The same seed and settings reproduce the same images."
      : "The same seed and settings reproduce the same images.";
    for (const id of ["images-count", "guidance", "steps"]) part(id).addEventListener("input", () => this.check());
    this.check();
  }

  /** Show the values of the sliders, and check whether the model's limit allows the steps for this number of images. */
  check() {
    const { limits } = this.model.sampling, count = Number(part("images-count").value), steps = part("steps");
    const guidance = Number(part("guidance").value), most = Math.floor(limits.image_steps / count);
    part("images-count-text").textContent = String(count);
    part("guidance-text").textContent = guidance === 1 ? "1 (off)" : String(guidance);
    steps.setCustomValidity(Number(steps.value) * count > limits.image_steps ? `Use at most ${most} steps for ${count} images.` : "");
  }

  /** Return the request body for the current settings. */
  request() {
    const name = part("class").value, number = (id) => Number(part(id).value);
    const settings = { count: number("images-count"), steps: number("steps"), seed: number("seed"), sampler: part("sampler").value };
    return this.model.classes.length ? { class: part("class").selectedIndex ? name : null, guidance: number("guidance"), ...settings } : settings;
  }

  /** Generate images, showing previews and progress. */
  async run() {
    if (this.work) return;
    calm();
    const request = this.request(), began = performance.now();
    this.work = new AbortController();
    this.answer = null;
    this.busy(true);
    this.report("Queued");
    say(`Generating ${count(request.count)}.`);
    let done = 0;
    try {
      const response = await lines("v1/sample", request, this.work.signal, (line) => {
        done = line.done;
        part("progress").value = done;
        this.show(line.images.map((image, index) => ({ image, class: this.classOf(request, index), number: this.numberOf(request, index) })), line.columns);
        this.report(`${Math.floor(100 * done)}\u00a0%, ${left(performance.now() - began, done)}`);
      });
      if (response.model.version !== this.model.version) {
        trouble("The served model has changed.", "Reload the page to use the new model.", () => location.reload());
      }
      this.answer = response;
      this.size = response.size;
      this.show(response.images, response.columns);
      this.report(this.summary = words(response));
      say(`${count(request.count)} generated.`);
    } catch (error) {
      const stopped = error.name === "AbortError";
      this.report(this.summary = done ? `${stopped ? "Stopped" : "Failed"} at ${Math.floor(100 * done)}\u00a0%` : NONE);
      if (stopped) say("Stopped.");
      this.failed(error, () => this.run());
    } finally {
      this.work = null;
      this.busy(false);
    }
  }

  /** The class of a preview image: the requested class, or cycling through the classes. */
  classOf(request, index) {
    const { classes } = this.model;
    return request.class ?? (classes.length ? classes[index % classes.length] : null);
  }

  /** The number of a preview image within its class. */
  numberOf(request, index) {
    return request.class == null ? Math.floor(index / Math.max(1, this.model.classes.length)) : index;
  }

  /** Enable or disable the controls, depending on whether images are being generated. */
  busy(flag) {
    const stopping = document.activeElement === part("stop");
    part("stop").hidden = !flag;
    part("make").disabled = flag;
    part("progress").classList.toggle("idle", !flag);
    part("progress").value = 0;
    part("images").setAttribute("aria-busy", String(flag));
    part("save").hidden = flag || !this.answer;
    if (flag) this.summary = "";
    if (flag) part("stop").focus({ preventScroll: true });
    else if (stopping) part("make").focus({ preventScroll: true });
  }

  /** Set the line below the images. */
  report(text) {
    part("outcome").textContent = text;
  }

  /** Show images in a grid. Places of images without a preview yet are empty. */
  show(images, columns) {
    const list = part("images"), [height, width] = this.model.image_size;
    this.images = images;
    part("no-images").hidden = true;
    part("sheet").classList.remove("bare");
    list.style.setProperty("--columns", columns);
    list.style.setProperty("--rows", Math.ceil(images.length / columns));
    list.style.setProperty("--shape", width / height);
    while (list.children.length > images.length) list.lastElementChild.remove();
    while (list.children.length < images.length) list.append(make("li"));
    images.forEach((entry, index) => {
      const item = list.children[index];
      if (!entry.image) return item.replaceChildren();
      if (!item.firstElementChild) item.append(make("img", Math.max(width, height) < TINY ? "tiny" : ""));
      Object.assign(item.firstElementChild, { src: entry.image, alt: caption(entry) });
    });
  }

  /** Describe the image at a list item below the grid; with null, describe the request. */
  name(item) {
    if (this.work) return;
    const entry = item && this.images[[...part("images").children].indexOf(item)];
    if (entry) part("outcome").replaceChildren(makeName("span", "", caption(entry)));
    else this.report(this.summary || NONE);
  }

  /** Save the grid as a PNG file; small images are enlarged by an integer factor. */
  async save() {
    const { images, columns, size: [height, width], settings } = this.answer, rows = Math.ceil(images.length / columns);
    const times = Math.max(1, Math.ceil(SAVED / (columns * (width + GAP) - GAP)));
    const canvas = Object.assign(document.createElement("canvas"), { width: (columns * (width + GAP) - GAP) * times, height: (rows * (height + GAP) - GAP) * times });
    const pen = canvas.getContext("2d");
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.imageSmoothingEnabled = false;
    await Promise.all(images.map(async (entry, index) => {
      const image = Object.assign(new Image(), { src: entry.image });
      await image.decode();
      const left = (index % columns) * (width + GAP), top = Math.floor(index / columns) * (height + GAP);
      pen.drawImage(image, left * times, top * times, width * times, height * times);
    }));
    const file = await new Promise((done) => canvas.toBlob(done, "image/png"));
    const link = Object.assign(make("a"), { href: URL.createObjectURL(file), download: fileName(settings) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }
}

/** Format a number of images. */
const count = (number) => `${number} ${number === 1 ? "image" : "images"}`;
/** Describe a generated image: its class, and its number within the class. */
const caption = (entry) => `${entry.class ? `${entry.class}, image` : "Image"} ${entry.number + 1}`;

/** Make a portable file name from class and seed. */
const fileName = ({ class: name, seed }) => `${(name ?? "images").replace(/[^\p{L}\p{N}._-]+/gu, "_").slice(0, 80) || "images"}-seed-${seed}.png`;

/** Format the remaining time, given the elapsed milliseconds and the fraction that is done. */
function left(elapsed, done) {
  const seconds = (elapsed / 1000) * (1 / done - 1);
  return seconds < 1.5 ? "almost done" : `about ${seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`} left`;
}

/** Describe the generated images and their settings. */
function words({ images, settings, seconds }) {
  const { class: name, seed, sampler, steps, guidance } = settings;
  const guided = guidance === 1 ? "" : `, guidance ${guidance}`;
  return `${count(images.length)}${name === null ? "" : ` of ${name}`}, seed ${seed}, ${sampler}, ${steps} steps${guided}, ${seconds.toFixed(1)}\u00a0s`;
}
