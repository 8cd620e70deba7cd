// Server-sent events over fetch: EventSource cannot send a key, and cannot post.

export class Failure extends Error {
  /** @param error an error object of the API: code, message, advice … */
  constructor(error) {
    super(error.message ?? "failed");
    this.error = error;
  }
}

/** What went wrong, of an answer that is no stream. */
export async function failureOf(response) {
  try {
    const body = await response.json();
    if (body?.error?.message) return new Failure(body.error);
  } catch {
    // no JSON: a proxy in between has answered
  }
  return new Failure({
    code: `status_${response.status}`,
    message: `The Gateway, or what is in front of it, answered with status ${response.status}.`,
    advice: "Look whether the Gateway still runs.",
  });
}

/** The events of a response, as { event, data }. `heard` is called with every piece that arrives, comments too. */
export async function* eventsOf(response, heard = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      text += value;
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const found = event(text.slice(0, end));
        text = text.slice(end + 2);
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function event(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    else if (line.startsWith("event:")) name = line.slice(6).trim();
  }
  return data.length ? { event: name, data: data.join("\n") } : null;
}
