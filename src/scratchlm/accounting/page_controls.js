"use strict";
// What can be set: the state, its place in the address, the rules it must keep, and its widgets.
// A size that is null follows its link, a formula of other sizes.

const CONTROLS = Object.values(DATA.controls).flat();
const BY_KEY = Object.fromEntries(CONTROLS.map((control) => [control.key, control]));
const SETTERS = {}; // key -> how its widget shows a value

const initial = (control) => {
  if (control.kind === "size") return read(control.value);
  return control.kind === "real" && control.value !== null ? Number(read(control.value)) : control.value;
};
const initialState = () => Object.fromEntries(CONTROLS.map((c) => [c.key, initial(c)]));
let state = initialState();

// What somebody typed or an address says; what is no number stays text, and is refused by name.
function parse(control, text) {
  if (text === "auto" && control.link !== null) return null;
  if (control.kind === "flag") return text === "true";
  if (control.kind === "size") return /^-?\d+$/.test(text.trim()) ? BigInt(text.trim()) : text;
  if (control.kind === "real") return text.trim() !== "" && isFinite(text) ? Number(text) : text;
  return text;
}

function readAddress() {
  state = initialState();
  for (const [key, text] of new URLSearchParams(location.hash.slice(1))) {
    if (key in BY_KEY) state[key] = parse(BY_KEY[key], text);
  }
}

function addressText() {
  const changed = CONTROLS.filter((control) => state[control.key] !== initial(control));
  return new URLSearchParams(changed.map((c) => [c.key, state[c.key] ?? "auto"])).toString();
}

const isShown = (control) =>
  Object.entries(control.when).every(([key, values]) => values.includes(state[key]));

// One line that says what is wrong with a value, or nothing.
function wrongValue(control, value) {
  const { key, kind } = control;
  if (kind === "choice") {
    const names = control.choices.map(([name]) => name);
    return names.includes(value) ? "" : `${key} must be one of ${names.join(", ")}; got '${value}'`;
  }
  if (typeof value === "string") {
    const what = kind === "size" ? "whole number" : "number";
    return `${key} must be a ${what}; got ${value.trim() === "" ? "nothing" : `${key}=${value}`}`;
  }
  if (key === "mfu" && !(value > 0 && value <= 1)) return `mfu must lie in (0, 1]; got ${value}`;
  if (key === "link" && !(value >= 1e-9 && value <= 1e9)) {
    return `link must be from 1e-09 to 1e+09 GB/s; got ${value} GB/s`;
  }
  if (key === "price" && !(value >= 0)) return `price must not be negative; got ${value}`;
  if (key === "tokens" && value < 1n) return `tokens must be at least 1; got ${value}`;
  if (kind === "size" && control.most !== null && (value < control.least || value > control.most)) {
    return `${key} must lie between ${control.least} and ${control.most}; got ${key}=${value}`;
  }
  return "";
}

// Turn the state into bound symbols and choices, or into one line that says what is wrong.
function resolve() {
  const sizes = {};
  const choices = {};
  for (const control of CONTROLS) {
    const value = state[control.key];
    const wrong = value !== null && isShown(control) ? wrongValue(control, value) : "";
    if (wrong) return { refusal: wrong, sizes };
    if (control.symbol === "") choices[control.key] = value;
    else if (value !== null && typeof value !== "string") sizes[control.symbol] = value;
  }
  if (choices.ffn === "dense") Object.assign(sizes, { E: 0n, k: 0n });
  if (choices.parallel === "none" && sizes.G > 1n) choices.parallel = "zero1"; // as the command line
  if (choices.parallel === "tp") sizes.G_t = sizes.G;
  choices.tp = state.tp;
  choices.link = state.link;
  const machine = DATA.machines[choices.gpu];
  sizes.list_price = machine.price;
  sizes.list_link = machine.link === null ? null : machine.link / 1e9;
  return follow(sizes, choices);
}

// Bind what follows a formula, checking each rule as soon as its symbols are bound. After the first
// broken rule the rest is bound as far as it can be, for the widgets to show.
function follow(sizes, choices) {
  const variant = DATA.variants[`${choices.ffn}/${choices.tie_embeddings ? "tied" : "untied"}`];
  const links = CONTROLS.filter((c) => c.link !== null && state[c.key] === null);
  const waiting = [...links.map((c) => [c.symbol, c.link, c]), ["N", variant.N, null]];
  const rules = DATA.rules.filter((rule) => Object.entries(rule.when).every(([key, values]) =>
    values.includes(key in choices ? choices[key] : state[key])));
  let refusal = "";
  for (;;) {
    const rule = rules.findIndex((r) => [r.left, r.right].every((f) => isBound(f, sizes)));
    if (rule >= 0) {
      const [checked] = rules.splice(rule, 1);
      refusal ||= broken(checked, sizes);
      continue;
    }
    const next = waiting.findIndex(([, formula]) => isBound(formula, sizes));
    if (next < 0) return refusal ? { refusal, sizes } : { sizes, choices };
    const [[symbol, formula, control]] = waiting.splice(next, 1);
    const value = valueOf(formula, sizes);
    if (control?.kind === "size" && !isWhole(value)) continue; // a rule has said why
    sizes[symbol] = value;
    if (control && value !== null) refusal ||= wrongValue(control, value);
  }
}

function isBound(formula, env) {
  const symbols = (tree) => (Array.isArray(tree) ? tree.slice(1).flatMap(symbols) : [tree]);
  return symbols(DATA.formulas[formula][0]).every((s) => typeof s === "number" || s in env);
}

function broken(rule, env) {
  const [left, right] = [valueOf(rule.left, env), valueOf(rule.right, env)];
  const holds = rule.kind === "divisible" ? left % right === 0n : left <= right;
  return holds ? "" : rule.says.replace(/\{(\w+)\}/g, (_, name) => String(env[name]));
}

// The same account in a terminal: the command, and the model's config where it was changed.
function terminal(sizes) {
  const own = CONTROLS.filter((c) => c.option === "");
  const changed = own.some((c) => state[c.key] !== initial(c));
  const words = ["scratchlm account", changed ? "model.json" : DATA.argument];
  for (const control of CONTROLS) {
    const value = state[control.key];
    const plain = control.kind === "size" ? read(control.plain) : control.plain?.float ?? control.plain;
    if (control.option === "" || value === null || value === plain || !isShown(control)) continue;
    const argument = control.key === "gpu" ? DATA.machines[value].argument : value;
    words.push(control.kind === "flag" ? control.option : `${control.option} ${argument}`);
  }
  return { command: words.join(" "), config: changed ? configText(sizes) : "" };
}

function configText(sizes) {
  const variant = DATA.variants[`${state.ffn}/${state.tie_embeddings ? "tied" : "untied"}`];
  const config = structuredClone(variant.config);
  for (const control of CONTROLS) {
    if (control.option !== "" || control.symbol === "" || !isShown(control)) continue;
    const inside = { num_experts: config.ffn, experts_per_token: config.ffn, sliding_window: config.attention };
    (inside[control.key] ?? config)[control.key] = Number(sizes[control.symbol]);
  }
  return JSON.stringify(config, null, 2);
}

// Widgets

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}

function buildControls(place, changed) {
  const wide = matchMedia("(min-width: 860px)").matches;
  Object.entries(DATA.controls).forEach(([title, controls], index) => {
    const box = el("details", { class: "group", open: wide || index === 0 }, el("summary", {}, title));
    for (const control of controls) box.append(widget(control, changed));
    place.append(box);
  });
}

function widget(control, changed) {
  const set = (value) => {
    state[control.key] = value;
    changed(control.key);
  };
  const build = { size: sizeWidget, real: sizeWidget, choice: choiceWidget, flag: flagWidget };
  const box = build[control.kind](control, set);
  box.dataset.key = control.key;
  return box;
}

function label(control) {
  const symbol = control.symbol && control.symbol in DATA.symbols ? el("i", {}, control.symbol) : "";
  return el("label", { for: control.key, title: control.words || null }, control.label, " ", symbol);
}

function choiceWidget(control, set) {
  const select = el("select", { id: control.key },
    ...control.choices.map(([value, words]) => el("option", { value }, words)));
  select.addEventListener("input", () => set(select.value));
  SETTERS[control.key] = (value) => { select.value = value; };
  const wide = control.choices.some(([, words]) => words.length > 14);
  return el("div", { class: wide ? "control wide" : "control" }, label(control), select);
}

function flagWidget(control, set) {
  const box = el("input", { type: "checkbox", id: control.key });
  box.addEventListener("input", () => set(box.checked));
  SETTERS[control.key] = (value) => { box.checked = value; };
  return el("div", { class: "control" }, label(control), box);
}

function sizeWidget(control, set) {
  const number = el("input", {
    type: "number", id: control.key, inputmode: control.kind === "size" ? "numeric" : "decimal",
    min: control.kind === "size" ? control.least : 0, step: control.kind === "size" ? 1 : "any",
  });
  number.addEventListener("input", () => set(parse(control, number.value)));
  const slider = control.stops.length ? sliderOf(control, set) : null;
  const follows = control.link === null ? null : el("input", { type: "checkbox", id: `${control.key}-auto` });
  follows?.addEventListener("input", () => set(follows.checked ? null : parse(control, number.value)));
  SETTERS[control.key] = (value, linked) => {
    // what is being typed, or is no number, is left as it stands
    if (document.activeElement !== number && typeof value !== "string") number.value = value ?? "";
    if (follows) follows.checked = linked;
    if (slider && typeof value !== "string" && value !== null) {
      slider.value = nearest(control.stops, Number(value));
      slider.setAttribute("aria-valuetext", commas(String(value)));
      const last = Math.max(1, control.stops.length - 1);
      slider.style.setProperty("--filled", `${(100 * slider.value) / last}%`);
    }
  };
  const link = follows && el("label", { class: "link" }, follows, ` = ${control.linkLabel}`);
  return el("div", { class: "control" }, label(control), number, slider, link);
}

function sliderOf(control, set) {
  const slider = el("input", {
    type: "range", id: `${control.key}-slider`, min: 0, max: control.stops.length - 1, step: 1,
    "aria-label": `${control.label}, slider`,
  });
  slider.addEventListener("input", () => set(BigInt(control.stops[slider.value])));
  return slider;
}

const nearest = (stops, value) => {
  const above = stops.findIndex((stop) => stop >= value);
  if (above < 0) return stops.length - 1;
  return above > 0 && value - stops[above - 1] < stops[above] - value ? above - 1 : above;
};

function showControls(sizes) {
  for (const control of CONTROLS) {
    const set = state[control.key];
    const linked = set === null;
    SETTERS[control.key](linked ? sizes?.[control.symbol] ?? null : set, linked);
    document.querySelector(`[data-key="${control.key}"]`).hidden = !isShown(control);
  }
}
