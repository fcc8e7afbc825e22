// The page: a picture comes in, is shown, asked about, and kept for the session.

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

/** What is waited for, by its name: the word `Looking` stays while there is anything. */
const busy = (name, flag) => {
  waits[flag ? "add" : "delete"](name);
  part("busy").hidden = !waits.size;
};

function failed(error, again = null) {
  if (error.name === "AbortError") return;
  if (!(error instanceof Refused)) console.error(error);
  const message = error instanceof Refused ? error.message : "The page failed.";
  trouble(message, error.hint ?? "", error.passing ? again : null);
}

/** Pictures one after the other: each is looked at and kept, the last one stays. */
function take(files) {
  if (!files.length || model?.can.sample) return;
  calm();
  for (const file of files) waiting = waiting.then(() => look(file));
}

async function look(file) {
  if (!model) await start();
  if (!model) return;
  const name = file.name || "pasted image", own = ++turn;
  const { bytes } = model.limits ?? {};
  if (bytes && file.size > bytes) {
    trouble(`${name} has ${megabytes(file.size)}, more than the ${megabytes(bytes)} that this server takes.`, "Save it smaller, then try again.");
    return;
  }
  try {
    await file.slice(0, 1).arrayBuffer();
  } catch {
    trouble(`${name} cannot be read.`, "It may be a folder, or have changed since it was chosen.");
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
      trouble("The server has another model now.", "Load the page again to ask it.", () => location.reload());
      if (own === turn) await back();
      return;
    }
    const prediction = answer.class_map || answer.objects ? answer : (answer.predictions ?? answer.embeddings)[0]; // an encoder without a head has no classes
    if (prediction.error) throw new Refused(prediction.error.message, prediction.error.hint ?? "", prediction.error.code);
    const entry = { file, name, frames, prediction, maps: new Map(), ...small(shown) };
    history.keep(entry);
    if (own === turn) await show(entry, shown);
  } catch (error) {
    error.message = error.message.replace(/^image: /, `${name}: `); // what the server calls it
    failed(error, () => take([file]));
    if (own === turn) await back();
  } finally {
    busy("answer", false);
  }
}

/** What was on the stage before, or nothing. */
async function back() {
  if (history.current) await show(history.current);
  else put(null, "");
}

/** The middle frame of a clip, as a picture. */
function still(frames) {
  const pixels = frames[frames.length >> 1];
  return { pixels, width: pixels.width, height: pixels.height };
}

/** A picture on the stage, or a clip's frames, without its attention; null leaves the stage empty. */
function put(shown, name, frames = null) {
  stage.shown = shown;
  stage.map = null;
  part("empty").hidden = Boolean(name);
  part("stage").classList.toggle("bare", !name);
  part("readout").textContent = name || "\u00a0";
  part("picture").setAttribute("aria-label", name || "No picture yet");
  if (name && !shown) part("readout").textContent = `${name}: the browser cannot show this format, the model can read it.`;
  attention?.show(null);
  classes?.show(null);
  objects?.show(null);
  player?.show(frames);
  stage.draw();
}

/** An entry with all that is known of it. */
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
  else say(rows ? `${entry.name}: ${entry.prediction.unsure ? "unsure. " : ""}${best || "no class"}.` : entry.name);
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

const megabytes = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MiB`;

/** What the model is, in the head of the page and in full. */
function introduce() {
  const count = model.classes.length ? `${model.classes.length} ${model.classes.length === 1 ? "class" : "classes"}` : "";
  const valued = model.targets.length && `predicts ${model.targets.slice(0, 3).join(", ")}${model.targets.length > 3 ? ", …" : ""}`;
  const does = valued || (model.capabilities.sample ? `makes images${count && ` of ${count}`}` : count && `${count}${model.capabilities.segment ? " of pixels" : model.capabilities.detect ? " of objects" : ""}`);
  part("model").textContent = `${model.name} · ${does || "features, no classes"}`;
  part("answer").hidden = !model.capabilities.predict;
  document.title = `${model.name} · vitreous`;
  const facts = {
    Model: model.name, Version: model.version, Parameters: model.parameters?.toLocaleString("en"),
    [model.capabilities.frames ? "Clip" : "Image"]: model.image_size && `${model.image_size.join(" × ")} pixels, ${model.channels} channels`, Patch: model.patch_size && `${model.patch_size.join(" × ")} pixels`,
    Blocks: model.layers && `${model.layers}, ${model.heads} heads each`, Computed: [model.precision, model.engine].filter(Boolean).join(", by "),
    Temperature: model.temperature, vitreous: model.vitreous,
    Origin: Object.entries(model.provenance ?? {}).filter(([, value]) => typeof value !== "object").map(([key, value]) => `${key} ${value}`).join(", "),
  };
  part("facts").replaceChildren(...Object.entries(facts).filter(([, value]) => value).flatMap(([key, value]) => [make("dt", "", key), make("dd", "", String(value))]));
}

/** Drop, paste, choose. */
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

/** Ask for the token; an empty one where the question is put aside. */
function token(wrong) {
  const dialog = part("token");
  part("token-text").textContent = wrong ? "That was not the token." : "This server wants the token that it was started with.";
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
