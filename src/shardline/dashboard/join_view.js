// The view Join: the exact command for the next machine, for the cluster as it is.

import { h } from "./dom.js";
import { expected } from "./expected.js";
import { layers, rate } from "./format.js";
import { copyButton } from "./parts.js";
import { may, state } from "./store.js";
import { lackOf } from "./words.js";

export function joinView() {
  const joining = state.hello?.joining;
  return [h("h1", { key: "title" }, "Join"), h("div", { key: "all", class: "join" }, joining ? [lacks(), outlook(), joining.keys ? withKeys(joining) : withoutKeys(joining)] : h("p", { class: "empty" }, "Asking the Gateway …"))];
}

function lacks() {
  const { models } = state.cluster;
  if (models === null) return h("p", { class: "empty" }, "Asking the Tracker …");
  if (!models.length) return h("p", {}, "No model is served yet.");
  const gaps = models.filter((model) => !model.ready);
  if (!gaps.length) return h("p", {}, "Every model that is served is whole. The Tracker chooses what one more Node takes.");
  return h("p", { class: "notice bad" }, gaps.map((model) => `${lackOf(model)}. `), gaps.some((model) => model.missing.length) && "The Tracker gives them to the next Node that has room. ", gaps.some((model) => model.composite) && "That server wants to be started, or a Node in front of it: shardline node --upstream URL --model NAME.");
}

/** What the next machine would change, for each model and engine class. */
function outlook() {
  const groups = (state.cluster.routes ?? []).flatMap((explained) => explained.groups).filter((group) => group.shards.length && !group.composite);
  if (!may("look") || !groups.length) return null;
  return h(
    "section",
    { class: "panel outlook", key: "outlook", "aria-labelledby": "h-outlook" },
    h("h2", { id: "h-outlook" }, "What it would change"),
    groups.map((group) => outlookOf(group, groups.length > 1)),
    h("p", { class: "dim" }, "Computed, not promised: from the measured step times of the Nodes that are here and the measured round trips, for a machine as fast as they are on average. A dash: nobody has measured it yet."),
  );
}

function outlookOf(group, named) {
  const found = expected(group);
  const figure = (name, value, note) => h("div", { class: "figure" }, h("dt", {}, name), h("dd", {}, value), h("dd", { class: "note" }, note));
  return h(
    "div",
    { class: "why", key: `${group.content_id}|${group.engine_class}` },
    h("h3", { class: "one-line", title: group.model }, group.model),
    named && h("p", { class: "dim" }, h("code", {}, group.engine_class)),
    h("p", {}, outlookWords(found, group)),
    h(
      "dl",
      { class: "figures" },
      found.kind === "gap" && figure("one answer, now", "none", "layers are missing"),
      found.kind === "copy" && figure("one answer, now", rate(found.now), "tokens/s"),
      figure("one answer, with it", rate(found.one), found.kind === "gap" ? "tokens/s, once no layer is missing" : "tokens/s"),
      found.kind === "copy" && figure("all answers together", found.all ? `${rate(found.all[0])} → ${rate(found.all[1])}` : "–", "tokens/s, without what batching adds"),
    ),
  );
}

function outlookWords({ kind, range, now, whole }, group) {
  if (kind === "gap") return `It would get layers ${layers(range)}, as far as its memory reaches. Without them there is no answer at all.`;
  const alone = group.routes.some((route) => route.nodes.length === 1);
  const copy = range ? ` It would get a copy of layers ${layers(range)}, if its memory holds them: another way for further answers, and one that is left when a Node is lost.` : "";
  const shorter = !alone && whole !== null && now !== null && whole > now ? ` With memory for all ${group.n_layers} layers it would be a route by itself, without a hop: one answer at about ${rate(whole)} tokens/s.` : "";
  return [h("strong", {}, "It does not make one answer faster:"), ` each token still passes every layer in order.${copy}${shorter}`];
}

const offered = () => (state.cluster.artifacts ?? []).filter((artifact) => artifact.offered);
/** Which model a Node serves: nothing where it fetches what the cluster lacks, else a file that it has. */
const modelWords = () => (offered().length ? "" : " --model MODEL.gguf");
const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

function aboutTheModel() {
  const names = offered().map((artifact) => artifact.name);
  if (names.length) return h("p", {}, `No file is needed: the Node fetches its layers (${names.join(", ")}), checks every piece and gives it to others.`);
  return h("p", {}, h("code", {}, "MODEL.gguf"), " is the same model file on that machine, in any place; a safetensors folder for the PyTorch engine.");
}

function withKeys({ tracker }) {
  return [
    h("p", {}, "Each machine needs a line of its own. It works once, so this page cannot show one that is still good: a Gateway may not invite. On the machine of the Tracker:"),
    command("shardline invite"),
    h("p", {}, "It prints the command for the next machine. Paste it there, with the model behind it:"),
    command(`shardline node --join '${tracker}/#TOKEN.PIN'${modelWords()}`, "The line that was printed stands for TOKEN.PIN."),
    aboutTheModel(),
    h("p", {}, "Another Gateway, so that clients have a second door:"),
    command("shardline invite --gateway"),
    needs(),
  ];
}

function withoutKeys({ tracker, is_local, flags }) {
  const shardline = ["shardline", ...flags.map(quoted)].join(" ");
  return [
    h("h2", {}, "A Node on this machine"),
    command(`${shardline} node --tracker ${tracker}${modelWords()}`),
    aboutTheModel(),
    is_local && [
      h("h2", {}, "Another machine"),
      h("p", {}, "This cluster listens on this machine only, and has no keys: no other one can join. End it, and start one for several machines; it prints the line for the next one."),
      command("shardline serve --listen 0.0.0.0"),
    ],
    needs(),
  ];
}

const needs = () => h("p", { class: "dim" }, "The machine needs Shardline with an engine of the same class as the Nodes that are there (view Cluster), and must be reached by the Tracker and by the other Nodes.");

function command(text, note) {
  return h("figure", { class: "code" }, h("figcaption", {}, h("span", {}, note ?? "Command"), copyButton(text)), h("pre", { tabindex: "0", "aria-label": "Command" }, h("code", {}, text)));
}
