// One poll a second of what the coordinator saw, for all views of this page; none while the page is hidden.

import { apiKey, ask, frozen } from "./dom.js";

const EVERY_MS = 1000;
const IDLE_MS = 2000; // while all is well and nothing runs
const LOOKS_KEPT = 40;
const POINTS_KEPT = 300;
const STREAMS_KEPT = 4096;
const LATE_MS = 4000;

export const feed = {
  state: null,
  facts: {},
  zeroUnixMs: 0,
  look: 0,
  looks: [], // {number, from, to, skipped, steps}
  points: [],
  streams: new Map(), // request ids by the numbers that steps name
  heardMs: 0,
  error: null,
};

const listeners = new Set();
let timer = 0;
let running = false;
let wantsKey = () => {};

export function onKeyWanted(action) {
  wantsKey = action;
}

export function listen(action) {
  listeners.add(action);
  return () => listeners.delete(action);
}

export function isLate() {
  return !frozen && (feed.error !== null || performance.now() - feed.heardMs > LATE_MS);
}

function tell(fresh) {
  for (const action of listeners) action(fresh);
}

function take(answer) {
  if (answer.look < feed.look || answer.zero_unix_ms !== feed.zeroUnixMs) {
    // Another process answers: what was kept is of the one before.
    feed.looks = [];
    feed.points = [];
    feed.streams.clear();
    feed.look = 0;
  }
  feed.zeroUnixMs = answer.zero_unix_ms;
  feed.facts = answer.facts;
  feed.state = answer.state;
  const fresh = [];
  for (const [number, from, to, skipped, steps, streams] of answer.looks) {
    if (number <= feed.look) continue;
    const look = { number, from, to, skipped, steps };
    fresh.push(look);
    feed.looks.push(look);
    for (const [key, id] of Object.entries(streams)) {
      if (id) feed.streams.set(Number(key), id);
    }
  }
  feed.points.push(...answer.points);
  feed.points.splice(0, Math.max(0, feed.points.length - POINTS_KEPT));
  feed.looks.splice(0, Math.max(0, feed.looks.length - LOOKS_KEPT));
  for (const key of feed.streams.keys()) {
    if (feed.streams.size <= STREAMS_KEPT) break;
    feed.streams.delete(key);
  }
  feed.look = answer.look;
  return fresh;
}

async function poll() {
  if (running || (document.hidden && !frozen)) return;
  running = true;
  clearTimeout(timer);
  const began = performance.now();
  const key = apiKey();
  let fresh = [];
  try {
    const reply = await ask(`/v1/pipeline/live?after=${feed.look}`, { signal: AbortSignal.timeout(8000) });
    fresh = take(await reply.json());
    feed.heardMs = performance.now();
    feed.error = null;
  } catch (error) {
    feed.error = error;
    // Polls go on while a person types: a refusal of the key before says nothing of the one that was given meanwhile.
    if (error.status === 401 && apiKey() === key) wantsKey(error.message);
  }
  running = false;
  tell(fresh);
  const { state } = feed;
  const isIdle = feed.error === null && state.phase === "ready" && !state.running && !state.waiting;
  if (!frozen) timer = setTimeout(poll, Math.max(200, (isIdle ? IDLE_MS : EVERY_MS) - (performance.now() - began)));
}

export function start() {
  if (frozen) {
    poll();
    return;
  }
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer);
    else poll();
  });
  poll();
}

export function pollNow() {
  feed.error = null;
  poll();
}
