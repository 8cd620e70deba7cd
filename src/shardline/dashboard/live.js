// The one connection behind everything that moves on the page: GET v1/live. While nobody looks there is none.

import { changed, state, take } from "./store.js";
import { Failure, eventsOf, failureOf } from "./stream.js";

const SILENT_MS = 12_000; // the Gateway says something each second, or each few seconds while it waits for the Tracker
const HIDDEN_MS = 20_000;
const KEY = "shardline.key";
let abort = null;
let hidden = 0;
let retry = 0;
let failures = 0;

export const key = () => sessionStorage.getItem(KEY) ?? "";

export function authorised(headers = {}) {
  return key() ? { ...headers, authorization: `Bearer ${key()}` } : headers;
}

/** Ends a session; also while the page goes away. */
export function cancelSession(id) {
  const url = `v1/route-sessions/${encodeURIComponent(id)}`;
  return fetch(url, { method: "DELETE", headers: authorised(), keepalive: true }).catch(() => {});
}

/** Take another key, or none, and connect anew. */
export function useKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
  start();
}

/** Connect now, whatever was before. */
export function start() {
  stop();
  failures = 0;
  connect();
}

function stop() {
  clearTimeout(retry);
  abort?.abort();
  abort = null;
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (document.visibilityState === "hidden") hidden = setTimeout(stop, HIDDEN_MS);
  else if (!abort && state.link.state !== "locked") start();
});

async function connect() {
  const mine = (abort = new AbortController());
  let watch = 0;
  const heard = () => {
    clearTimeout(watch);
    watch = setTimeout(() => mine.abort(), SILENT_MS);
  };
  try {
    heard();
    const response = await fetch("v1/live", { headers: authorised(), cache: "no-store", signal: mine.signal });
    if (!response.ok) throw await failureOf(response);
    for await (const { event, data } of eventsOf(response, heard)) {
      failures = 0;
      state.link = { ...state.link, state: "live", error: null };
      take(event, JSON.parse(data));
    }
    throw new Failure({ code: "gateway_ended", message: "The Gateway has ended.", advice: "It is asked again until it is back." });
  } catch (error) {
    if (abort === mine) lost(error);
  } finally {
    clearTimeout(watch);
  }
}

function lost(error) {
  abort = null;
  const said = error instanceof Failure ? error.error : null;
  if (said?.code === "unauthorized") {
    state.link = { ...state.link, state: "locked", error: key() ? said : null };
  } else {
    const unreached = { code: "unreachable", message: "The Gateway is not reached.", advice: "It is asked again until it is back." };
    state.link = { ...state.link, state: "lost", error: said ?? unreached };
    failures += 1;
    retry = setTimeout(connect, Math.min(8000, 500 * 2 ** Math.min(failures, 4)));
  }
  changed();
}
