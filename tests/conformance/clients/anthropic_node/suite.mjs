// Anthropic's client for Node.js, with its helpers for streams, tools and structured output.

import assert from "node:assert/strict";
import { test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

const client = (baseURL) => new Anthropic({ apiKey: "none", maxRetries: 0, baseURL });
const shipped = client(process.env.SHIPPED);
const Forecast = z.object({ city: z.enum(["Paris", "Rome"]), days: z.literal([1, 2]) });
const weather = {
  name: "get_weather",
  description: "Returns the weather of a city.",
  input_schema: z.toJSONSchema(Forecast),
};
const runnable = betaZodTool({
  name: "get_weather",
  description: "Returns the weather of a city.",
  inputSchema: Forecast,
  run: ({ city, days }) => `${city} is sunny for ${days} days.`,
});
const demo = {
  model: "draftgate-demo", max_tokens: 16, temperature: 0,
  messages: [{ role: "user", content: "Write a function that adds two numbers." }],
};
const told = {
  model: "scripted", max_tokens: 200,
  messages: [{ role: "user", content: 'Call get_weather {"city": "Rome", "days": 2}' }],
};
const rome = { city: "Rome", days: 2 };
const answer = "The tool says: Rome is sunny for 2 days.";
const textOf = (message) => message.content.find(({ type }) => type === "text").text;

test("models are listed in Anthropic's form, and can be retrieved", async () => {
  const models = [];
  for await (const model of shipped.models.list()) models.push(model);
  assert.deepEqual(models.map(({ id, type }) => [id, type]), [["draftgate-demo", "model"]]);
  assert.ok(models[0].display_name);
  assert.ok(Date.parse(models[0].created_at) > 0);
  assert.deepEqual(await shipped.models.retrieve("draftgate-demo"), models[0]);
  await assert.rejects(shipped.models.retrieve("unknown"), Anthropic.NotFoundError);
});

test("a message has text, usage and the id of the request", async () => {
  const found = await shipped.messages.create(demo);
  assert.ok(textOf(found));
  assert.equal(found.stop_reason, "max_tokens");
  assert.equal(found.usage.output_tokens, 16);
  assert.ok(found._request_id);
});

test("the events of a stream add up to the whole message", async () => {
  const whole = await shipped.messages.create(demo);
  const stream = shipped.messages.stream(demo);
  let text = "";
  stream.on("text", (delta) => (text += delta));
  const final = await stream.finalMessage();
  assert.equal(text, textOf(whole));
  assert.equal(await stream.finalText(), text);
  assert.deepEqual(final.usage.output_tokens, whole.usage.output_tokens);
  assert.equal(final.stop_reason, "max_tokens");
  assert.ok(stream.request_id);
});

test("a client can leave a stream", async () => {
  const stream = await shipped.messages.create({ ...demo, stream: true });
  for await (const event of stream) {
    assert.equal(event.type, "message_start");
    break;
  }
  assert.ok(stream.controller.signal.aborted);
});

test("a parsed message has an object of the schema", async () => {
  const found = await shipped.messages.parse({
    ...demo, max_tokens: 60, output_config: { format: zodOutputFormat(Forecast) },
  });
  Forecast.parse(found.parsed_output);
});

test("a forced call has an input of the schema", async () => {
  const found = await shipped.messages.create({
    ...demo, max_tokens: 60, tools: [weather], tool_choice: { type: "tool", name: "get_weather" },
  });
  Forecast.parse(found.content.find(({ type }) => type === "tool_use").input);
});

for (const node of ["SCRIPTED", "TOOLLESS"]) {
  const scripted = client(process.env[node]);

  test(`${node}: the count of a prompt with tools equals the usage`, async () => {
    const request = { model: told.model, messages: told.messages, tools: [weather] };
    const count = await scripted.messages.countTokens(request);
    const found = await scripted.messages.create({ ...told, ...request });
    assert.equal(count.input_tokens, found.usage.input_tokens);
  });

  test(`${node}: the input of a call grows with the events of a stream`, async () => {
    const stream = scripted.messages.stream({ ...told, tools: [weather] });
    const snapshots = [];
    stream.on("inputJson", (_, snapshot) => snapshots.push(snapshot));
    const final = await stream.finalMessage();
    assert.equal(final.stop_reason, "tool_use");
    assert.ok(snapshots.length > 1);
    const block = final.content.find(({ type }) => type === "tool_use");
    assert.deepEqual(block.input, rome);
    assert.deepEqual(snapshots.at(-1), rome);
  });

  for (const stream of [false, true]) {
    test(`${node}: the tool runner ends with the answer, ${stream ? "streamed" : "whole"}`, async () => {
      const runner = scripted.beta.messages.toolRunner({ ...told, tools: [runnable], stream });
      assert.equal(textOf(await runner.runUntilDone()), answer);
    });
  }
}

test("batches are refused in Anthropic's form", async () => {
  const requests = [{ custom_id: "one", params: demo }];
  await assert.rejects(shipped.messages.batches.create({ requests }), (error) => {
    assert.ok(error instanceof Anthropic.NotFoundError);
    assert.equal(error.error.error.type, "not_found_error");
    return true;
  });
  await assert.rejects(shipped.messages.batches.retrieve("msgbatch_1"), Anthropic.NotFoundError);
});

test("errors have the types of the client and the id of the request", async () => {
  const create = (body) => shipped.messages.create({ ...demo, ...body });
  await assert.rejects(create({ top_p: 2 }), (error) => {
    assert.ok(error instanceof Anthropic.BadRequestError);
    assert.match(error.message, /top_p/);
    assert.equal(error.error.error.type, "invalid_request_error");
    assert.equal(error.requestID, error.error.request_id);
    return true;
  });
  await assert.rejects(create({ model: "unknown" }), Anthropic.NotFoundError);
  await assert.rejects(create({ max_tokens: 10000 }), /8192/);
});
