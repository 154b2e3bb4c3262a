// What the scripts share. Called as: node CLIENT.mjs CALL[,CALL] URL..., one line of JSON for each call of
// each URL. The URLs come in pairs: upstream's, then that of the legato before it.

export const ASKED = {
  model: "sup-demo",
  input: [{ role: "user", content: "Why did tent sales fall?" }],
  databricks_options: { long_task: true },
};

// `read(url, seen, call, direct)` notes what the client shows of the stream behind `url`; what it throws
// counts too.
export async function report(read) {
  const [, , calls, ...urls] = process.argv;
  for (const call of calls.split(",")) {
    for (const [index, url] of urls.entries()) {
      const seen = { text: "", ids: [], pauses: 0, ending: null, error: null };
      try {
        await read(url, seen, call, index % 2 === 0);
      } catch (error) {
        seen.error = named(error);
      }
      console.log(JSON.stringify({ ...seen, ids: [...new Set(seen.ids)] }));
    }
  }
}

// An error as one line; some clients hand out plain objects.
export function named(error) {
  return error instanceof Error ? `${error.name}: ${error.message}` : JSON.stringify(error);
}
