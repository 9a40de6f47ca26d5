// What is asked of the server: views as JSON, answers as a stream. An exported page asks itself.
export const answers = new Map(); // of views, by what was asked
const kept = new Map(); // their sizes, the oldest first
const MOST = 1 << 26; // characters
export let offline = false;

export function startOffline(held) {
  offline = true;
  for (const [asked, answer] of held) answers.set(asked, answer);
}

async function refusal(response) {
  let said = response.status + " " + response.statusText;
  try { said = (await response.json()).error.message; } catch { /* no JSON: the status says it */ }
  const error = new Error(said);
  error.status = response.status;
  return error;
}

async function post(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  return response;
}

// A view is a pure function of what is asked, so an answer is kept; `fresh` asks again.
export async function ask(path, body = {}, { fresh = false } = {}) {
  const asked = path + " " + JSON.stringify(body);
  if (offline) {
    if (!answers.has(asked)) throw new Error("This file does not hold that view: it was not open when the file was made.");
    return answers.get(asked);
  }
  if (!fresh && answers.has(asked)) return answers.get(asked);
  const text = await (await post(path, body)).text();
  const found = JSON.parse(text);
  answers.delete(asked);
  answers.set(asked, found);
  kept.set(asked, text.length + asked.length);
  let total = 0;
  for (const size of kept.values()) total += size;
  for (const [oldest, size] of kept) {
    if (total < MOST || oldest === asked) break;
    total -= size;
    kept.delete(oldest);
    answers.delete(oldest);
  }
  return found;
}

export const look = (name, body, options) => ask("/look/" + name, body, options);

// Server-sent events of a completion, one object at a time.
export async function* stream(path, body, signal) {
  const response = await post(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const found = JSON.parse(data);
      if (found.error) throw new Error(found.error.message);
      yield found;
    }
  }
}

export async function template() {
  const response = await fetch("/page/offline.html");
  if (!response.ok) throw await refusal(response);
  return response.text();
}
