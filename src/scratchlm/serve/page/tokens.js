// The text as tokens, coloured by probability, surprise or entropy; and the tree of branches.
import { at, behind, keepingFocus, make, percent, quoted, scroller, shade, table, visible } from "./dom.js";
import { look } from "./api.js";
import { number } from "./numbers.js";
import { change, idsOf, state } from "./state.js";

export const COLOURS = {
  probability: { name: "probability", text: (t) => percent(t.probability), level: (t) => t.probability, legend: "the stronger the colour, the higher" },
  surprise: { name: "surprise", text: (t) => t.surprise.toFixed(2) + " bits", level: (t) => t.surprise / 8, legend: "−log₂ p; the stronger the colour, the higher (strongest from 8 bits)" },
  entropy: { name: "entropy", text: (t) => t.entropy.toFixed(2) + " bits", level: (t) => t.entropy / 6, legend: "of the distribution the token was drawn from; the stronger the colour, the higher (strongest from 6 bits)" },
  none: { name: "no colour", text: () => "", level: () => 0, legend: "" },
};
export let tokens = []; // of the branch that is shown
export const times = new Map(); // seconds a token took to arrive, by "branch.place"

let drawn = "";
export async function readTokens() {
  const ids = idsOf();
  if (!ids.length) { tokens = []; drawn = ""; return; }
  const key = ids.join(".");
  if (key === drawn) return;
  const found = await look("read", { ids });
  if (idsOf().join(".") !== key) return; // something newer is on its way
  tokens = found.tokens;
  drawn = key;
}

// Tokens as they stream in, before they are read: with the log-probability that came along.
export function streamed(token) {
  tokens.push(token);
  drawn = "";
  const list = at("tokens");
  for (const old of list.querySelectorAll(".next")) old.closest("li").remove();
  list.append(item(token, tokens.length - 1));
}

export const begin = (found) => { tokens = [...found]; drawn = ""; drawTokens(); };

function label(token, place) {
  if (token.probability === undefined) return `token ${place}, ${quoted(token.text)}`;
  const more = token.rank === undefined ? "" : `, rank ${token.rank}, ${token.surprise.toFixed(2)} bits of surprise`;
  return `token ${place}, ${quoted(token.text)}, probability ${percent(token.probability)}${more}`;
}

function item(token, place) {
  const colour = COLOURS[state.colour] || COLOURS.probability;
  const known = token.probability !== undefined && (state.colour === "probability" || token.rank !== undefined);
  const given = place < (state.branches[0]?.given ?? 0);
  const button = make("button", {
    type: "button", class: `token ${known && state.colour !== "none" ? shade(colour.level(token)) : ""} ${given ? "given" : ""}`,
    "aria-label": label(token, place), title: label(token, place), tabindex: place === Math.max(1, state.at) ? "0" : "-1",
    onclick: () => change({ at: Math.max(1, place) }),
  }, make("span", {}, visible(token.text) || "∅"));
  if (state.at === place && place > 0) button.setAttribute("aria-current", "true");
  if (state.numbers && known && state.colour !== "none") button.append(make("small", {}, colour.text(token)));
  const made = make("li", {}, button);
  if (token.text.includes("\n")) made.className = "break";
  return made;
}

export function drawTokens() {
  const list = at("tokens");
  const items = tokens.map(item);
  if (tokens.length) {
    const end = make("button", {
      type: "button", class: "token next", "aria-label": "the next token, not generated yet", title: "the next token, not generated yet",
      tabindex: state.at >= tokens.length ? "0" : "-1", onclick: () => change({ at: tokens.length }),
    }, "next…");
    if (state.at === tokens.length) end.setAttribute("aria-current", "true");
    items.push(make("li", {}, end));
  }
  list.replaceChildren(...items);
  at("tokens-empty").hidden = tokens.length > 0;
  at("legend").replaceChildren(...legend());
  at("tokens-table").replaceChildren(tokens.length ? tokensTable() : "");
  keepingFocus(at("tree"), drawTree);
}

// Moving the choice redraws two buttons, not a thousand.
export function markToken() {
  for (const old of at("tokens").querySelectorAll("[aria-current]")) {
    old.removeAttribute("aria-current");
    old.tabIndex = -1;
  }
  const button = at("tokens").children[state.at]?.firstElementChild;
  if (button) {
    button.setAttribute("aria-current", "true");
    button.tabIndex = 0;
  }
}

function legend() {
  const colour = COLOURS[state.colour] || COLOURS.probability;
  if (state.colour === "none" || !tokens.length) return [];
  const steps = [0, 2, 4, 6, 8, 10].map((i) => make("i", { class: "shade-" + i }));
  return [make("span", { class: "ramp", "aria-hidden": "true" }, ...steps), ` ${colour.name}: ${colour.legend}. Underlined: the prompt.`];
}

function tokensTable() {
  const ids = idsOf();
  const asked = (text, i, kind) => number(text, () => ({ ids: ids.slice(0, i), kind, ...(kind === "entropy" ? {} : { token: ids[i] }) }), kind);
  const rows = () => tokens.map((t, i) => [String(i), make("code", {}, quoted(t.text)), String(t.id ?? ""),
    t.probability === undefined ? "–" : asked(percent(t.probability), i, "probability"), t.rank === undefined ? "" : asked(String(t.rank), i, "rank"),
    t.surprise === undefined ? "" : asked(t.surprise.toFixed(3), i, "surprise"), t.entropy === undefined ? "" : asked(t.entropy.toFixed(3), i, "entropy")]);
  const made = behind("As a table");
  made.addEventListener("toggle", () => {
    if (made.open && made.children.length === 1) {
      made.append(scroller("Tokens", table("Every token after those before it; surprise and entropy in bits",
        ["position", "token", "id", "probability", "rank", "surprise", "entropy"], rows(), { numeric: [0, 2, 3, 4, 5, 6] })));
    }
  });
  return made;
}

export function tokenKeys(event) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9, ArrowDown: 10, ArrowUp: -10 };
  if (!(event.key in steps) || !tokens.length) return;
  event.preventDefault();
  const now = Number([...at("tokens").children].indexOf(document.activeElement.closest("li")));
  const place = Math.max(1, Math.min(tokens.length, now + steps[event.key]));
  change({ at: place });
  at("tokens").children[place]?.firstElementChild.focus();
}

// The tree

function drawTree() {
  const box = at("tree");
  box.hidden = state.branches.length < 2;
  if (box.hidden) { box.replaceChildren(); return; }
  const list = (parent) => make("ul", {}, ...state.branches.map((one, i) => [one, i]).filter(([one]) => one.parent === parent)
    .map(([, i]) => make("li", {}, branchButton(i), ...(state.branches.some((b) => b.parent === i) ? [list(i)] : []))));
  box.replaceChildren(make("h3", {}, "Branches"), make("p", { class: "hint" }, "A branch shares its prefix with its parent. Full pages of a prefix that was a prompt before come from the KV cache."), list(-1));
}

export const branchTexts = new Map();
function branchButton(i) {
  const one = state.branches[i], text = branchTexts.get(idsOf(i).join("."));
  const where = one.parent < 0 ? "root" : `from token ${one.at}`;
  const button = make("button", { type: "button", class: "branch", onclick: () => change({ branch: i, at: Math.max(1, Math.min(one.parent < 0 ? one.given : one.at, idsOf(i).length)) }) },
    make("small", {}, where), " " + (text === undefined ? `${one.ids.length} tokens` : visible(text)));
  if (i === state.branch) button.setAttribute("aria-current", "true");
  return button;
}

export function noteBranchText(branch, found) {
  const one = state.branches[branch];
  const from = one.parent < 0 ? one.given : one.at;
  branchTexts.set(idsOf(branch).join("."), found.slice(from).map((t) => t.text).join("").slice(0, 120));
}
