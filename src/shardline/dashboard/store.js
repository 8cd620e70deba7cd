// What the page knows: the link to the Gateway, the sessions, the cluster. Filled by live.js, read by the views.

const SAMPLES = 1200;
const LOG_LINES = 200;
const LOG_NODES = 128; // as many as a Gateway keeps

export const state = {
  link: { state: "connecting", error: null },
  hello: null,
  /** Seconds that the Gateway's clock is ahead of ours. */
  ahead: 0,
  sessions: new Map(),
  /** Session id -> [[seconds since it began, tokens/s]] */
  samples: new Map(),
  /** models, nodes, artifacts, routes, tracker: as the Tracker said them last. */
  /** Node id -> its last log lines [{ n, time, level, text }], also of Nodes that are gone. */
  logs: new Map(),
  cluster: { models: null, nodes: null, artifacts: null, routes: null, tracker: null },
};

const listeners = new Set();

export function onChange(listener) {
  listeners.add(listener);
}

export function changed() {
  for (const listener of listeners) listener();
}

/** Unix seconds at the Gateway. */
export const now = () => Date.now() / 1000 + state.ahead;

export const ENDED = new Set(["completed", "failed", "cancelled"]);
export const isLive = (session) => !ENDED.has(session.phase);

export function take(name, value) {
  if (name === "hello") {
    state.hello = value;
    state.ahead = value.time - Date.now() / 1000;
    state.sessions.clear(); // all of them follow
    state.logs.clear();
  } else if (name === "sessions") {
    for (const session of value) takeSession(session);
  } else if (name === "log") {
    const lines = [...(state.logs.get(value.node) ?? []), ...value.lines].slice(-LOG_LINES);
    state.logs.delete(value.node); // the first is the one that was longest unheard
    state.logs.set(value.node, lines);
    if (state.logs.size > LOG_NODES) state.logs.delete(state.logs.keys().next().value);
  } else {
    state.cluster[name] = value;
    if (name === "tracker") forget();
  }
  changed();
}

function takeSession(session) {
  const before = state.sessions.get(session.id);
  if (before && before.seq > session.seq) return;
  state.sessions.set(session.id, session);
  const speed = session.decode.tokens_per_s;
  if (session.phase !== "decode" || speed === null) return;
  const samples = state.samples.get(session.id) ?? [];
  samples.push([session.time - session.created, speed]);
  if (samples.length > SAMPLES) samples.shift();
  state.samples.set(session.id, samples);
}

/** Sessions that the Gateway has forgotten, too. */
function forget() {
  const oldest = now() - (state.hello?.record_ttl_s ?? 3600);
  for (const [id, session] of state.sessions) {
    if (session.ended !== null && session.ended < oldest) {
      state.sessions.delete(id);
      state.samples.delete(id);
    }
  }
}

/** Whether what the Tracker said is old: it does not answer, or we do not hear the Gateway. */
export function isOld() {
  const { tracker } = state.cluster;
  return state.link.state !== "live" || (tracker !== null && tracker.error !== null);
}

/** What our key may do: `generate`, `look`. */
export const may = (scope) => state.hello?.scopes.includes(scope) ?? true;

export const nodeOf = (id) => state.cluster.nodes?.find((node) => node.id === id) ?? null;
