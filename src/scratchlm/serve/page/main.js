// The page: what is shown when, and who listens to what.
import { announce, at, fail, keepingFocus, make } from "./dom.js";
import { look, offline, startOffline } from "./api.js";
import { applyTheme, change, idsOf, onChange, readAddress, state } from "./state.js";
import { COLOURS, drawTokens, markToken, noteBranchText, readTokens, tokenKeys, tokens } from "./tokens.js";
import { complete, drawMode, drawSettings, model, say, setModel, stop, syncAnswer } from "./write.js";
import { drawChoices } from "./choices.js";
import { SORTS, drawAttention } from "./attention.js";
import { drawAttribution, drawLens } from "./lens.js";
import { KINDS, PATCHES, drawAblation, drawPatch } from "./edits.js";
import { drawCache, drawCost, drawExperts } from "./engine.js";
import { exportFile, showLink, showPython } from "./share.js";

const VIEWS = {
  choices: ["Next token", drawChoices],
  attention: ["Attention", drawAttention],
  lens: ["Logit lens", drawLens],
  attribution: ["Attribution", drawAttribution],
  ablation: ["Ablation", drawAblation],
  patch: ["Patching", drawPatch],
  cost: ["Cost", drawCost],
  experts: ["Experts", drawExperts],
  cache: ["KV cache", drawCache],
};

// What an address may choose; anything else is as left out.
const CHOSEN = [["view", VIEWS, "choices"], ["colour", COLOURS, "probability"], ["sort", SORTS, "layer"], ["what", PATCHES, "stream"]];

function drawTabs() {
  at("tabs").replaceChildren(...Object.entries(VIEWS).filter(([id]) => id !== "experts" || model.experts).map(([id, [name]]) => make("button", {
    type: "button", role: "tab", id: "tab-" + id, "aria-controls": "view", "aria-selected": String(id === state.view), tabindex: id === state.view ? "0" : "-1",
    onclick: () => change({ view: id }),
  }, name)));
  at("view").setAttribute("aria-labelledby", "tab-" + state.view);
}

function tabKeys(event) {
  const tabs = [...at("tabs").children], now = tabs.indexOf(document.activeElement);
  const to = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (to === undefined || now < 0) return;
  event.preventDefault();
  const next = tabs[(to + tabs.length) % tabs.length];
  next.click();
  at(next.id).focus();
}

// A slider asks faster than a model answers: while a view is being drawn, the same one waits once.
let drawing = 0, shown = "", underWay = null, again = false;
async function drawView() {
  if (underWay === state.view) {
    again = true;
    return;
  }
  underWay = state.view;
  do {
    again = false;
    await drawOnce();
  } while (again && underWay === state.view);
  if (underWay === state.view) underWay = null;
}

async function drawOnce() {
  const mine = ++drawing, ids = idsOf(), box = at("view");
  if (!ids.length) {
    shown = "";
    box.replaceChildren(make("p", { class: "hint" }, "Generate something, then select a token to inspect it."));
    return;
  }
  if (state.at < 1) change({ at: 1 }, { quiet: true });
  const key = state.view;
  const target = shown === key ? box.firstElementChild : make("div", {}, make("p", { class: "hint" }, "Computing …"));
  box.setAttribute("aria-busy", "true");
  if (shown !== key) box.replaceChildren(target);
  try {
    await keepingFocus(box, () => VIEWS[key][1](target));
    if (mine === drawing) shown = key;
  } catch (error) {
    if (mine !== drawing) return;
    shown = "";
    box.replaceChildren(make("p", { class: "error" }, error.message));
  } finally {
    if (mine === drawing) box.setAttribute("aria-busy", "false");
  }
}

async function draw(changes = {}) {
  const only = Object.keys(changes);
  if (only.includes("mode") || !only.length) drawMode();
  keepingFocus(at("tabs"), drawTabs);
  try {
    await readTokens();
    if (tokens.length && state.branches[state.branch]) noteBranchText(state.branch, tokens);
    if (only.includes("branch") && state.mode === "chat") await syncAnswer();
    if (only.length === 1 && only[0] === "at" && at("tokens").children.length === tokens.length + 1) markToken();
    else if (!only.length || only.some((name) => ["at", "branch", "branches", "colour", "numbers"].includes(name))) drawTokens();
  } catch (error) {
    fail(error);
  }
  await drawView();
}

async function textsOfBranches() {
  for (let i = 0; i < state.branches.length; i++) {
    const found = await look("read", { ids: idsOf(i) });
    noteBranchText(i, found.tokens);
  }
}

function listen() {
  at("theme").addEventListener("click", () => {
    const theme = applyTheme(document.documentElement.dataset.theme) ? "light" : "dark";
    try { localStorage.setItem("theme", theme); } catch { /* a file may not store */ }
    applyTheme(theme);
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { applyTheme(document.documentElement.dataset.theme); draw(); });
  at("mode-completion").addEventListener("click", () => change({ mode: "completion" }));
  at("mode-chat").addEventListener("click", () => change({ mode: "chat" }));
  at("run").addEventListener("click", complete);
  at("send").addEventListener("click", say);
  at("new-chat").addEventListener("click", () => change({ messages: [], branches: [], branch: 0, at: 0, mode: "chat" }));
  at("stop").addEventListener("click", () => { stop(); announce("Stopped."); });
  for (const [id, go] of [["prompt", complete], ["message", say]]) {
    at(id).addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) go(); });
  }
  at("prompt").addEventListener("change", () => change({ prompt: at("prompt").value }, { quiet: true }));
  at("tokens").addEventListener("keydown", tokenKeys);
  at("tabs").addEventListener("keydown", tabKeys);
  at("colour").replaceChildren(...Object.entries(COLOURS).map(([key, { name }]) => make("option", { value: key }, name)));
  at("colour").addEventListener("change", () => change({ colour: at("colour").value }));
  at("numbers").addEventListener("change", () => change({ numbers: at("numbers").checked }));
  at("link").addEventListener("click", showLink);
  at("python").addEventListener("click", showPython);
  at("export").addEventListener("click", exportFile);
  for (const id of ["formula", "share"]) at(id + "-close").addEventListener("click", () => at(id).close());
  window.addEventListener("hashchange", () => open(location.hash.slice(1)));
}

async function open(words) {
  readAddress(words);
  for (const [name, known, plain] of CHOSEN) if (!Object.hasOwn(known, state[name])) state[name] = plain;
  state.edits = state.edits.filter((edit) => Object.hasOwn(KINDS, edit.kind));
  at("colour").value = state.colour;
  at("numbers").checked = state.numbers;
  drawSettings();
  try {
    if (state.branches.length > 1) await textsOfBranches();
  } catch (error) {
    fail(error);
  }
  await draw();
}

function describe() {
  const count = (n) => n.toLocaleString("en");
  at("name").textContent = model.name;
  document.title = model.name + " · scratchlm";
  at("about").textContent = `${count(model.parameters)} parameters, ${model.layers} layers × ${model.heads} heads${model.experts ? ` × ${model.experts} experts` : ""}, context ${count(model.context)}, vocabulary ${count(model.vocabulary)}`;
}

async function start() {
  let chosen = "";
  try { chosen = localStorage.getItem("theme") || ""; } catch { /* a file may not store */ }
  applyTheme(chosen);
  const kept = at("answers");
  let words = "";
  if (kept) {
    const { address: saved, answers: all } = JSON.parse(kept.textContent);
    startOffline(all);
    words = saved;
  }
  try {
    setModel(await look("model", {}));
  } catch (error) {
    fail(error);
    return;
  }
  describe();
  listen();
  onChange(draw);
  at("offline-note").hidden = !offline;
  at("export").hidden = offline;
  await open(location.hash.slice(1) || words);
  // After the frame that shows it: when the first view was drawn, in milliseconds of this page.
  requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.ready = String(Math.round(performance.now())); }));
}

start();
