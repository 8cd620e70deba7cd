// The view Chat: the route above, the conversation below, the field to write in at the bottom.

import { answerBlocks } from "./answer.js";
import { speedChart } from "./chart.js";
import { again, ask, bodyOf, chat, clear, goOn, isRunning, keep, lastAnswer, model, sessionOf, stop } from "./chat.js";
import { h } from "./dom.js";
import { count, counted, ms, percent, rate, share } from "./format.js";
import { announce, copyButton, legend } from "./parts.js";
import { routeView, shownRoute } from "./route.js";
import { changed, may, state } from "./store.js";
import { PHASES, circumstances, lackOf, sentence, titleOf } from "./words.js";

let told = "";

export function chatView() {
  const answer = lastAnswer();
  const session = sessionOf(answer);
  tell(answer, session);
  return [
    h("h1", { class: "unseen", key: "title" }, "Chat"),
    routePanel(session),
    h("section", { class: "conversation", key: "talk", id: "talk", tabindex: "0", "aria-label": "Conversation" }, chat.messages.length ? chat.messages.map(messageView) : [welcome()]),
    composer(answer, session),
  ];
}

/** What has changed, for whoever listens: phases, and the whole answer at its end. */
function tell(answer, session) {
  const phase = answer?.state === "streaming" ? (session?.phase ?? "sent") : answer?.state;
  const news = `${chat.messages.length} ${phase}`;
  if (!answer || news === told) return;
  const first = told === "";
  told = news;
  if (first) return; // a page that was loaded anew has no news
  if (answer.state === "streaming") announce(session ? `${PHASES[session.phase]}.` : "Sent.");
  else if (answer.state === "failed") announce(`${titleOf(answer.error)}. ${answer.error.message}`);
  else announce(`${answer.state === "stopped" ? "Stopped. " : "The answer: "}${answer.text.trim()}`);
}

function routePanel(session) {
  const shown = shownRoute(session, model());
  return h(
    "section",
    { class: "panel route-panel", key: "route-panel", "aria-label": "Route" },
    h("div", { class: "panel-head" }, h("h2", {}, shown?.planned ? "Next route" : "Route"), modelChoice(), session && legend("compute", "wire", "queue")),
    routeView(shown, model()),
    session && figures(session),
  );
}

function modelChoice() {
  const served = state.cluster.models ?? [];
  const names = [...new Set(served.map((known) => known.model))];
  if (!names.length) return h("span", { class: "dim" }, state.cluster.models ? "no model is served yet" : "");
  const whole = (name) => served.some((known) => known.model === name && known.ready);
  return h(
    "label",
    { class: "model" },
    h("span", { class: "unseen" }, "Model"),
    h(
      "select",
      { value: model(), onchange: (event) => ((chat.model = event.target.value), keep(), changed()) },
      names.map((name) => h("option", { value: name }, whole(name) ? name : `${name} (not whole)`)),
    ),
  );
}

function figures(session) {
  const { decode, prefill } = session;
  const samples = state.samples.get(session.id) ?? [];
  const known = state.cluster.models?.find((one) => one.model === session.model);
  const used = prefill.total === null || decode.tokens === null ? null : prefill.total + decode.tokens;
  const speed = `${rate(decode.tokens_per_s)} tokens/s`;
  return h(
    "dl",
    { class: "figures" },
    h("div", { class: "figure wide" }, h("dt", {}, "tokens/s"), h("dd", {}, rate(decode.tokens_per_s)), h("dd", { class: "beside" }, speedChart(samples, { label: `Speed: ${speed}` }))),
    h("div", { class: "figure" }, h("dt", {}, "first token"), h("dd", {}, decode.ttft_ms === null ? "–" : ms(decode.ttft_ms))),
    h("div", { class: "figure" }, h("dt", {}, "prompt"), h("dd", {}, count(prefill.total)), h("dd", { class: "note" }, prefill.cached ? `${count(prefill.cached)} kept from before` : (prefill.reuse ?? "tokens"))),
    h("div", { class: "figure" }, h("dt", {}, "written"), h("dd", {}, count(decode.tokens)), h("dd", { class: "note" }, "tokens")),
    known?.context_length > 0 &&
      used !== null &&
      h(
        "div",
        { class: "figure" },
        h("dt", {}, "context"),
        h("dd", {}, percent(used, known.context_length)),
        h("dd", { class: "note track", role: "img", "aria-label": `${counted(used, "token")} of ${count(known.context_length)}`, title: `${count(used)} of ${count(known.context_length)} tokens` }, h("i", { class: "fill", style: { width: `${100 * share(used, known.context_length)}%` } })),
      ),
  );
}

function welcome() {
  const served = (state.cluster.models ?? []).filter((known) => known.model === model());
  const text = served.length && !served.some((known) => known.ready)
    ? `It cannot answer now: ${lackOf(served[0])}.`
    : "Ask something. Above you see the way that it takes through the Nodes, while it takes it.";
  return h("p", { class: "welcome", key: "welcome" }, text);
}

function messageView(message, i) {
  const isAnswer = message.role === "assistant";
  const streaming = message.state === "streaming";
  return h(
    "article",
    { class: `message ${message.role}${streaming ? " streaming" : ""}`, key: `m${i}`, "aria-label": isAnswer ? "Answer" : "You", "aria-busy": streaming ? "true" : null },
    isAnswer && message.thinking && h("details", { class: "thinking", open: streaming && !message.text }, h("summary", {}, "Thinking"), h("div", { class: "prose" }, message.thinking)),
    isAnswer ? answerBlocks(message.text) : h("div", { class: "prose" }, message.text),
    streaming && !message.text && h("div", { class: "waits", "aria-hidden": "true" }, h("i", {}), h("i", {}), h("i", {})),
    message.state === "failed" && failure(message.error),
    message.state === "stopped" && h("p", { class: "ended" }, "Stopped."),
    message.state === "length" && h("p", { class: "ended" }, "Ended by the limit of tokens."),
    isAnswer && !streaming && message === chat.messages.at(-1) && actions(message),
  );
}

function failure(error) {
  const where = circumstances(error);
  return h(
    "div",
    { class: "failure", role: "alert" },
    h("h3", {}, titleOf(error)),
    h("p", {}, `${error.message}${/[.!?]$/.test(error.message) ? "" : "."}`),
    where && h("p", { class: "where" }, where),
    error.advice && h("p", {}, h("strong", {}, "What to do: "), error.advice),
    h("p", { class: "dim" }, h("code", {}, error.code)),
  );
}

function actions(message) {
  const cut = ["failed", "stopped", "length"].includes(message.state) && message.text;
  const { usage } = message;
  const kept = usage?.prompt_tokens_details?.cached_tokens;
  return h(
    "div",
    { class: "actions" },
    h("button", { type: "button", class: "small", onclick: () => again() }, message.state === "done" ? "Ask again" : "Send again"),
    cut && h("button", { type: "button", class: "small", onclick: () => goOn() }, "Go on from here"),
    message.text && copyButton(message.text),
    copyButton(curl(), "Copy as curl"),
    usage && h("span", { class: "dim" }, `${counted(usage.prompt_tokens, "token")} in${kept ? `, ${count(kept)} kept` : ""}, ${count(usage.completion_tokens)} out`),
  );
}

/** The last request as a command. The key stays out of it. */
function curl() {
  const body = JSON.stringify(bodyOf(chat.messages.slice(0, -1))).replaceAll("'", "'\\''");
  const url = new URL("v1/chat/completions", document.baseURI);
  return `curl -N ${url} -H 'Content-Type: application/json' -H "Authorization: Bearer $SHARDLINE_API_KEY" -d '${body}'`;
}

const canAsk = () => Boolean(model()) && may("generate");

function composer(answer, session) {
  const running = isRunning();
  return h(
    "form",
    { class: "composer", key: "composer", onsubmit: submit },
    h("div", { class: "status-line", id: "phase" }, statusLine(answer, session)),
    h(
      "div",
      { class: "field" },
      h("label", { class: "unseen", for: "prompt" }, "Message"),
      h("textarea", { id: "prompt", rows: "1", placeholder: "Message", autocomplete: "off", value: chat.draft, oninput: typed, onkeydown: keys, ref: grow }),
      running
        ? h("button", { type: "button", class: "stop", key: "stop", id: "stop", onclick: () => stopNow() }, "Stop")
        : h("button", { type: "submit", class: "send", key: "send", id: "send", disabled: !chat.draft.trim() || !canAsk() }, "Send"),
    ),
    settingsView(),
  );
}

function statusLine(answer, session) {
  if (session) return [h("strong", { class: `phase phase-${session.phase}` }, PHASES[session.phase]), h("span", {}, sentence(session))];
  if (answer?.state === "streaming") return [h("strong", { class: "phase" }, "Sent"), h("span", {}, "waits for the Gateway")];
  if (!may("generate")) return [h("span", {}, `The key ${state.hello.key} does not have the scope "generate": it may look, not ask.`)];
  return [h("span", { class: "dim" }, "Enter sends, Shift+Enter is a new line, Escape stops.")];
}

function settingsView() {
  const field = (name, label, props) =>
    h("label", {}, h("span", {}, label), h("input", { value: chat.settings[name], oninput: (event) => ((chat.settings[name] = event.target.value), keep()), ...props }));
  return h(
    "details",
    { class: "settings" },
    h("summary", {}, "Settings"),
    h(
      "div",
      { class: "settings-fields" },
      h("label", { class: "long" }, h("span", {}, "System message"), h("textarea", { rows: "2", value: chat.settings.system, oninput: (event) => ((chat.settings.system = event.target.value), keep()) })),
      field("temperature", "Temperature", { type: "number", min: "0", max: "2", step: "0.1", placeholder: "1" }),
      field("max_tokens", "Most tokens", { type: "number", min: "1", step: "1", placeholder: String(state.hello?.default_max_tokens ?? "") }),
      h("button", { type: "button", class: "small", disabled: !chat.messages.length, onclick: () => clear() }, "New conversation"),
    ),
  );
}

function submit(event) {
  event.preventDefault();
  const text = chat.draft.trim();
  if (!text || isRunning() || !canAsk()) return;
  chat.draft = "";
  follows = true;
  ask(text);
  requestAnimationFrame(() => grow(document.getElementById("prompt")));
}

function stopNow() {
  stop();
  document.getElementById("prompt")?.focus();
}

function typed(event) {
  const could = Boolean(chat.draft.trim());
  chat.draft = event.target.value;
  grow(event.target);
  if (could !== Boolean(chat.draft.trim())) changed();
}

function keys(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    event.target.form.requestSubmit();
  }
}

function grow(area) {
  if (!area) return;
  area.style.setProperty("height", "auto");
  area.style.setProperty("height", `${Math.min(area.scrollHeight + 2, 180)}px`);
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && isRunning()) stopNow();
});

/** Keep the end of the answer in view, unless the reader has gone up to read. */
let follows = true;
let seen = "";
export function followAnswer() {
  const last = chat.messages.at(-1);
  const now = `${chat.messages.length} ${last?.state} ${last?.text.length} ${last?.thinking?.length}`;
  if (now === seen) return;
  seen = now;
  // Which of them scrolls is a matter of the width of the window.
  if (follows) for (const id of ["talk", "main"]) document.getElementById(id)?.scrollTo({ top: 1e9 });
}
export function watchScroll(main) {
  let top = 0;
  const look = ({ target }) => {
    if (target !== main && target.id !== "talk") return;
    // Text may have come since it was scrolled: not being at the end does not mean that the reader left it.
    const wentUp = target.scrollTop < top;
    top = target.scrollTop;
    follows = target.scrollHeight - target.scrollTop - target.clientHeight < 32 || (follows && !wentUp);
  };
  main.addEventListener("scroll", look, { capture: true, passive: true });
}
