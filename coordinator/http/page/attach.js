// Images, audio and videos for a message of the chat: chosen, pasted or dropped; images made small enough; shown before they are sent.

import { feed } from "./feed.js";
import { h, say } from "./dom.js";

const TAKEN = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // what the server reads
const SIDE_MAX = 2048; // pixels; encoders look at fewer
const BYTES_MAX = 512 * 1024; // of one as a file: a chat sends all of its images with each turn
const READ_BYTES_MAX = 64 * 1024 * 1024; // of a file that is made smaller here
const QUALITY = 0.85; // of what is drawn anew
const AUDIO_BYTES_MAX = 4 * 1024 * 1024; // of an audio file: a chat sends all of them with each turn
const VIDEO_BYTES_MAX = 8 * 1024 * 1024; // of a video, likewise
const SOUNDS = /\.(wav|mp3|flac)$/i; // what the server reads

function urlOf(blob) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(blob);
  });
}

// The reverse: of an image that was kept with its chat.
export function blobOf(url) {
  const [head, data] = url.split(",");
  return new Blob([Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0))], { type: head.slice(5).split(";")[0] });
}

async function drawn(bitmap, share) {
  const side = Math.max(bitmap.width, bitmap.height);
  const scale = Math.min(1, SIDE_MAX / side) * share;
  const canvas = h("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#fff"; // behind what is transparent, as the server has it
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/jpeg", QUALITY));
}

// A file as it is sent: itself, or drawn smaller until it fits.
async function fitted(file) {
  if (file.size > READ_BYTES_MAX) throw new Error(`${file.name} is larger than 64 MiB`);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} is not an image that this browser can read`);
  }
  try {
    if (TAKEN.includes(file.type) && file.size <= BYTES_MAX && Math.max(bitmap.width, bitmap.height) <= SIDE_MAX) return file;
    for (let share = 1; ; share *= 0.75) {
      const blob = await drawn(bitmap, share);
      if (blob.size <= BYTES_MAX) return blob;
    }
  } finally {
    bitmap.close();
  }
}

function isSound(file) {
  return file.type.startsWith("audio/");
}

function isVideo(file) {
  return file.type.startsWith("video/");
}

// A video as it is sent: itself. The server says which formats it reads.
function checkedVideo(file) {
  if (file.size > VIDEO_BYTES_MAX) throw new Error(`${file.name} is larger than 8 MiB`);
  return file;
}

// An audio file as it is sent: itself.
function checkedSound(file) {
  if (!SOUNDS.test(file.name || "")) throw new Error(`${file.name || "audio"} is no WAV, MP3 or FLAC`);
  if (file.size > AUDIO_BYTES_MAX) throw new Error(`${file.name} is larger than 4 MiB`);
  return file;
}

// The part of an API's message for a file of a turn.
export function partOf({ name, url }) {
  if (url.startsWith("data:video/")) return { type: "video_url", video_url: { url } };
  if (!url.startsWith("data:audio/")) return { type: "image_url", image_url: { url } };
  return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format: name.split(".").pop().toLowerCase() } };
}

function filesIn(transfer) {
  return [...((transfer && transfer.files) || [])].filter((file) => file.type.startsWith("image/") || isSound(file) || isVideo(file));
}

function thumb({ name, url, shown }) {
  if (url.startsWith("data:audio/")) return h("audio.sound", { src: shown, controls: true, title: name, "aria-label": name });
  if (url.startsWith("data:video/")) return h("video.thumb", { src: shown, controls: true, title: name, "aria-label": name });
  return h("img.thumb", { src: shown, alt: name, title: name });
}

export function thumbs(images) {
  return images.map(thumb);
}

// The part of the form for a message that takes images, audio or videos, which are all in `images`. `kept` returns how many the turns before hold.
export class Attachments {
  constructor(input, kept, complain) {
    this.input = input;
    this.kept = kept;
    this.complain = complain;
    this.images = [];
    this.reading = Promise.resolve(); // files in the order in which they came
    this.chosen = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true });
    this.button = h("button", { type: "button", hidden: true, title: "You can also paste a file, or drop it here", onclick: () => this.chosen.click() }, "Attach image");
    this.list = h("ul.attached", { "aria-label": "Attached files", hidden: true });
    this.told = h("p.vh", { role: "status" });
    this.element = h("div.attach", null, this.list, this.told, this.chosen);
    this.chosen.addEventListener("change", () => {
      this.add([...this.chosen.files]);
      this.chosen.value = "";
    });
    input.addEventListener("paste", (event) => this.received(event, event.clipboardData));
  }

  get most() {
    return feed.facts.media_max || 0;
  }

  get takes() {
    return feed.facts.takes || { images: false, audio: false, video: false };
  }

  // What can be attached, for a person.
  get what() {
    const names = [this.takes.images && "image", this.takes.audio && "audio", this.takes.video && "video"].filter(Boolean);
    return names.length < 2 ? names.join() : `${names.slice(0, -1).join(", ")} or ${names.at(-1)}`;
  }

  // Lets images be dropped on an element.
  dropOn(element) {
    const over = (is) => element.classList.toggle("over", is);
    element.addEventListener("dragover", (event) => {
      if (![...event.dataTransfer.types].includes("Files")) return;
      event.preventDefault(); // else the browser leaves the page for the file
      event.dataTransfer.dropEffect = this.most ? "copy" : "none";
      over(Boolean(this.most));
    });
    element.addEventListener("dragleave", () => over(false));
    element.addEventListener("drop", (event) => {
      over(false);
      if ([...event.dataTransfer.types].includes("Files")) event.preventDefault();
      this.received(event, event.dataTransfer);
    });
  }

  received(event, transfer) {
    const files = filesIn(transfer);
    if (!files.length) return;
    event.preventDefault();
    this.add(files);
  }

  add(files) {
    this.reading = this.reading.then(async () => {
      for (const file of files) {
        try {
          await this.take(file);
        } catch (error) {
          this.complain(`${error.message}.`);
        }
      }
    });
    return this.reading;
  }

  async take(file) {
    if (!this.most) throw new Error("This model is served without a projector, so it takes no images, audio or videos");
    if (this.kept() + this.images.length >= this.most) throw new Error(`A chat has at most ${this.most} images, audio files and videos`);
    const [isTaken, kind] = isSound(file) ? [this.takes.audio, "audio"] : isVideo(file) ? [this.takes.video, "videos"] : [this.takes.images, "images"];
    if (!isTaken) throw new Error(`This server takes no ${kind} for this model`);
    const blob = isSound(file) ? checkedSound(file) : isVideo(file) ? checkedVideo(file) : await fitted(file);
    const name = file.name || "image";
    this.images.push({ name, url: await urlOf(blob), shown: URL.createObjectURL(blob) });
    this.complain("");
    say(this.told, `${name} is attached`);
    this.draw();
  }

  // Takes the images out, for the message that is being sent. Await `reading` before.
  sent() {
    const { images } = this;
    this.images = [];
    this.draw();
    return images;
  }

  // Puts images back into the message that is being written.
  restore(images) {
    this.images = [...images, ...this.images];
    this.draw();
  }

  // Makes these images the message's own.
  replace(images) {
    for (const image of this.images) URL.revokeObjectURL(image.shown);
    this.images = images;
    this.draw();
  }

  drop(image) {
    URL.revokeObjectURL(image.shown);
    this.images = this.images.filter((each) => each !== image);
    say(this.told, `${image.name} is taken out`);
    this.draw();
    (this.list.querySelector("button") || this.input).focus();
  }

  draw() {
    this.list.hidden = !this.images.length;
    this.list.replaceChildren(...this.images.map((image) => h("li", null, ...thumbs([image]),
      h("button", { type: "button", "aria-label": `Remove ${image.name}`, title: "Remove", onclick: () => this.drop(image) }, "×"))));
  }

  update() {
    this.button.hidden = !this.most;
    this.button.textContent = `Attach ${this.what || "image"}`;
    this.chosen.accept = [this.takes.images && "image/*", this.takes.audio && ".wav,.mp3,.flac", this.takes.video && "video/*"].filter(Boolean).join(",");
  }
}
