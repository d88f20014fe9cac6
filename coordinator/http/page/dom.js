// Small helpers: elements, numbers as people read them, and asking the API.

export function h(tag, given, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(given || {})) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function svg(tag, given, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(given || {})) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// Text that has not changed is left alone: nothing is laid out anew, and selections stay.
export function say(element, text) {
  const wanted = text === null || text === undefined ? "" : String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function mark(element, className, is) {
  if (element.classList.contains(className) !== Boolean(is)) element.classList.toggle(className, Boolean(is));
}

// Rows of a table or list, kept by their keys: the element of a key stays the same for as long as the key does.
export class Keyed {
  constructor(parent, make, update) {
    this.parent = parent;
    this.make = make;
    this.update = update;
    this.known = new Map();
  }

  show(items, keyOf) {
    const before = this.known;
    const wanted = new Set();
    const keys = items.map((item, index) => {
      const key = keyOf(item, index);
      const own = wanted.has(key) ? `${key} ${index}` : key; // clients may use an id twice
      wanted.add(own);
      return own;
    });
    // What goes is taken out first: an element that is moved loses its focus.
    for (const [key, entry] of before) {
      if (!wanted.has(key)) entry.element.remove();
    }
    this.known = new Map();
    let at = this.parent.firstElementChild;
    items.forEach((item, index) => {
      const entry = before.get(keys[index]) || this.make(item, index);
      this.known.set(keys[index], entry);
      if (entry.element === at) at = at.nextElementSibling;
      else this.parent.insertBefore(entry.element, at);
      this.update(entry, item, index);
    });
  }
}

// The head of a table's column: [name, side, what it means]. That of buttons is for those who hear the page.
export function heading([name, side, meaning]) {
  return h(side ? `th.${side}` : "th", { scope: "col", title: meaning }, side === "act" ? h("span.vh", null, name) : name);
}

export const none = "–";

// A message of the server as a sentence of the page.
export function sentence(text) {
  const whole = text.trim();
  return `${whole.charAt(0).toUpperCase()}${whole.slice(1)}${/[.!?…]$/.test(whole) ? "" : "."}`;
}

export function plural(n, one, many) {
  return n === 1 ? one : many || `${one}s`;
}

export function count(value) {
  return value === null || value === undefined ? none : Math.round(value).toLocaleString("en-US");
}

export function fixed(value, digits) {
  return value === null || value === undefined ? none : value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? none : `${(share * 100).toFixed(digits)} %`;
}

export function ms(value) {
  if (value === null || value === undefined) return none;
  if (value >= 100000) return `${(value / 1000).toFixed(0)} s`;
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  if (value >= 100) return `${value.toFixed(0)} ms`;
  return value >= 10 ? `${value.toFixed(1)} ms` : `${value.toFixed(2)} ms`;
}

export function bytes(value) {
  if (value === null || value === undefined) return none;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at === 0 || value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} ${units[at]}`;
}

export function ago(seconds) {
  if (seconds === null || seconds === undefined) return "never";
  if (seconds < 1.5) return "now";
  return seconds < 120 ? `${seconds.toFixed(0)} s ago` : `${(seconds / 60).toFixed(0)} min ago`;
}

export function layers([start, end]) {
  return end - start === 1 ? `${start}` : `${start}–${end - 1}`;
}

export function stageName(stage) {
  return stage.name || `stage ${stage.index}`;
}

const KEY = "relayline.key";

export function apiKey() {
  return sessionStorage.getItem(KEY) || "";
}

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// A report holds the answers that a server gave when it was made.
const kept = document.getElementById("frozen");
export const frozen = kept ? JSON.parse(kept.textContent) : null;

// Behind a gateway the page is below /pipelines/NAME/, and so is all that it asks for.
export const home = location.pathname.replace(/[^/]*$/, "");

export async function ask(path, given = {}) {
  if (frozen) {
    const answer = frozen.answers[frozen.aliases[path] || path];
    if (answer) return { json: async () => answer };
    throw new ApiError(404, "This report does not contain that.");
  }
  const headers = { ...(given.body ? { "Content-Type": "application/json" } : {}) };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  const reply = await fetch(home + path.slice(1), { ...given, headers, cache: "no-store", credentials: "omit" });
  if (reply.ok) return reply;
  let told = null;
  try {
    told = (await reply.json()).error;
  } catch {
    told = null;
  }
  throw new ApiError(reply.status, (told && told.message) || `the server answered ${reply.status}`, told && told.code);
}

// Without TLS a browser keeps its clipboard from pages: then the text is selected, and copied as by hand.
function copySelected(element) {
  if (!element) return false;
  getSelection().selectAllChildren(element);
  return document.execCommand("copy");
}

// `textOf` gives what is copied, `of` the element that shows it.
export function copyButton(textOf, of, name = "Copy") {
  const button = h("button", { type: "button" }, name);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(textOf());
      say(button, "Copied");
    } catch {
      say(button, copySelected(of()) ? "Copied" : "Selected");
    }
    setTimeout(() => say(button, name), 1600);
  });
  return button;
}

// Code with a button that copies it; with its language above it, if that is given.
export function codeBlock(text, language) {
  const pre = h("pre.code", { tabindex: "0", dir: "ltr" }, text);
  const button = copyButton(() => pre.textContent, () => pre);
  if (language === undefined) return h(".copy", null, pre, button);
  return h(".fence", null, h(".fence-head", null, h("span", null, language || "code"), button), pre);
}

const colours = {};

export function colour(name) {
  if (!(name in colours)) colours[name] = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return colours[name];
}

// Black or white, whichever is read more easily on a colour.
export function inkOn(name) {
  const key = `on ${name}`;
  if (!(key in colours)) {
    const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(colour(name).slice(at, at + 2), 16) / 255) ** 2.2);
    colours[key] = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.19 ? "#0f1113" : "#ffffff";
  }
  return colours[key];
}

export function forgetColours() {
  for (const name of Object.keys(colours)) delete colours[name];
}

export function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

export const stillness = matchMedia("(prefers-reduced-motion: reduce)");
