// What an application with the Vercel AI SDK does: `node vercel_client.mjs URL MODEL`, results as JSON. Packages are
// found from the folder it runs in.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const find = createRequire(process.cwd() + "/");
const load = async (name) => import(pathToFileURL(find.resolve(name)).href);
const { generateText, streamText, Output, tool, isStepCount, stepCountIs } = await load("ai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const [url, name] = process.argv.slice(2);
const models = {
  anthropic: createAnthropic({ baseURL: url, apiKey: "none" })(name),
  openai: createOpenAICompatible({ name: "cumulo", baseURL: url, supportsStructuredOutputs: true, includeUsage: true })(name),
};
const prompt = "What is the capital of France?";
const options = { temperature: 0, maxOutputTokens: 64, maxRetries: 0 };
const person = z.object({ name: z.enum(["Ann", "Bob"]), age: z.number().int().min(0).max(99) });

async function toolLoop(model) {
  const calls = [];
  const temperature = tool({
    description: "The temperature in a city.",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
    execute: async ({ city }) => (calls.push({ args: { city } }), "21 degrees"),
  });
  const question = "How warm is it in Paris?";
  const stopWhen = (isStepCount ?? stepCountIs)(2);
  const forced = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : { type: "tool", toolName: "temperature" } });
  const done = await generateText({
    ...options, model, prompt: question, tools: { temperature }, stopWhen, prepareStep: forced,
  });
  return { calls, answer: done.text };
}

async function streaming(model) {
  const stream = streamText({ ...options, model, prompt });
  let pieces = 0;
  let joined = "";
  for await (const piece of stream.textStream) {
    pieces += 1;
    joined += piece;
  }
  const whole = await generateText({ ...options, model, prompt });
  const used = [(await stream.usage).outputTokens, whole.usage.outputTokens];
  return { pieces, joined, whole: whole.text, output_tokens: used };
}

async function structured(model) {
  const done = await generateText({
    ...options, model, prompt: "Ann is 42 years old.", output: Output.object({ schema: person }),
  });
  return done.output;
}

const told = {};
for (const [api, model] of Object.entries(models)) {
  told[api] = {
    tool_loop: await toolLoop(model), streaming: await streaming(model), structured: await structured(model),
  };
}
console.log(JSON.stringify(told));
