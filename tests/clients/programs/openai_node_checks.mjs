// `openai` for Node: each exported check runs once and is reported as a JSON line, like those of reporting.py.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

// From the environment's folder, not from where this file lies.
const OpenAI = createRequire(process.env.NODE_PATH + "/")("openai").default;
const [URL, MODEL, GREETING, RESULT] = process.argv.slice(2);
const HI = [{ role: "user", content: "Hi" }];
const ASKED = [{ role: "user", content: "How is the weather in Oslo?" }];
const SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, degrees: { type: "integer" } },
  required: ["city", "degrees"],
  additionalProperties: false,
};
const PARAMETERS = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const TOOL = { type: "function", function: { name: "get_weather", parameters: PARAMETERS } };
const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0, timeout: 20_000 });
const asked = { model: MODEL, temperature: 0 };

const checks = {
  async models() {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    assert.deepEqual(ids, [MODEL]);
  },
  async chat() {
    const answer = await client.chat.completions.create({ ...asked, messages: HI });
    assert.equal(answer.choices[0].message.content, GREETING);
    assert.ok(answer.usage.completion_tokens > 0);
  },
  async stream() {
    const options = { include_usage: true };
    const chunks = await client.chat.completions.create({ ...asked, messages: HI, stream: true, stream_options: options });
    let text = "";
    let usage = null;
    for await (const chunk of chunks) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, GREETING);
    assert.ok(usage.completion_tokens > 0);
  },
  async stream_runner() {
    const runner = client.chat.completions.stream({ ...asked, messages: HI });
    let text = "";
    runner.on("content", (delta) => (text += delta));
    assert.equal(await runner.finalContent(), GREETING);
    assert.equal(text, GREETING);
  },
  async abort() {
    const chunks = await client.chat.completions.create({ ...asked, messages: HI, stream: true });
    for await (const chunk of chunks) {
      assert.ok(chunk.id);
      chunks.controller.abort();
    }
  },
  async completions() {
    const answer = await client.completions.create({ ...asked, prompt: "Hi" });
    assert.equal(answer.choices[0].text, GREETING);
  },
  async responses() {
    const answer = await client.responses.create({ ...asked, input: "Hi" });
    assert.equal(answer.output_text, GREETING);
    let text = "";
    for await (const event of await client.responses.create({ ...asked, input: "Hi", stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, GREETING);
  },
  async tools_loop() {
    const messages = [...ASKED];
    const answer = await client.chat.completions.create({ ...asked, messages, tools: [TOOL] });
    const { message } = answer.choices[0];
    assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: "Oslo" });
    messages.push(message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: "21" });
    const again = await client.chat.completions.create({ ...asked, messages, tools: [TOOL] });
    assert.equal(again.choices[0].message.content, RESULT);
  },
  async run_tools() {
    let city = "";
    const tool = { ...TOOL, function: { ...TOOL.function, parse: JSON.parse, function: (given) => ((city = given.city), "21") } };
    for (const stream of [false, true]) {
      const runner = client.chat.completions.runTools({ ...asked, messages: ASKED, tools: [tool], stream });
      assert.equal(await runner.finalContent(), RESULT);
      assert.equal(city, "Oslo");
    }
  },
  async structured_output() {
    const response_format = { type: "json_schema", json_schema: { name: "city", schema: SCHEMA, strict: true } };
    const messages = [{ role: "user", content: "Oslo as JSON" }];
    const answer = await client.chat.completions.parse({ ...asked, messages, response_format });
    const { message } = answer.choices[0];
    assert.deepEqual(message.parsed ?? JSON.parse(message.content), { city: "Oslo", degrees: 21 });
    messages.push(message, { role: "user", content: "Again" });
    const again = await client.chat.completions.parse({ ...asked, messages, response_format });
    assert.equal(again.choices[0].message.content, message.content);
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model: MODEL, input: ["one", "two"] });
    assert.deepEqual(answer.data.map((item) => item.index), [0, 1]);
    assert.ok(answer.data[0].embedding.length > 0);
  },
  async errors() {
    const refused = client.chat.completions.create({ ...asked, model: "nobody", messages: HI });
    await assert.rejects(refused, (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
  },
};

for (const [check, body] of Object.entries(checks)) {
  let error = null;
  try {
    await body();
  } catch (caught) {
    error = String(caught.stack ?? caught).slice(-3000);
  }
  console.log(JSON.stringify({ check, error }));
}
