// The player of a clip: it shows the model's input frames on the stage, also for formats that the browser cannot play.

import { picture } from "./api.js";
import { part } from "./page.js";

const PAUSE = 220; // milliseconds that a frame is shown

export class Player {
  /** `change(frame)` is called with the index of the current frame. */
  constructor(stage, model, change) {
    Object.assign(this, { stage, count: model.image_size[0], change, frames: [], frame: 0, timer: null });
    part("frame").max = this.count - 1;
    part("play").addEventListener("click", () => (this.timer ? this.pause() : this.play()));
    part("frame").addEventListener("input", () => { this.pause(); this.go(Number(part("frame").value)); });
  }

  /** Request the frames of a clip from the server; returns one canvas per frame. */
  async open(file, name) {
    const strip = await createImageBitmap(await picture("v1/frames", file, name));
    const width = strip.width, height = strip.height / this.count;
    return Array.from({ length: this.count }, (_, frame) => {
      const canvas = Object.assign(document.createElement("canvas"), { width, height });
      canvas.getContext("2d").drawImage(strip, 0, -frame * height);
      return canvas;
    });
  }

  /** Show the frames of another clip, or none. They are played unless the user prefers reduced motion. */
  show(frames) {
    this.pause();
    Object.assign(this, { frames: frames ?? [] });
    part("player").hidden = !this.frames.length;
    if (!this.frames.length) return;
    this.go(0);
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) this.play();
  }

  /** Show a frame by its index. */
  go(frame) {
    this.frame = frame;
    const pixels = this.frames[frame], words = `${frame + 1} of ${this.count}`;
    this.stage.shown = { pixels, width: pixels.width, height: pixels.height };
    part("frame").value = frame;
    part("frame").setAttribute("aria-valuetext", words);
    part("frame-text").textContent = words;
    this.change(frame);
    this.stage.draw();
  }

  play() {
    this.timer ??= setInterval(() => this.go((this.frame + 1) % this.frames.length), PAUSE);
    part("play").textContent = "Pause";
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    part("play").textContent = "Play";
  }
}
