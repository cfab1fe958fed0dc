// OpenAI's client for Node.js, with its helpers for streams, functions and structured output.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const options = { apiKey: "none", maxRetries: 0 };
const shipped = new OpenAI({ ...options, baseURL: `${process.env.SHIPPED}/v1` });
const scripted = new OpenAI({ ...options, baseURL: `${process.env.SCRIPTED}/v1` });
const demo = { model: "draftgate-demo", max_tokens: 60, temperature: 0 };
const messages = [{ role: "user", content: "Write a function that adds two numbers." }];
const call = [{ role: "user", content: 'Call get_weather {"city": "Rome", "days": 2}' }];
const Forecast = z.object({ city: z.enum(["Paris", "Rome"]), days: z.literal([1, 2]) });
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Returns the weather of a city.",
    parameters: z.toJSONSchema(Forecast),
    parse: JSON.parse,
    function: ({ city, days }) => `${city} is sunny for ${days} days.`,
  },
};

test("models are listed and can be retrieved", async () => {
  const names = [];
  for await (const model of shipped.models.list()) names.push(model.id);
  assert.deepEqual(names, ["draftgate-demo"]);
  assert.equal((await shipped.models.retrieve("draftgate-demo")).object, "model");
});

test("a chat has choices, log probabilities and usage", async () => {
  const found = await shipped.chat.completions.create({
    ...demo, messages, n: 2, max_tokens: 8, logprobs: true, top_logprobs: 2,
  });
  assert.equal(found.choices.length, 2);
  assert.equal(found.choices[1].logprobs.content.length, 8);
  assert.equal(found.usage.completion_tokens, 16);
});

test("the events of a stream add up to the whole chat", async () => {
  const whole = await shipped.chat.completions.create({ ...demo, messages });
  const stream = shipped.chat.completions.stream({
    ...demo, messages, stream_options: { include_usage: true },
  });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(final.choices[0].message.content, text);
  assert.deepEqual((await stream.totalUsage()).total_tokens, whole.usage.total_tokens);
});

test("a client can leave a stream", async () => {
  const stream = await shipped.chat.completions.create({ ...demo, messages, stream: true });
  for await (const chunk of stream) {
    assert.equal(chunk.object, "chat.completion.chunk");
    break;
  }
  assert.ok(stream.controller.signal.aborted);
});

test("a parsed chat has an object of the schema", async () => {
  const found = await shipped.chat.completions.parse({
    ...demo, messages, response_format: zodResponseFormat(Forecast, "forecast"),
  });
  Forecast.parse(found.choices[0].message.parsed);
});

test("a forced call has arguments of the schema", async () => {
  const found = await shipped.chat.completions.create({
    ...demo, messages, tools: [weather],
    tool_choice: { type: "function", function: { name: "get_weather" } },
  });
  Forecast.parse(JSON.parse(found.choices[0].message.tool_calls[0].function.arguments));
});

for (const node of ["SCRIPTED", "TOOLLESS"]) {
  for (const stream of [false, true]) {
    test(`${node}: runTools runs a function, ${stream ? "streamed" : "whole"}`, async () => {
      const told = new OpenAI({ ...options, baseURL: `${process.env[node]}/v1` });
      const runner = told.chat.completions.runTools({
        model: "scripted", messages: call, tools: [weather], stream,
      });
      assert.equal(await runner.finalContent(), "The tool says: Rome is sunny for 2 days.");
      const { name, arguments: given } = await runner.finalFunctionToolCall();
      assert.equal(name, "get_weather");
      assert.deepEqual(JSON.parse(given), { city: "Rome", days: 2 });
    });
  }
}

test("completions continue a text, streamed and with echo", async () => {
  const body = { ...demo, prompt: "def add(a, b):", max_tokens: 8 };
  const whole = await shipped.completions.create({ ...body, echo: true, logprobs: 1 });
  assert.ok(whole.choices[0].text.startsWith(body.prompt));
  let text = body.prompt;
  for await (const chunk of await shipped.completions.create({ ...body, stream: true })) {
    text += chunk.choices[0]?.text ?? "";
  }
  assert.equal(text, whole.choices[0].text);
});

test("embeddings have the same values in both encodings", async () => {
  const body = { model: "draftgate-demo", input: ["a", "b"] };
  const encoded = await shipped.embeddings.create(body); // the client asks for base64
  const plain = await shipped.embeddings.create({ ...body, encoding_format: "float" });
  assert.equal(encoded.data.length, 2);
  encoded.data[0].embedding.forEach((value, i) => {
    assert.ok(Math.abs(value - plain.data[0].embedding[i]) < 1e-6);
  });
});

test("a response is parsed", async () => {
  const found = await shipped.responses.parse({
    model: "draftgate-demo", input: "Forecast?", max_output_tokens: 60,
    text: { format: zodTextFormat(Forecast, "forecast") },
  });
  assert.equal(found.status, "completed");
  Forecast.parse(found.output_parsed);
});

test("the events of a response end with the whole response", async () => {
  const stream = shipped.responses.stream({
    model: "draftgate-demo", input: "Hello", max_output_tokens: 16, temperature: 0,
  });
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  const final = await stream.finalResponse();
  assert.equal(final.output_text, text);
  assert.equal(final.status, "incomplete");
});

test("a response calls a function, and its output continues the response", async () => {
  const tools = [zodResponsesFunction({ name: "get_weather", parameters: Forecast })];
  const model = "scripted";
  const first = await scripted.responses.parse({ model, input: call[0].content, tools });
  const [item] = first.output.filter(({ type }) => type === "function_call");
  assert.deepEqual(item.parsed_arguments, { city: "Rome", days: 2 });
  const output = { type: "function_call_output", call_id: item.call_id, output: "Sunny." };
  const second = await scripted.responses.create({
    model, input: [output], tools, previous_response_id: first.id,
  });
  assert.equal(second.output_text, "The tool says: Sunny.");
});

test("stored responses are retrieved, listed and deleted", async () => {
  const created = await scripted.responses.create({ model: "scripted", input: "Answer yes" });
  assert.equal((await scripted.responses.retrieve(created.id)).output_text, "yes");
  const items = [];
  for await (const item of scripted.responses.inputItems.list(created.id)) items.push(item.type);
  assert.deepEqual(items, ["message"]);
  await scripted.responses.delete(created.id);
  await assert.rejects(scripted.responses.retrieve(created.id), OpenAI.NotFoundError);
});

test("errors have the types, codes and parameters of the client", async () => {
  const create = (body) => shipped.chat.completions.create({ ...demo, messages, ...body });
  await assert.rejects(create({ top_p: 2 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "top_p");
    return true;
  });
  await assert.rejects(create({ model: "unknown" }), OpenAI.NotFoundError);
  await assert.rejects(create({ max_tokens: 100000 }), { code: "context_length_exceeded" });
});
