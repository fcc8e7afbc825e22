// Entry point of the page: show an image, request its predictions, and keep both in the history.

import { MOST, answers, blank, neighbours, values } from "./answers.js";
import { Refused, numbers, onToken, upload } from "./api.js";
import { Attention } from "./attention.js";
import { Classes } from "./classes.js";
import { camera } from "./camera.js";
import { Generator } from "./generator.js";
import { History, small } from "./history.js";
import { inside } from "./inside.js";
import { LEAST, Objects, counted } from "./objects.js";
import { calm, described, make, part, percent, say, trouble } from "./page.js";
import { Player } from "./player.js";
import { Stage, opened } from "./stage.js";

const stage = new Stage(part("picture"), part("plain"));
const history = new History((entry) => { calm(); show(entry); });
let model = null, attention = null, classes = null, objects = null, player = null, turn = 0, waiting = Promise.resolve();
const waits = new Set();

/** Mark a pending request by name; the busy text is shown while any request is pending. */
const busy = (name, flag) => {
  waits[flag ? "add" : "delete"](name);
  part("busy").hidden = !waits.size;
};

function failed(error, again = null) {
  if (error.name === "AbortError") return;
  if (!(error instanceof Refused)) console.error(error);
  const message = error instanceof Refused ? error.message : "Unexpected error on this page.";
  trouble(message, error.hint ?? "", error.passing ? again : null);
}

/** Process images in order; all are kept in the history, and the last one stays on the stage. */
function take(files) {
  if (!files.length || model?.capabilities.sample) return;
  calm();
  for (const file of files) waiting = waiting.then(() => look(file));
}

async function look(file) {
  if (!model) await start();
  if (!model) return;
  const name = file.name || "pasted image", own = ++turn;
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
    const answer = await numbers(path, upload(file, name));
    if (answer.model.version !== model.version) {
      trouble("The served model has changed.", "Reload the page to use the new model.", () => location.reload());
      if (own === turn) await back();
      return;
    }
    const prediction = answer.class_map || answer.objects ? answer : (answer.predictions ?? answer.embeddings)[0]; // an encoder without a head has no classes
    if (prediction.error) throw new Refused(prediction.error.message, prediction.error.hint ?? "", prediction.error.code);
    const entry = { file, name, frames, prediction, maps: new Map(), ...small(shown) };
    history.keep(entry);
    if (own === turn) await show(entry, shown);
  } catch (error) {
    error.message = error.message.replace(/^image: /, `${name}: `); // the server's name of the upload
    failed(error, () => take([file]));
    if (own === turn) await back();
  } finally {
    busy("answer", false);
  }
}

/** Show the previous entry, or an empty stage. */
async function back() {
  if (history.current) await show(history.current);
  else put(null, "");
}

/** The middle frame of a clip, as an image. */
function still(frames) {
  const pixels = frames[frames.length >> 1];
  return { pixels, width: pixels.width, height: pixels.height };
}

/** Put an image, or a clip's frames, on the stage, without attention; null empties the stage. */
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
  player?.show(frames);
  stage.draw();
}

/** Show an entry of the history with its predictions. */
async function show(entry, shown = null) {
  const own = ++turn;
  shown ??= entry.frames ? still(entry.frames) : await opened(entry.file);
  if (own !== turn) return;
  put(shown, entry.name, entry.frames);
  history.mark(entry);
  if (entry.prediction.values) values(entry.prediction);
  else if (model.capabilities.predict) answers(entry.prediction, model.multilabel);
  const rows = entry.prediction.classes ?? entry.prediction.class_shares;
  const best = rows?.slice(0, 3).map((one) => `${one.class} ${percent(one.probability ?? one.share)}`).join(", ");
  if (entry.prediction.values) say(`${entry.name}: ${described(entry.prediction.values)}.`);
  else if (entry.prediction.objects) say(`${entry.name}: ${counted(entry.prediction.objects)}.`);
  else say(rows ? `${entry.name}: ${entry.prediction.unsure ? "uncertain. " : ""}${best || "no class"}.` : entry.name);
  attention?.show(entry);
  classes?.show(entry);
  objects?.show(entry);
  if (!model.capabilities.neighbours) return;
  try {
    entry.near ??= (await numbers("v1/neighbours?count=8", upload(entry.file, entry.name))).neighbours;
    if (own === turn) neighbours(entry.near);
  } catch (error) {
    if (own === turn) failed(error, () => show(entry));
  }
}

/** The name of the model's task. */
function taskTitle() {
  const can = model.capabilities;
  if (can.sample) return can.frames ? "Video generation" : "Image generation";
  if (can.segment) return "Semantic segmentation";
  if (can.detect) return "Object detection";
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
  part("model").textContent = `${model.name} · ${taskTitle()}, ${targets || count || "no classes"}`;
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

/** Request the access token from the user; an empty string if the dialog is cancelled. */
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
    for (const one of document.querySelectorAll("[data-clip]")) one.textContent = one.dataset.clip;
    part("camera").style.display = "none";
    part("file").ariaLabel = "Choose a clip";
    part("file").accept = "video/*,.gif,.mkv,.avi,.mov,.mpg,.mpeg";
  }
  if (model.capabilities.segment) classes = new Classes(stage, model);
  if (model.capabilities.detect) objects = new Objects(stage, model);
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
