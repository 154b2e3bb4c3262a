// The official SDK: `responses.create` with `stream: true`, and the helper `responses.stream`.

import OpenAI from "openai";

import { ASKED, report } from "./report.mjs";

const ENDINGS = ["response.completed", "response.failed", "response.incomplete"];

function note(event, seen) {
  if (event.type === "response.output_text.delta") seen.text += event.delta;
  if (event.type === "response.output_item.done" && event.item.type === "task_continue_request") seen.pauses += 1;
  if (ENDINGS.includes(event.type)) seen.ending = event.type;
  const id = event.response?.id ?? event.id;
  if (id?.startsWith("resp_")) seen.ids.push(id);
}

await report(async (url, seen, call) => {
  const client = new OpenAI({ baseURL: `${url}/serving-endpoints`, apiKey: "tok-A", maxRetries: 0 });
  if (call === "create") {
    for await (const event of await client.responses.create({ ...ASKED, stream: true })) note(event, seen);
    return;
  }
  const stream = client.responses.stream(ASKED);
  for await (const event of stream) note(event, seen);
  // The iteration may end without the error; the final response has it.
  const { output } = await stream.finalResponse();
  const parts = output.filter((item) => item.type === "message").flatMap((item) => item.content);
  seen.final = parts.map((part) => part.text).join("");
});
