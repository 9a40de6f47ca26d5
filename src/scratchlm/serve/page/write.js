// Writing: a text to be continued or a conversation, streamed token by token, with a stop button.
import { announce, at, fail, make, named } from "./dom.js";
import { ask, offline, stream } from "./api.js";
import { SETTINGS, change, idsOf, state } from "./state.js";
import { begin, noteBranchText, readTokens, streamed, times, tokens } from "./tokens.js";

let running = null; // an AbortController
export let model = null;
export const setModel = (found) => { model = found; };

export function requestSettings() {
  const { max_tokens, top_k, ...rest } = state.settings;
  return { ...rest, ...(top_k ? { top_k } : {}) };
}

// The settings as `Sampling` takes them.
export function sampling() {
  const { temperature, top_k, top_p, min_p, typical_p, repetition_penalty, presence_penalty, frequency_penalty } = state.settings;
  const found = { temperature, top_p, min_p, typical: typical_p, repetition_penalty, presence_penalty, frequency_penalty };
  return top_k ? { ...found, top_k } : found;
}

function room(length) {
  return Math.max(1, Math.min(state.settings.max_tokens, model.context - length));
}

export function stop() {
  running?.abort();
}

async function generate(path, body, branch) {
  running?.abort();
  const control = running = new AbortController(), own = state.branches[branch];
  setBusy(true);
  fail(null);
  let text = "", failed = false, last = performance.now();
  try {
    for await (const event of stream(path, { model: model.name, ...requestSettings(), ...body, return_token_ids: true }, control.signal)) {
      if (state.branches[branch] !== own) { // a new conversation, or another address
        control.abort();
        break;
      }
      const choice = event.choices?.[0];
      if (!choice) continue;
      text += choice.text ?? choice.delta?.content ?? "";
      const found = arrived(choice);
      const now = performance.now();
      for (const token of found) {
        times.set(`${branch}.${idsOf(branch).length}`, (now - last) / 1000 / found.length);
        own.ids.push(token.id);
        if (state.branch === branch) streamed(token);
      }
      if (found.length) last = now;
      announce(text.slice(-160));
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      fail(error);
      failed = true;
    }
  }
  if (running === control) running = null;
  return { text, failed, isThere: state.branches[branch] === own };
}

// The tokens of one event, with the log-probabilities that came with them.
function arrived(choice) {
  const ids = choice.token_ids ?? [];
  const chat = choice.logprobs?.content, plain = choice.logprobs;
  return ids.map((id, i) => {
    const text = chat ? chat[i]?.token : plain?.tokens?.[i];
    const logprob = chat ? chat[i]?.logprob : plain?.token_logprobs?.[i];
    return { id, text: named(text ?? ""), ...(typeof logprob === "number" ? { probability: Math.exp(logprob), surprise: -logprob / Math.LN2 } : {}) };
  });
}

async function finish(branch) {
  if (running) return; // a newer request goes on
  try {
    await readTokens();
    if (state.branch === branch && state.branches[branch]) {
      noteBranchText(branch, tokens);
      change({ at: Math.min(Math.max(1, state.branches[branch].given), idsOf(branch).length) });
    }
  } catch (error) {
    fail(error);
  }
  setBusy(false);
}

export async function complete() {
  const prompt = at("prompt").value;
  const asked = await tokenized({ prompt });
  if (!asked) return;
  change({ prompt, branches: [{ parent: -1, at: 0, ids: [...asked.ids], given: asked.ids.length }], branch: 0, at: 0 }, { quiet: true });
  begin(asked.ids.map((id, i) => ({ id, text: asked.texts[i] })));
  await generate("/v1/completions", { prompt: asked.ids, max_tokens: room(asked.ids.length), logprobs: 0, ...stops() }, 0);
  await finish(0);
}

const stops = () => (state.stop ? { stop: [state.stop] } : {});

async function tokenized(body) {
  setBusy(true);
  try {
    fail(null);
    const found = await ask("/tokenize", { ...body, return_token_strs: true });
    const read = found.tokens;
    if (!read.length) throw new Error("The prompt is empty.");
    if (read.length >= model.context) throw new Error(`The prompt must leave room in the context of ${model.context} tokens; it has ${read.length}.`);
    return { ids: read, texts: found.token_strs.map(named) };
  } catch (error) {
    fail(error);
    setBusy(false);
    return null;
  }
}

export async function say() {
  const text = at("message").value.trim();
  if (!text) {
    fail("The message is empty.");
    return;
  }
  const before = state.messages, messages = [...before, { role: "user", content: text }];
  const asked = await tokenized({ messages });
  if (!asked) return;
  at("message").value = "";
  change({ messages, branches: [{ parent: -1, at: 0, ids: [...asked.ids], given: asked.ids.length }], branch: 0, at: 0 }, { quiet: true });
  drawMessages();
  begin(asked.ids.map((id, i) => ({ id, text: asked.texts[i] })));
  const body = { messages, max_completion_tokens: room(asked.ids.length), logprobs: true, ...stops() };
  const { text: answer, failed, isThere } = await generate("/v1/chat/completions", body, 0);
  if (isThere && failed && !answer) {
    change({ messages: before }, { quiet: true });
    at("message").value = text; // to be sent again
  } else if (isThere) {
    change({ messages: [...messages, { role: "assistant", content: answer }] }, { quiet: true });
  }
  drawMessages();
  await finish(0);
}

// Continue from another choice: a branch that begins with what came before it, which is cached.
export async function branchFrom(place, token) {
  const prefix = idsOf().slice(0, place), given = place + 1;
  const parent = ownerOf(place);
  const branches = [...state.branches, { parent, at: place, ids: [token.id], given }];
  const branch = branches.length - 1;
  change({ branches, branch, at: 0 }, { quiet: true });
  begin([...tokens.slice(0, place), { id: token.id, text: token.text, probability: token.probability }]);
  const more = state.mode === "chat" && model.end_ids.length ? { stop_token_ids: model.end_ids } : {};
  if (given < model.context) {
    const body = { prompt: [...prefix, token.id], max_tokens: room(given), logprobs: 0, ...stops(), ...more };
    await generate("/v1/completions", body, branch);
  }
  await finish(branch);
  if (state.branch === branch && state.branches[branch]) change({ at: place, branch });
}

// In a conversation the answer is that of the branch that is shown.
export async function syncAnswer() {
  const root = state.branches[0], last = state.messages.at(-1);
  if (!root || last?.role !== "assistant") return;
  const answered = idsOf().slice(root.given).filter((id) => !model.end_ids.includes(id));
  const content = answered.length ? (await ask("/detokenize", { tokens: answered })).prompt : "";
  change({ messages: [...state.messages.slice(0, -1), { ...last, content }] }, { quiet: true });
  drawMessages();
}

// The branch that a place of the current one belongs to: nothing hangs on what it does not contain.
function ownerOf(place, branch = state.branch) {
  const one = state.branches[branch];
  return one.parent >= 0 && place < one.at ? ownerOf(place, one.parent) : branch;
}

// Drawing

function setBusy(busy) {
  for (const id of ["run", "send"]) at(id).disabled = busy || offline;
  at("stop").disabled = !busy;
  at("tokens").setAttribute("aria-busy", String(busy));
}

export function drawMessages() {
  at("messages").replaceChildren(...state.messages.map(({ role, content }) =>
    make("li", { class: role }, make("strong", {}, role), make("span", {}, content))));
}

export function drawSettings() {
  at("settings").replaceChildren(...SETTINGS.map(([name, label, , low, high, step, what]) => {
    const input = make("input", {
      type: "number", id: "set-" + name, min: String(low), max: String(high), step: String(step), "aria-describedby": "what-" + name,
      onchange: () => {
        const value = Math.min(high, Math.max(low, Number(input.value) || 0));
        input.value = String(value);
        change({ settings: { ...state.settings, [name]: value } });
      },
    });
    input.value = String(state.settings[name]);
    return make("div", { class: "setting" }, make("label", { for: "set-" + name }, label), input, make("p", { id: "what-" + name }, what));
  }), stopSetting());
}

function stopSetting() {
  const input = make("input", { type: "text", id: "set-stop", "aria-describedby": "what-stop", onchange: () => change({ stop: input.value }) });
  input.value = state.stop;
  return make("div", { class: "setting" }, make("label", { for: "set-stop" }, "stop string"), input,
    make("p", { id: "what-stop" }, "Generation ends before this text. Empty: at the end-of-text token or at max tokens."));
}

export function drawMode() {
  const chat = state.mode === "chat";
  for (const id of ["completion", "run"]) at(id).hidden = chat;
  for (const id of ["chat", "send", "new-chat"]) at(id).hidden = !chat;
  for (const [id, on] of [["mode-completion", !chat], ["mode-chat", chat]]) at(id).setAttribute("aria-pressed", String(on));
  if (document.activeElement !== at("prompt")) at("prompt").value = state.prompt;
  at("chat-problem").textContent = model.chat ? "" : model.chat_problem;
  at("chat-problem").hidden = model.chat;
  at("send").disabled = offline || !model.chat;
  at("run").disabled = offline;
  drawMessages();
}
