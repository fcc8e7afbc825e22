// Entry point of the page: it shows an image, requests its predictions, and keeps both in the history.

import { MOST, answers, blank, neighbours, values } from "./answers.js";
import { Refused, numbers, onToken, upload } from "./api.js";
import { Attention } from "./attention.js";
import { Classes } from "./classes.js";
import { camera } from "./camera.js";
import { Generator } from "./generator.js";
import { History, small } from "./history.js";
import { inside } from "./inside.js";
import { Labels } from "./labels.js";
import { LEAST, Objects, counted } from "./objects.js";
import { calm, described, make, part, percent, say, trouble } from "./page.js";
import { Player } from "./player.js";
import { Stage, opened } from "./stage.js";

const stage = new Stage(part("picture"), part("plain"));
const history = new History((entry) => { calm(); show(entry); });
let model = null, attention = null, classes = null, objects = null, labels = null, player = null, turn = 0, waiting = Promise.resolve();
const waits = new Set();

/** Mark a named request as pending or finished; "Computing…" is shown while any request is pending. */
const busy = (name, flag) => {
  waits[flag ? "add" : "delete"](name);
  part("busy").hidden = !waits.size;
};

/** Show an error; `again` repeats the request, which is offered if it may succeed. */
function failed(error, again = null) {
  if (error.name === "AbortError") return;
  if (!(error instanceof Refused)) console.error(error);
  const message = error instanceof Refused ? error.message : "Unexpected error on this page.";
  trouble(message, error.hint ?? "", error.passing ? again : null);
}

/** Process image files in order. All are kept in the history; the last one stays on the stage. */
function take(files) {
  if (!files.length || model?.capabilities.sample) return;
  calm();
  for (const file of files) waiting = waiting.then(() => look(file));
}

/** Show a file, request its predictions, and add both to the history as an entry. */
async function look(file) {
  if (!model) await start();
  if (!model) return;
  const name = file.name || "pasted image", thisTurn = ++turn;
  const { bytes } = model.limits ?? {};
  if (bytes && file.size > bytes) {
    trouble(`${name} is ${megabytes(file.size)}; this server accepts at most ${megabytes(bytes)}.`, "Reduce the file size, then try again.");
    return;
  }
  try {
    await file.slice(0, 1).arrayBuffer();
  } catch {
    trouble(`${name} cannot be read.`, "It may be a folder, or the file may have changed since it was chosen.");
    return;
  }
  busy("answer", true);
  try {
    const frames = player && (await player.open(file, name)), shown = frames ? still(frames) : await opened(file);
    put(shown, name, frames);
    if (model.capabilities.predict) blank(model.targets.length || model.classes.length);
    const top = Math.min(MOST, model.classes.length);
    const dense = model.capabilities.segment ? "v1/segment" : model.capabilities.detect ? `v1/detect?threshold=${LEAST}` : "v1/embed";
    const path = model.capabilities.predict ? `v1/predict${top ? `?top=${top}` : ""}` : dense;
    const response = await numbers(path, upload(file, name));
    if (response.model.version !== model.version) {
      trouble("The served model has changed.", "Reload the page to use the new model.", () => location.reload());
      if (thisTurn === turn) await back();
      return;
    }
    const prediction = response.class_map || response.objects ? response : (response.predictions ?? response.embeddings)[0]; // an encoder without a head has only embeddings
    if (prediction.error) throw new Refused(prediction.error.message, prediction.error.hint ?? "", prediction.error.code);
    const entry = { file, name, frames, prediction, maps: new Map(), ...small(shown) };
    history.keep(entry);
    if (thisTurn === turn) await show(entry, shown);
  } catch (error) {
    error.message = error.message.replace(/^image: /, `${name}: `); // the server calls every upload "image"
    failed(error, () => take([file]));
    if (thisTurn === turn) await back();
  } finally {
    busy("answer", false);
  }
}

/** Show the previous entry of the history again, or an empty stage. */
async function back() {
  if (history.current) await show(history.current);
  else put(null, "");
}

/** Return the middle frame of a clip as an image for the stage. */
function still(frames) {
  const pixels = frames[frames.length >> 1];
  return { pixels, width: pixels.width, height: pixels.height };
}

/** Put an image, or the frames of a clip, on the stage, without predictions; null empties the stage. */
function put(shown, name, frames = null) {
  stage.shown = shown;
  stage.map = null;
  part("empty").hidden = Boolean(name);
  part("stage").classList.toggle("bare", !name);
  part("readout").textContent = name || "\u00a0";
  part("picture").setAttribute("aria-label", name || "No image yet");
  if (name && !shown) part("readout").textContent = `${name}: this browser cannot display the format, but the model can read it.`;
  attention?.show(null);
  classes?.show(null);
  objects?.show(null);
  labels?.select(null);
  player?.show(frames);
  stage.draw();
}

/** Show an entry of the history with its predictions. `shown` is its opened image, if it is available. */
async function show(entry, shown = null) {
  const thisTurn = ++turn;
  shown ??= entry.frames ? still(entry.frames) : await opened(entry.file);
  if (thisTurn !== turn) return;
  put(shown, entry.name, entry.frames);
  history.mark(entry);
  if (entry.prediction.values) values(entry.prediction);
  else if (model.capabilities.predict) answers(entry.prediction, model.multilabel);
  const rows = entry.prediction.classes ?? entry.prediction.class_shares;
  const best = rows?.slice(0, 3).map((row) => `${row.class} ${percent(row.probability ?? row.share)}`).join(", ");
  if (entry.prediction.values) say(`${entry.name}: ${described(entry.prediction.values)}.`);
  else if (entry.prediction.objects) say(`${entry.name}: ${counted(entry.prediction.objects)}.`);
  else say(rows ? `${entry.name}: ${entry.prediction.unsure ? "uncertain. " : ""}${best || "no class"}.` : entry.name);
  attention?.show(entry);
  classes?.show(entry);
  objects?.show(entry);
  labels?.select(entry);
  if (!model.capabilities.neighbours) return;
  try {
    entry.near ??= (await numbers("v1/neighbours?count=8", upload(entry.file, entry.name))).neighbours;
    if (thisTurn === turn) neighbours(entry.near);
  } catch (error) {
    if (thisTurn === turn) failed(error, () => show(entry));
  }
}

/** Show the scores of labels for an entry, on the page and in the history. */
function scored(entry) {
  answers(entry.prediction, labels.multilabel);
  history.draw();
  say(`${entry.name}: ${entry.prediction.classes.slice(0, 3).map((row) => `${row.class} ${percent(row.probability)}`).join(", ")}.`);
}

/** Return the title of the model's task. */
function taskTitle() {
  const can = model.capabilities;
  if (can.sample) return can.frames ? "Video generation" : "Image generation";
  if (can.segment) return "Semantic segmentation";
  if (can.detect) return "Object detection";
  if (can.zero_shot) return "Zero-shot classification";
  if (!can.predict) return "Feature extraction";
  if (model.targets.length) return "Regression";
  const title = can.frames ? "Video classification" : "Image classification";
  return model.multilabel ? `Multi-label ${title.toLowerCase()}` : title;
}

const megabytes = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MiB`;

/** Describe the model in the header and under "Model details". */
function introduce() {
  const count = model.classes.length ? `${model.classes.length} ${model.classes.length === 1 ? "class" : "classes"}` : "";
  const targets = model.targets.slice(0, 3).join(", ") + (model.targets.length > 3 ? ", …" : "");
  part("model").textContent = `${model.name} · ${taskTitle()}, ${targets || count || (model.capabilities.zero_shot ? "any labels" : "no classes")}`;
  part("answer-title").textContent = taskTitle();
  part("answer").hidden = !model.capabilities.predict;
  document.title = `${taskTitle()} · ${model.name} · vitreous`;
  const facts = {
    Model: model.name, Version: model.version, Parameters: model.parameters?.toLocaleString("en"),
    [model.capabilities.frames ? "Clip" : "Image"]: model.image_size && `${model.image_size.join(" × ")} pixels, ${model.channels} channels`, Patch: model.patch_size && `${model.patch_size.join(" × ")} pixels`,
    Blocks: model.layers && `${model.layers}, ${model.heads} heads each`, Compute: [model.precision, model.engine].filter(Boolean).join(", "),
    Temperature: model.temperature, vitreous: model.vitreous,
    Provenance: Object.entries(model.provenance ?? {}).filter(([, value]) => typeof value !== "object").map(([key, value]) => `${key} ${value}`).join(", "),
  };
  part("facts").replaceChildren(...Object.entries(facts).filter(([, value]) => value).flatMap(([key, value]) => [make("dt", "", key), make("dd", "", String(value))]));
}

/** Accept files that are dropped, pasted or chosen. */
function listen() {
  const over = (flag) => part("stage").classList.toggle("over", flag);
  const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  addEventListener("dragover", (event) => { if (carries(event)) { event.preventDefault(); over(true); } });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) over(false); });
  addEventListener("drop", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    over(false);
    take([...event.dataTransfer.files]);
  });
  addEventListener("paste", (event) => take([...(event.clipboardData?.files ?? [])]));
  part("file").addEventListener("change", () => { take([...part("file").files]); part("file").value = ""; });
  camera((file) => take([file]));
}

/** Ask the user for the access token in a dialog. Resolves to an empty string if the dialog is cancelled. */
function token(wrong) {
  const dialog = part("token");
  part("token-text").textContent = wrong ? "Invalid token." : "This server requires an access token.";
  part("token-value").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener("close", () => done(dialog.returnValue === "go" ? part("token-value").value.trim() : ""), { once: true });
  });
}

/** Request the description of the model, and show the panels that it supports. */
async function start() {
  try {
    model = await numbers("v1/model");
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    trouble(error.message, error.hint, start);
    return;
  }
  introduce();
  if (model.capabilities.predict) blank(model.targets.length || model.classes.length);
  if (model.capabilities.frames) {
    player = new Player(stage, model, (frame) => attention?.at(frame));
    for (const element of document.querySelectorAll("[data-clip]")) element.textContent = element.dataset.clip;
    part("camera").style.display = "none";
    part("file").ariaLabel = "Choose a clip";
    part("file").accept = "video/*,.gif,.mkv,.avi,.mov,.mpg,.mpeg";
  }
  if (model.capabilities.segment) classes = new Classes(stage, model);
  if (model.capabilities.detect) objects = new Objects(stage, model);
  if (model.capabilities.zero_shot) labels = new Labels(scored, (flag) => busy("labels", flag), failed);
  if (model.capabilities.sample) new Generator(model, failed);
  if (model.capabilities.attention) {
    attention = new Attention(stage, model, failed, (flag) => busy("attention", flag));
    Object.assign(stage.canvas, { tabIndex: 0 }).setAttribute("role", "application");
  }
  inside(model.capabilities);
}

put(null, "");
listen();
onToken(token);
start();
