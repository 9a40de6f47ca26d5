// Everything the page shows is a function of this state, and the state lies in the address.
import { at } from "./dom.js";

export const SETTINGS = [
  // name, label, default, min, max, step, what it does
  ["max_tokens", "max tokens", 24, 1, 100000, 1, "The most tokens to generate."],
  ["temperature", "temperature", 0.8, 0, 2, 0.05, "Divides the logits: below 1 sharpens the distribution, above 1 flattens it. 0 is greedy decoding."],
  ["top_k", "top-k", 0, 0, 100000, 1, "Keeps the k likeliest tokens. 0 keeps all."],
  ["top_p", "top-p", 1, 0.01, 1, 0.01, "Keeps the smallest set of likeliest tokens whose probabilities reach p. 1 keeps all."],
  ["min_p", "min-p", 0, 0, 1, 0.01, "Keeps tokens at least p times as likely as the likeliest. 0 keeps all."],
  ["typical_p", "typical-p", 1, 0.01, 1, 0.01, "Keeps the tokens whose surprise is nearest the entropy, up to probability mass p. 1 keeps all."],
  ["repetition_penalty", "repetition penalty", 1, 0.05, 10, 0.05, "Divides positive logits of tokens that occur in the prompt or the output, and multiplies negative ones. 1 is off."],
  ["presence_penalty", "presence penalty", 0, -2, 2, 0.1, "Subtracted from the logit of every token that occurs in the output."],
  ["frequency_penalty", "frequency penalty", 0, -2, 2, 0.1, "Subtracted from a token's logit once for each time it occurs in the output."],
  ["seed", "seed", 1, 0, 9007199254740991, 1, "Random draws depend on seed and step only: the same seed generates the same text."],
];

const first = () => ({
  mode: "completion",
  prompt: "",
  messages: [],
  settings: Object.fromEntries(SETTINGS.map(([name, , value]) => [name, value])),
  stop: "",
  branches: [], // {parent, at, ids, given}: `at` tokens of the parent, then `ids`; `given` were its prompt
  branch: 0,
  at: 0, // the token in question: tokens before it are its context
  view: "choices",
  colour: "probability",
  numbers: false,
  layer: 0,
  head: 0,
  sort: "layer",
  against: null, // in attribution
  edits: [], // {kind, layer, index, factor, on}
  other: "",
  what: "stream",
  machine: "h200",
});

export const state = first();
const listeners = [];
export const onChange = (listener) => listeners.push(listener);

export function change(changes, { quiet = false } = {}) {
  Object.assign(state, changes);
  keepInAddress();
  if (!quiet) for (const listener of listeners) listener(changes);
}

export const forget = () => Object.assign(state, first());

// Branches

export function idsOf(branch = state.branch) {
  const one = state.branches[branch];
  if (!one) return [];
  return one.parent < 0 ? one.ids : [...idsOf(one.parent).slice(0, one.at), ...one.ids];
}

// How many tokens were given to the request that wrote the token at a place.
export function givenAt(place, branch = state.branch) {
  const one = state.branches[branch];
  if (!one) return 0;
  return one.parent >= 0 && place < one.at ? givenAt(place, one.parent) : one.given;
}

// The address

const NAMES = { branch: "b", at: "at", view: "v", colour: "c", layer: "l", head: "h", sort: "s", other: "o", what: "w", machine: "m", prompt: "p", stop: "stop" };
const NUMBERS_IN_STATE = ["branch", "at", "layer", "head"];

export function address() {
  const words = new URLSearchParams(), plain = first();
  if (state.mode !== plain.mode) words.set("mode", state.mode);
  for (const [name, short] of Object.entries(NAMES)) {
    if (state[name] !== plain[name]) words.set(short, state[name]);
  }
  for (const [name] of SETTINGS) {
    if (state.settings[name] !== plain.settings[name]) words.set(name, state.settings[name]);
  }
  if (state.numbers) words.set("n", "1");
  if (state.against !== null) words.set("a", state.against);
  if (state.messages.length) words.set("messages", JSON.stringify(state.messages));
  if (state.edits.length) {
    words.set("e", state.edits.map((e) => [e.kind, e.layer, e.index, e.factor, e.on ? 1 : 0].join(":")).join("_"));
  }
  for (const one of state.branches) words.append("t", [one.parent, one.at, one.given, one.ids.join(".")].join("_"));
  return words.toString();
}

let due = null;
function keepInAddress() {
  clearTimeout(due);
  due = setTimeout(() => {
    const words = address();
    if (words !== location.hash.slice(1)) history.replaceState(null, "", "#" + words);
  }, 150);
}

export function readAddress(text) {
  forget();
  const words = new URLSearchParams(text);
  state.mode = words.get("mode") === "chat" ? "chat" : "completion";
  for (const [name, short] of Object.entries(NAMES)) {
    if (words.has(short)) state[name] = NUMBERS_IN_STATE.includes(name) ? whole(words.get(short)) : words.get(short);
  }
  for (const [name] of SETTINGS) {
    const value = Number(words.get(name));
    if (words.has(name) && Number.isFinite(value)) state.settings[name] = value;
  }
  state.numbers = words.get("n") === "1";
  state.against = words.has("a") ? whole(words.get("a")) : null;
  try { state.messages = readMessages(JSON.parse(words.get("messages") || "[]")); } catch { state.messages = []; }
  state.edits = (words.get("e") || "").split("_").filter(Boolean).map((text) => {
    const [kind, layer, index, factor, on] = text.split(":");
    return { kind, layer: whole(layer), index: whole(index), factor: Number(factor) || 0, on: on === "1" };
  });
  for (const text of words.getAll("t")) {
    const [parent, from, given, ids] = text.split("_");
    const one = { parent: Number(parent), at: whole(from), given: whole(given), ids: (ids || "").split(".").filter(Boolean).map(whole) };
    if (one.parent < state.branches.length && one.ids.length) state.branches.push(one);
  }
  state.branch = Math.min(state.branch, Math.max(0, state.branches.length - 1));
  state.at = Math.min(state.at, idsOf().length);
}

const whole = (text) => Math.max(0, Math.floor(Number(text)) || 0);

function readMessages(list) {
  return Array.isArray(list)
    ? list.filter((m) => m && typeof m.role === "string" && typeof m.content === "string").map(({ role, content }) => ({ role, content }))
    : [];
}

// Light and dark: the system's, unless somebody chose.
export function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const button = at("theme");
  button.textContent = dark ? "Light" : "Dark";
  button.setAttribute("aria-label", dark ? "Switch to light colours" : "Switch to dark colours");
  return dark;
}
