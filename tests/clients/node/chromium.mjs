// A page in Chromium; CALL is the page's URL, with #abort to press its abort button at the first text and
// then ask legato how the task is doing, until it is over.

import { chromium } from "playwright-core";

import { report } from "./report.mjs";

const LIMIT = 20_000; // milliseconds
const FLAGS = [
  "--no-sandbox", // it may run as root
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: FLAGS });

await report(async (url, seen, call) => {
  const target = new URL(call);
  const abort = target.hash === "#abort";
  target.hash = "";
  target.searchParams.set("base", url);
  const page = await browser.newPage();
  page.setDefaultTimeout(LIMIT);
  await page.goto(target.href);
  await page.click("#start");
  if (abort) {
    await page.waitForFunction(() => document.getElementById("text").textContent);
    await page.click("#abort");
  }
  await page.waitForFunction(() => !["idle", "running"].includes(document.getElementById("state").textContent));
  if (abort) {
    const end = Date.now() + LIMIT;
    do seen.told = await page.evaluate("ask()");
    while (seen.told === "running" && Date.now() < end);
  }
  seen.task = await page.textContent("#task");
  seen.text = await page.textContent("#text");
  const state = await page.textContent("#state");
  if (state !== "ended") seen.error = state;
  for (const event of await page.evaluate("events")) {
    const id = event.response?.id ?? event.id;
    if (id?.startsWith("resp_")) seen.ids.push(id);
    if (event.item?.type === "task_continue_request") seen.pauses += 1;
    if (event === "[DONE]") seen.ending = [seen.ending, event].filter(Boolean).join(", ");
    if (event.type === "response.completed") seen.ending = event.type;
  }
  await page.close();
});

await browser.close();
