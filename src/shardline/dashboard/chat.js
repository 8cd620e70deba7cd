// The conversation of this tab: what was said, the answer under way, and how it ended. It is kept in sessionStorage, so
// that it survives a reload and nobody else finds it.

import { authorised, cancelSession } from "./live.js";
import { changed, state } from "./store.js";
import { Failure, eventsOf, failureOf } from "./stream.js";

const KEPT = "shardline.chat";
const SETTINGS = { system: "", temperature: "", max_tokens: "" };

/** messages: { role, text, thinking, state: "streaming" | "done" | "length" | "stopped" | "failed", error, session, usage,
 *  model } */
export const chat = { messages: [], model: "", settings: { ...SETTINGS }, draft: "", ...kept() };
let running = null;

function kept() {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
    for (const message of found.messages ?? []) if (message.state === "streaming") message.state = "stopped";
    return { ...found, settings: { ...SETTINGS, ...found.settings } };
  } catch {
    return {};
  }
}

export function keep() {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(chat));
  } catch {
    // a private window without storage, or too long a conversation: it lasts as long as the page
  }
}
addEventListener("pagehide", keep);

export const isRunning = () => running !== null;
export const lastAnswer = () => chat.messages.findLast((message) => message.role === "assistant") ?? null;

/** The model to ask: the chosen one while it is served, else the first that is whole. */
export function model() {
  const served = state.cluster.models ?? [];
  if (served.some((known) => known.model === chat.model)) return chat.model;
  return (served.find((known) => known.ready) ?? served[0])?.model ?? chat.model;
}

/** The body of a request that goes on from the messages before `end`. */
export function bodyOf(messages) {
  const { system, temperature, max_tokens } = chat.settings;
  const said = messages.filter((message) => message.text !== "").map(({ role, text }) => ({ role, content: text }));
  return {
    model: model(),
    messages: system.trim() ? [{ role: "system", content: system }, ...said] : said,
    stream: true,
    stream_options: { include_usage: true },
    ...(temperature !== "" && { temperature: Number(temperature) }),
    ...(max_tokens !== "" && { max_tokens: Number(max_tokens) }),
  };
}

export function ask(text) {
  chat.messages.push({ role: "user", text });
  return answer(chat.messages.slice(), { role: "assistant", text: "", thinking: "" });
}

/** Ask for the last answer once more: a new Route Session from the same messages. */
export function again() {
  chat.messages.splice(chat.messages.lastIndexOf(lastAnswer()));
  return answer(chat.messages.slice(), { role: "assistant", text: "", thinking: "" });
}

/** Go on where the last answer was cut off. */
export function goOn() {
  const cut = lastAnswer();
  chat.messages.splice(chat.messages.lastIndexOf(cut));
  return answer([...chat.messages, cut], { role: "assistant", text: cut.text, thinking: cut.thinking });
}

export function clear() {
  stop();
  chat.messages = [];
  keep();
  changed();
}

/** The answer ends now; the Gateway frees its KV on all Nodes. */
export function stop() {
  if (!running) return;
  const { abort, message } = running;
  message.state = "stopped";
  abort.abort();
  // A proxy in between may keep the connection to the Gateway open: it is told by name, too.
  if (message.session) cancelSession(message.session);
  running = null;
  changed();
}

async function answer(before, message) {
  stop();
  const abort = new AbortController();
  Object.assign(message, { state: "streaming", error: null, session: null, usage: null, model: model() });
  message.others = [...state.sessions.keys()];
  chat.messages.push(message);
  running = { abort, message };
  keep();
  changed();
  try {
    await read(before, message, abort.signal);
  } catch (error) {
    if (message.state === "streaming") fail(message, error);
  } finally {
    if (running?.message === message) running = null;
    delete message.others;
    keep();
    changed();
  }
}

async function read(before, message, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: authorised({ "content-type": "application/json" }),
    body: JSON.stringify(bodyOf(before)),
    signal,
  });
  message.session = response.headers.get("shardline-route-session")?.split(",")[0] ?? null;
  if (!response.ok) throw await failureOf(response);
  let finished = null;
  for await (const { data } of eventsOf(response)) {
    if (data === "[DONE]") {
      message.state = finished === "length" ? "length" : "done";
      return;
    }
    finished = takeChunk(message, JSON.parse(data)) ?? finished;
    changed();
  }
  throw new Failure({
    code: "stream_cut",
    message: "The connection ended in the middle of the answer, without a word of the Gateway.",
    advice: "Look whether the Gateway still runs, then send again.",
  });
}

function takeChunk(message, chunk) {
  if (chunk.error) throw new Failure(chunk.error);
  if (chunk.usage) message.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  message.text += choice?.delta?.content ?? "";
  message.thinking += choice?.delta?.reasoning_content ?? "";
  return choice?.finish_reason ?? null;
}

function fail(message, error) {
  message.state = "failed";
  message.error =
    error instanceof Failure
      ? error.error
      : { code: "unreachable", message: "The Gateway was not reached.", advice: "Look whether it still runs, then send again." };
}

/** The account of an answer's Route Session. Before the Gateway has told its id, the one session that can be it. */
export function sessionOf(message) {
  if (!message) return null;
  if (message.session) return state.sessions.get(message.session) ?? null;
  if (message.state !== "streaming") return null;
  const fresh = [...state.sessions.values()].filter(
    (session) => !message.others.includes(session.id) && session.model === message.model && session.ended === null,
  );
  return fresh.length === 1 ? fresh[0] : null;
}
