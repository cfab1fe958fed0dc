// Vercel's AI SDK, with its providers for compatible servers and for OpenAI's Responses API.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  APICallError,
  embedMany,
  generateText,
  Output,
  stepCountIs,
  streamText,
  tool,
} from "ai";
import { z } from "zod";

const { SHIPPED, SCRIPTED, TOOLLESS } = process.env;
const providers = {
  compatible: (model, url) =>
    createOpenAICompatible({
      name: "draftgate", baseURL: `${url}/v1`, includeUsage: true,
      supportsStructuredOutputs: true,
    })(model),
  chat: (model, url) => createOpenAI({ apiKey: "none", baseURL: `${url}/v1` }).chat(model),
  responses: (model, url) =>
    createOpenAI({ apiKey: "none", baseURL: `${url}/v1` }).responses(model),
};
const Forecast = z.strictObject({ city: z.enum(["Paris", "Rome"]), days: z.literal([1, 2]) });
const get_weather = tool({
  description: "Returns the weather of a city.",
  inputSchema: Forecast,
  execute: async ({ city, days }) => `${city} is sunny for ${days} days.`,
});
const prompt = "Write a function that adds two numbers.";
const call = 'Call get_weather {"city": "Rome", "days": 2}';
const limits = { maxRetries: 0, maxOutputTokens: 60, temperature: 0 };
const quiet = { onError: () => {} };

for (const [name, provider] of Object.entries(providers)) {
  const demo = { ...limits, model: provider("draftgate-demo", SHIPPED) };

  test(`${name}: a text has usage and a finish reason`, async () => {
    const found = await generateText({ ...demo, maxOutputTokens: 16, prompt });
    assert.ok(found.text);
    assert.equal(found.finishReason, "length");
    assert.equal(found.usage.outputTokens, 16);
    assert.ok(found.usage.inputTokens > 0);
  });

  test(`${name}: a stream equals the text, with usage`, async () => {
    const whole = await generateText({ ...demo, maxOutputTokens: 16, prompt });
    const stream = streamText({ ...demo, ...quiet, maxOutputTokens: 16, prompt });
    let text = "";
    for await (const delta of stream.textStream) text += delta;
    assert.equal(text, whole.text);
    assert.equal(await stream.finishReason, "length");
    assert.equal((await stream.usage).outputTokens, 16);
  });

  test(`${name}: an object satisfies its schema`, async () => {
    const found = await generateText({
      ...demo, prompt, output: Output.object({ schema: Forecast, name: "forecast" }),
    });
    Forecast.parse(found.output);
  });

  test(`${name}: a streamed object grows and is complete`, async () => {
    const stream = streamText({
      ...demo, ...quiet, prompt, output: Output.object({ schema: Forecast, name: "forecast" }),
    });
    const partial = [];
    for await (const one of stream.partialOutputStream) partial.push(one);
    assert.ok(partial.length > 0);
    Forecast.parse(await stream.output);
  });

  test(`${name}: a forced call has arguments of the schema`, async () => {
    const found = await generateText({
      ...demo, prompt, tools: { get_weather },
      toolChoice: { type: "tool", toolName: "get_weather" },
    });
    Forecast.parse(found.toolCalls[0].input);
    assert.equal(found.toolResults.length, found.toolCalls.length);
  });

  for (const [node, url] of Object.entries({ SCRIPTED, TOOLLESS })) {
    const agent = {
      maxRetries: 0, model: provider("scripted", url), prompt: call, tools: { get_weather },
      stopWhen: stepCountIs(3),
    };

    test(`${name}, ${node}: an agent runs a function and answers`, async () => {
      const found = await generateText(agent);
      assert.equal(found.steps.length, 2);
      assert.match(found.text, /Rome is sunny for 2 days\./);
    });

    test(`${name}, ${node}: a streamed agent runs a function and answers`, async () => {
      const stream = streamText({ ...agent, ...quiet });
      const types = new Set();
      for await (const part of stream.fullStream) types.add(part.type);
      for (const type of ["tool-input-delta", "tool-call", "tool-result", "text-delta"]) {
        assert.ok(types.has(type), type);
      }
      assert.match(await stream.text, /Rome is sunny for 2 days\./);
    });
  }

  test(`${name}: an error has the status and the body of the server`, async () => {
    await assert.rejects(generateText({ ...demo, topP: 2, prompt }), (error) => {
      assert.ok(APICallError.isInstance(error));
      assert.equal(error.statusCode, 400);
      assert.equal(error.isRetryable, false);
      assert.match(error.message, /top_p/);
      return true;
    });
  });

  test(`${name}: an image is refused`, async () => {
    const image = "data:image/png;base64,iVBORw0KGgo=";
    const content = [{ type: "image", image }, { type: "text", text: "What is this?" }];
    const refused = generateText({ ...demo, messages: [{ role: "user", content }] });
    await assert.rejects(refused, { statusCode: 400 });
  });
}

for (const [name, model] of Object.entries({
  compatible: createOpenAICompatible({ name: "draftgate", baseURL: `${SHIPPED}/v1` })
    .textEmbeddingModel("draftgate-demo"),
  chat: createOpenAI({ apiKey: "none", baseURL: `${SHIPPED}/v1` })
    .textEmbeddingModel("draftgate-demo"),
})) {
  test(`${name}: each value has an embedding`, async () => {
    const found = await embedMany({ model, values: ["a", "b"], maxRetries: 0 });
    assert.equal(found.embeddings.length, 2);
    assert.ok(found.usage.tokens > 0);
  });
}
