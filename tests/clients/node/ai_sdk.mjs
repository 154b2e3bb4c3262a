// The Vercel AI SDK; CALL names its provider, `openai` or `databricks`.

import { createOpenAI } from "@ai-sdk/openai";
import { createDatabricksProvider } from "@databricks/ai-sdk-provider";
import { streamText } from "ai";

import { ASKED, named, report } from "./report.mjs";

// Neither provider has an option for a field of one's own in the body. legato needs none: a header asks for
// the long task. Upstream knows no such header, so without legato a custom fetch has to add the field.
const headers = { "Legato-Engage": "force" };

function longTask(url, init) {
  const { databricks_options } = ASKED;
  return fetch(url, { ...init, body: JSON.stringify({ ...JSON.parse(init.body), databricks_options }) });
}

const MODELS = {
  openai: (settings) => createOpenAI({ ...settings, apiKey: "tok-A" }).responses(ASKED.model),
  databricks: ({ headers, ...settings }) =>
    createDatabricksProvider({
      ...settings,
      headers: { ...headers, Authorization: "Bearer tok-A" },
      useRemoteToolCalling: true,
    }).responses(ASKED.model),
};

await report(async (url, seen, call, direct) => {
  const baseURL = `${url}/serving-endpoints`;
  const model = MODELS[call](direct ? { baseURL, fetch: longTask } : { baseURL, headers });
  const tools = { "tool-result": 0, "tool-error": 0 };
  const result = streamText({ model, prompt: ASKED.input[0].content, maxRetries: 0, onError: () => {} });
  for await (const part of result.fullStream) {
    if (part.type in tools) tools[part.type] += 1;
    if (part.type === "text-delta") seen.text += part.text;
    if (part.type === "error") seen.error ??= named(part.error);
    if (part.type === "finish-step" && part.response.id.startsWith("resp_")) seen.ids.push(part.response.id);
    if (part.type === "finish") seen.ending = `finish: ${part.finishReason}`;
  }
  seen.final = await result.text;
  seen.tools = Object.entries(tools)
    .filter(([, count]) => count)
    .map(([name, count]) => `${count} ${name}`)
    .join(", ");
});
