/* The field where a message is written.
   Owns: its text, attached images (made smaller where large), its buttons.
   Does not know: how a message is sent. */

import { $, announce, coarse, el, fit, iconButton, isEnter } from "./dom.js";

const LARGEST_PX = 2048;
const LARGEST_BYTES = 2 << 20; // a body may have 8 MiB, and base64 adds a third

export class Composer {
  /** `send(text, images)`; `stop()`; `editLast()`. */
  constructor({ send, stop, editLast }) {
    this.send = send;
    this.images = [];
    this.takesImages = false;
    this.running = false;
    $("composer").addEventListener("submit", (event) => { event.preventDefault(); this._submit(); });
    $("prompt").addEventListener("input", () => this.update());
    $("prompt").addEventListener("keydown", (event) => {
      if (isEnter(event)) { event.preventDefault(); this._submit(); }
      if (event.key === "ArrowUp" && !$("prompt").value) { event.preventDefault(); editLast(); }
    });
    $("prompt").addEventListener("paste", (event) => this._attach(event.clipboardData.files, event));
    $("composer").addEventListener("dragover", (event) => { if (this.takesImages) { event.preventDefault(); $("composer").classList.add("dropping"); } });
    $("composer").addEventListener("dragleave", () => $("composer").classList.remove("dropping"));
    $("composer").addEventListener("drop", (event) => { $("composer").classList.remove("dropping"); this._attach(event.dataTransfer.files, event); });
    $("attach").addEventListener("click", () => $("image-file").click());
    $("image-file").addEventListener("change", () => this._attach($("image-file").files).then(() => { $("image-file").value = ""; }));
    $("stop").addEventListener("click", stop);
    for (const example of $("examples").children) example.addEventListener("click", () => { if (!this.running) this.send(example.textContent, []); });
    this.update();
  }

  focus() { if (!coarse()) $("prompt").focus(); }

  update() {
    fit($("prompt"));
    // One button replaces the other: a focus on it must not be lost.
    const focused = [$("send"), $("stop")].includes(document.activeElement);
    $("send").hidden = this.running;
    $("stop").hidden = !this.running;
    if (focused) this.focus();
    $("send").disabled = !$("prompt").value.trim() && !this.images.length;
    $("attach").hidden = !this.takesImages;
    $("attached").hidden = !this.images.length;
  }

  _submit() {
    const text = $("prompt").value.trim();
    if (this.running || !(text || this.images.length)) return;
    const { images } = this;
    $("prompt").value = "";
    this.images = [];
    this._drawImages();
    this.send(text, images);
  }

  async _attach(files, event) {
    const images = [...files].filter(({ type }) => type.startsWith("image/"));
    if (!images.length) return;
    event?.preventDefault();
    if (!this.takesImages) { announce("This model takes no images."); return; }
    for (const file of images) {
      try { this.images.push(await dataUrl(file)); } catch { announce(`${file.name} is not an image this browser can read.`); }
    }
    this._drawImages();
  }

  _drawImages() {
    $("attached").replaceChildren(...this.images.map((src, i) => el("figure", {}, el("img", { src, alt: `Image ${i + 1}` }),
      iconButton("close", `Remove image ${i + 1}`, () => { this.images.splice(i, 1); this._drawImages(); this.focus(); }))));
    this.update();
  }
}

async function dataUrl(file) {
  const picture = await createImageBitmap(file);
  const scale = Math.min(1, LARGEST_PX / Math.max(picture.width, picture.height));
  if (scale === 1 && file.size <= LARGEST_BYTES && /^image\/(png|jpeg|webp|gif)$/.test(file.type)) {
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
  }
  const canvas = el("canvas", { width: Math.round(picture.width * scale), height: Math.round(picture.height * scale) });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}
