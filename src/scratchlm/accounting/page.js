"use strict";
// Drawing: headline numbers, bars of where things go, and tables of every item with its formula.

const $ = (id) => document.getElementById(id);
const toggled = new Set(); // rows of the tables that were toggled away from their first state
let focused = ""; // the row whose toggle keeps the focus when its table is drawn anew

const HUES = [
  [/embedding/, "pink"],
  [/data-parallel/, "orange"],
  [/tensor-parallel/, "gold"],
  [/arithmetic/, "blue"],
  [/LM head|logit|log-prob|loss/, "violet"],
  [/gradient/, "red"],
  [/optimizer|moment/, "green"],
  [/weights|projection|Q, K, V/, "blue"],
  [/attention|QKᵀ|AV|KV cache|block/, "teal"],
  [/feed-forward|W1|W2|W3|expert|router|hidden/, "orange"],
  [/norm|residual|layer/, "gold"],
];
const hueOf = (name) => (HUES.find(([pattern]) => pattern.test(name)) ?? [null, "grey"])[1];

// Bars

// Follow a tree down through what only groups (passes, layers) and add up what has the same name.
function gather(item, opened, names = {}) {
  const sums = new Map();
  const visit = (part, times, share) => {
    if (part.children.length && (part === item || opened.has(part.name))) {
      for (const child of part.children) visit(child, multiply(times, part.times), share * child.share);
      return;
    }
    const name = names[part.name] ?? part.name;
    const before = sums.get(name) ?? { name, value: 0n, share: 0 };
    const value = add(before.value, multiply(part.value, times));
    sums.set(name, { name, value, share: before.share + share });
  };
  visit(item, 1n, 1);
  return [...sums.values()];
}

// What is kept for the backward pass stands beside weights and gradients under its full name.
function held(item) {
  const parts = [];
  for (const child of item.children) {
    if (!child.name.includes("activations")) {
      parts.push(child);
      continue;
    }
    for (const kept of gather(child, new Set(["layers"]), NORMS)) {
      parts.push({ ...kept, name: `activations: ${kept.name}`, share: kept.share * child.share });
    }
  }
  return parts;
}

const PASSES = new Set(["forward", "backward", "recomputation", "layers"]);
const NORMS = Object.fromEntries(["norm 1", "norm 2", "final norm"].flatMap((name) =>
  ["", " input", " statistics"].map((what) => [name + what, "norms"])));

// One stacked bar and its legend; what is too small to see is drawn as one.
function bar(segments, text, whatIsIt) {
  const seen = segments.filter((s) => s.share >= 0.008);
  const small = segments.filter((s) => s.share < 0.008 && s.share > 0);
  if (small.length) {
    const value = small.reduce((sum, s) => add(sum, s.value), 0n);
    const share = small.reduce((sum, s) => sum + s.share, 0);
    seen.push({ name: "the rest", value, share, title: small.map((s) => s.name).join(", ") });
  }
  const used = {};
  for (const segment of seen) {
    segment.hue = hueOf(segment.name);
    segment.nth = used[segment.hue] = (used[segment.hue] ?? -1) + 1;
  }
  const stripe = el("div", { class: "bar", role: "img", "aria-label":
    `${whatIsIt}: ${seen.map((s) => `${s.name} ${percent(s.share)}`).join(", ")}` });
  const legend = el("ul", { class: "legend" });
  for (const segment of seen) {
    const said = `${segment.name}: ${text(segment.value)}, ${percent(segment.share)}`;
    const piece = el("span", { class: `hue ${segment.hue} nth${segment.nth % 4}`, title: said });
    piece.style.flexGrow = String(segment.share);
    if (segment.share > 0.09) piece.append(el("b", {}, percent(segment.share)));
    stripe.append(piece);
    legend.append(el("li", { title: segment.title ?? null },
      el("span", { class: `swatch hue ${segment.hue} nth${segment.nth % 4}` }),
      el("span", {}, segment.name, segment.bound ? el("em", {}, segment.bound) : ""),
      el("span", { class: "n" }, text(segment.value)), el("span", { class: "n" }, percent(segment.share))));
  }
  return [stripe, legend];
}

// Tables

function itemTable(id, item, text, head = item.unit === "bytes" ? "memory" : item.unit) {
  const body = el("tbody");
  const add = (part, level, share, path) => {
    const key = `${id}/${path}`;
    const many = part.times !== 1n;
    const foldable = part.children.length > 0;
    const shown = level < 2 !== toggled.has(key);
    const long = foldable && part.symbols.length > 40;
    const name = many ? `${part.name} (${numberText(part.times)} ×)` : part.name;
    const row = el("tr", { "data-path": path, "data-value": String(part.value), "data-share": share,
      class: level === 0 ? "top" : null },
      nameCell(name, level, foldable ? shown : null, key, part.note),
      el("td", { class: "formula" }, long ? "" : part.symbols),
      el("td", { class: "formula" }, long ? "" : part.numbers),
      el("td", { class: "n", title: exact(part.value) }, text(part.value)),
      el("td", { class: "n" }, percent(share)));
    row.style.setProperty("--level", level);
    body.append(row);
    if (!foldable || !shown) return;
    if (many) {
      const one = divide(part.value, part.times);
      body.append(el("tr", { class: "one" }, nameCell("one layer", level + 1, null, "", ""),
        el("td", { class: "formula" }), el("td", { class: "formula" }),
        el("td", { class: "n", title: exact(one) }, text(one)),
        el("td", { class: "n" }, percent(share / Number(part.times)))));
    }
    for (const child of part.children) {
      add(child, level + (many ? 2 : 1), share * child.share, `${path}/${child.name}`);
    }
  };
  add(item, 0, 1, item.name);
  return el("table", { id, class: "items" }, heads("item", "formula", "with numbers", head, "share"), body);
}

function heads(...names) {
  return el("thead", {}, el("tr", {}, ...names.map((name) =>
    el("th", { scope: "col", class: /item|component|formula|numbers|convention|bound|symbol|mean|plan|^$/.test(name) ? null : "n" }, name))));
}

function nameCell(name, level, shown, key, note) {
  const cell = el("th", { scope: "row" });
  cell.style.setProperty("--level", level);
  if (shown === null) {
    cell.append(el("span", { class: "leaf" }, name));
  } else {
    const button = el("button", { type: "button", "aria-expanded": String(shown), "data-toggle": key }, name);
    button.addEventListener("click", () => {
      if (!toggled.delete(key)) toggled.add(key);
      focused = key;
      drawSoon();
    });
    cell.append(button);
  }
  if (note) cell.append(el("small", {}, note));
  return cell;
}

function timeTable(time) {
  const body = el("tbody");
  for (const part of time.parts) {
    body.append(el("tr", { "data-path": part.name, "data-value": part.seconds, "data-bound": part.bound },
      el("th", { scope: "row" }, el("span", { class: "leaf" }, part.name)),
      el("td", { class: "n aside" }, human(part.flops)),
      el("td", { class: "n aside" }, bytesText(part.bytes)),
      el("td", { class: "n aside" }, part.bytes ? fixed(part.flops / part.bytes, 1) : "0.0"),
      el("td", { class: "n" }, secondsText(part.seconds)),
      el("td", { class: "n" }, percent(part.share)),
      el("td", { class: "bound" }, part.bound)),
    el("tr", { class: "below" }, el("td", { class: "formula", colspan: 7 }, part.symbols, el("br"), part.numbers)));
  }
  return el("table", { id: "time-table", class: "items" },
    heads("component", "FLOP", "moved", "FLOP/byte", "time", "share", "bound by"), body);
}

// A section that keeps its table open or closed while numbers change.
function section(id, title, lead, ...content) {
  const box = $(id);
  const kept = box.querySelector("details")?.open ?? false;
  const table = content.pop();
  const details = el("details", { open: kept }, el("summary", {}, "every item, with its formula"),
    el("div", { class: "scroll" }, table));
  box.replaceChildren(el("h2", {}, title), el("p", { class: "lead" }, ...lead), ...content, details);
}

// The page

function card(id, name, value, shown, ...below) {
  return el("div", { class: "card", id, "data-value": String(value) },
    el("h3", {}, name), el("p", { class: "figure" }, shown), ...below.map((text) => el("p", {}, text)));
}

const mfuText = (value, convention, peak) => `${value} (${convention} FLOPs of ${peak})`;

function drawCards(result, choices) {
  const { counts, memory, stepTime, run, env } = result;
  const convention = choices.convention;
  const forward = result.forward[convention].value;
  const training = result.training[convention].value;
  const peak = memory.training.value;
  const fits = peak <= read(result.machine.memory);
  const room = `${bytesText(read(result.machine.memory))} of ${choices.gpu}`;
  const bound = stepTime.computing >= 0.5 ? `${percent(stepTime.computing)} of it bound by compute`
    : `${percent(1 - stepTime.computing)} of it bound by memory traffic`;
  const tokens = Number(env.B) * Number(env.S);
  const cost = run.dollars === null ? "" : `$${fixed(run.dollars, 0)} on ${exact(env.G)} × ${choices.gpu}`;
  $("cards").replaceChildren(
    card("card-parameters", "Parameters", counts.unique, human(counts.unique), exact(counts.unique),
      choices.ffn === "moe" ? `${human(counts.active)} active per token` : `${fixed(quotient(counts.unique * 4n, 10n ** 9n), 2)} GB in float32`),
    card("card-forward", "Forward pass", forward, `${human(forward)}FLOP`, exact(forward), `convention ${convention}`),
    card("card-training", "Training step", training, `${human(training)}FLOP`, exact(training), `convention ${convention}`),
    card("card-time", "Step time, at best", stepTime.seconds, secondsText(stepTime.seconds), bound,
      `${fixed(tokens / stepTime.seconds, 0)} tokens/s on one ${choices.gpu}`),
    card("card-memory", "Training memory", peak, bytesText(peak), memory.training.name,
      el("span", { class: fits ? "good" : "bad" }, fits ? `fits ${room}` : `exceeds ${room}`)),
    card("card-kv", "KV cache", memory.kvCache, bytesText(memory.kvCache),
      `${bytesText(memory.kvCachePerToken)} per token`, `serving: ${bytesText(memory.serving.value)}`),
    card("card-run", "Training run", run.seconds, secondsText(run.seconds), cost,
      `${human(run.tokens)} tokens at an assumed MFU of ${mfuText(fixed(env.u, 2), convention, result.peak)}`));
  $("strip").replaceChildren(
    el("span", {}, el("b", {}, human(counts.unique)), " parameters"),
    el("span", { class: fits ? "" : "bad" }, el("b", {}, bytesText(peak)), " to train"),
    el("span", {}, el("b", {}, secondsText(stepTime.seconds)), " a step"));
}

function drawParameters({ parameters, counts }) {
  const says = {
    total: "a tied LM head counted as its own matrix",
    unique: "tied weights once: what an optimizer sees",
    embedding: "vectors looked up",
    non_embedding: "unique without those",
    active: "what one token uses: with experts, the chosen ones",
    matmul: "what one token is multiplied with: N_matmul of the MFU convention",
  };
  const list = el("dl", { class: "counts" });
  for (const [name, value] of Object.entries(counts)) {
    list.append(el("div", { title: says[name], "data-count": name, "data-value": String(value) },
      el("dt", {}, name.replace("_", "-")), el("dd", {}, exact(value))));
  }
  section("parameters", "Parameters", ["Where they are."],
    ...bar(gather(parameters, new Set(["layers"]), NORMS), human, "parameters"), list,
    itemTable("parameters-table", parameters, exact));
}

function drawFlops({ flops }, choices) {
  const words = {
    full: "every matmul as written, attention S×S",
    causal: "only what must be done",
    "6ND": "2N forward, 4N backward per token",
    hardware: "what is executed, recomputation included",
  };
  const rows = Object.entries(flops).map(([name, item]) => el("tr",
    { "data-convention": name, "data-value": String(item.value), class: name === choices.convention ? "chosen" : null },
    el("th", { scope: "row" }, name), el("td", { class: "n" }, exact(item.value)),
    el("td", { class: "n" }, fixed(quotient(item.value, flops.full.value), 3)), el("td", { class: "dim" }, words[name])));
  const item = flops[choices.convention];
  section("flops", `FLOPs of ${choices.phase}`, [`Convention ${choices.convention}: ${words[choices.convention]}.`],
    ...bar(gather(item, PASSES, { "QKᵀ again": "attention" }), (v) => `${human(v)}FLOP`, "FLOPs"),
    el("div", { class: "scroll" }, el("table", { class: "small" }, heads("convention", "FLOP", "of full", "meaning"), el("tbody", {}, ...rows))),
    itemTable("flops-table", item, exact));
}

function drawMemory({ memory, machine, env }, choices) {
  const how = [choices.dtype, choices.optimizer, `checkpointing ${choices.checkpointing}`];
  if (choices.parallel !== "none") how.push(`${planName(env, choices)} on ${exact(env.G)}`);
  const most = Object.values(memory.moments).reduce((a, b) => (b > a ? b : a));
  const moments = el("ul", { class: "moments", "aria-label": "moments of a training step" });
  for (const [name, bytes] of Object.entries(memory.moments)) {
    const line = el("span", { class: "line" });
    line.style.width = `${100 * quotient(bytes, most)}%`;
    moments.append(el("li", { "data-moment": name, "data-value": String(bytes), class: name === memory.peak ? "chosen" : null },
      el("span", {}, name), el("span", { class: "track" }, line), el("span", { class: "n" }, bytesText(bytes))));
  }
  const share = percent(quotient(memory.training.value, read(machine.memory)));
  section("memory", "Training memory of one GPU",
    [`At its largest ${memory.training.name}: ${bytesText(memory.training.value)}, ${share} of ${choices.gpu} (${how.join(", ")}).`],
    ...bar(held(memory.training), bytesText, "training memory"), moments,
    itemTable("memory-table", memory.training, bytesText));
  section("serving", "Serving memory of one GPU",
    [`The cache has room for ${exact(env.C + 1n)} tokens of each of ${exact(env.B)} sequences: ${bytesText(memory.kvCache)}, ${bytesText(memory.kvCachePerToken)} per token.`],
    ...bar(memory.serving.children, bytesText, "serving memory"),
    itemTable("serving-table", memory.serving, bytesText));
}

function drawTime({ time, peak }, choices) {
  const segments = time.parts.map((part) => ({ name: part.name, value: part.seconds, share: part.share, bound: part.bound }));
  const above = time.mfu > 1 ? " (above 1: full also counts attention that the mask spares)" : "";
  const rate = `${fixed(time.tokens / time.seconds, 0)} tokens/s`;
  section("time", `Time of ${choices.phase} at the limits of ${choices.gpu}`,
    [`${secondsText(time.seconds)}, ${rate}, MFU ${mfuText(fixed(time.mfu, 3), "full", peak)}${above}: nothing real is faster. Each component takes the longer of its arithmetic and its memory traffic.`],
    ...bar(segments, secondsText, "time"), timeTable(time));
  $("time").dataset.value = time.seconds;
  $("time").dataset.mfu = time.mfu;
}

const PROJECTED = "A projection, not a measurement";

function drawParallel({ projection, env }, choices) {
  $("several").hidden = projection === null || env.G === 1n;
  if ($("several").hidden) return;
  const { sent, step, overlapped, tokens, tokensOverlapped, share } = projection;
  const rates = sent.children.map(({ name }) => {
    const { dataRate, nodeRate, tensorRate } = projection;
    const rate = name.includes("nodes") ? nodeRate : name.includes("tensor") ? tensorRate : dataRate;
    return `${general(Number(rate) / 1e9, 4)} GB/s ${name}`;
  });
  const rows = [
    ...step.children.filter((part) => Number(part.value)).map((part) => [part.name, secondsText(Number(part.value)), part]),
    ["a step, nothing overlaps", secondsText(Number(step.value)), { symbols: "t_c + t_d + t_n + t_t", numbers: step.numbers }],
    ["a step, all that can overlaps", secondsText(Number(overlapped.value)), overlapped],
    ["tokens/s, nothing overlaps", fixed(tokens.value, 0), tokens],
    ["tokens/s, all that can overlaps", fixed(tokensOverlapped.value, 0), tokensOverlapped],
  ].map(([name, value, { symbols, numbers }]) => el("tr", {}, el("th", { scope: "row" }, name),
    el("td", { class: "n" }, value), el("td", { class: "dim" }, `${symbols} = ${numbers}`)));
  section("several", `A step on ${exact(env.G)} × ${choices.gpu}, projected (${planName(env, choices)})`,
    [`${PROJECTED}: each GPU is assumed to reach an MFU of ${fixed(env.u, 2)} alone; ${rates.join(", ")}. ` +
      `A GPU sends ${bytesText(sent.value)} in a step: ${percent(share)} of its time where nothing overlaps.`],
    ...bar(step.children, (v) => secondsText(Number(v)), "a step"),
    el("div", { class: "scroll" }, el("table", { class: "small" }, el("tbody", {}, ...rows))),
    itemTable("sent-table", sent, bytesText, "sent"));
  $("several").dataset.values = JSON.stringify([step, overlapped, tokens, tokensOverlapped].map((item) => Number(item.value)));
}

function drawPlans({ plans, env }, choices) {
  $("plans").hidden = plans.length === 0;
  const many = env.m > 1n ? `${exact(env.m)} micro-batches` : "a batch";
  let before = 0n;
  const rows = plans.map((plan) => {
    const [slow, fast] = [Number(plan.tokens.value), Number(plan.tokensOverlapped.value)];
    const gpus = Number(plan.gpus);
    const first = plan.gpus !== before;
    before = plan.gpus;
    return el("tr", { "data-plan": `${plan.gpus} ${plan.name}`, "data-values":
      JSON.stringify([String(plan.memory), Number(plan.sent.value), plan.share, slow, fast]),
      class: first ? "first" : null },
      el("th", { scope: "row", class: "n" }, first ? exact(plan.gpus) : ""), el("td", {}, plan.name),
      el("td", { class: "n" }, bytesText(plan.memory)),
      el("td", { class: plan.fits ? "good" : "bad" }, plan.fits ? "fits" : "too large"),
      el("td", { class: "n" }, bytesText(plan.sent.value)),
      el("td", { class: "n" }, `${fixed(plan.share * 100, 0)}%`),
      el("td", { class: "n" }, fixed(slow / gpus, 0)), el("td", { class: "n" }, fixed(fast / gpus, 0)),
      el("td", { class: "n" }, human(fast)));
  });
  $("plans").replaceChildren(el("h2", {}, `8 to 1,024 × ${choices.gpu}, projected`),
    el("p", { class: "lead" }, `${PROJECTED}. Each data-parallel rank has ${many} of ${exact(env.B)} a step. ` +
      "Communication: its share of a step in which nothing overlaps. Tokens/s: of one GPU where nothing overlaps " +
      "and where all that can does; of all GPUs, the latter."),
    el("div", { class: "scroll" }, el("table", { class: "plans" }, heads("GPUs", "plan", "memory", "",
      "sent a step", "communication", "tokens/s a GPU", "overlapped", "of all GPUs"), el("tbody", {}, ...rows))));
}

function drawRun({ run, env, peak }, choices) {
  const rows = [
    ["tokens", human(run.tokens), `${general(quotient(run.tokens, run.suggested), 2)} × the suggested ${human(run.suggested)}: 20 per parameter, arXiv:2203.15556`],
    ["FLOP per token", human(run.perToken), choices.convention],
    ["assumed MFU", fixed(env.u, 2), `${choices.convention} FLOPs of ${peak}`],
    ["time", secondsText(run.seconds), `on ${exact(env.G)} × ${choices.gpu}: ${run.symbols} = ${run.numbers}`],
    ["GPU hours", fixed(run.hours, 0), ""],
  ];
  if (run.dollars !== null) {
    rows.push(["cost", `$${fixed(run.dollars, 0)}`, `at $${fixed(env.price, 2)} per GPU-hour (prices: ${DATA.prices_as_of}, rough)`]);
  }
  const box = $("run");
  box.dataset.seconds = run.seconds;
  box.dataset.dollars = run.dollars ?? "";
  box.replaceChildren(el("h2", {}, "A training run"), el("div", { class: "scroll" }, el("table", { class: "small" }, el("tbody", {},
    ...rows.map(([name, value, says]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "n" }, value), el("td", { class: "dim" }, says)))))));
}

function drawTerminal(sizes) {
  const { command, config } = terminal(sizes);
  $("command").textContent = command;
  $("config").textContent = config;
  $("config-box").hidden = config === "";
}

function drawSymbols(env) {
  const rows = Object.entries(DATA.symbols).filter(([name]) => name in env).map(([name, meaning]) =>
    el("tr", {}, el("th", { scope: "row" }, el("i", {}, name)), el("td", { class: "n" }, numberText(env[name])), el("td", { class: "dim" }, meaning)));
  $("symbols").replaceChildren(el("table", { class: "small" }, el("tbody", {}, ...rows)));
}

function describe(sizes) {
  const s = (name) => exact(sizes[name]);
  const shared = sizes.H_kv === sizes.H ? "" : ` (${s("H_kv")} for keys and values)`;
  const experts = state.ffn === "moe" ? `, ${s("E")} experts, ${s("k")} per token` : "";
  return `${s("L")} layers, d_model ${s("d")}, ${s("H")} heads of ${s("d_h")}${shared}, d_ff ${s("d_ff")}${experts}, ` +
    `vocabulary ${s("V")}, context ${s("N_ctx")}; ${DATA.kinds[state.ffn]}${state.tie_embeddings ? ", tied" : ""}`;
}

function draw() {
  const { refusal, sizes, choices } = resolve();
  const changed = CONTROLS.some((c) => c.option === "" && state[c.key] !== initial(c));
  $("name").textContent = changed ? `${DATA.name}, changed` : DATA.name;
  $("reset").hidden = addressText() === "";
  $("refusal").textContent = refusal ?? "";
  $("refusal").hidden = !refusal;
  $("results").hidden = Boolean(refusal);
  $("described").hidden = Boolean(refusal);
  showControls(sizes);
  if (refusal) {
    $("strip").replaceChildren(el("span", { class: "bad" }, refusal));
    return;
  }
  const result = account(sizes, choices);
  $("described").textContent = describe(sizes);
  drawCards(result, choices);
  drawParameters(result);
  drawFlops(result, choices);
  drawMemory(result, choices);
  drawTime(result, choices);
  drawParallel(result, choices);
  drawPlans(result, choices);
  drawRun(result, choices);
  drawTerminal(sizes);
  drawSymbols({ ...result.env, ...result.projection?.env });
}

// However many things change before the next frame, it is drawn once.
let waiting = false;
function drawSoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    draw();
    if (focused) document.querySelector(`[data-toggle="${CSS.escape(focused)}"]`)?.focus();
    focused = "";
  });
}

let saving = 0;
function saveAddress() {
  clearTimeout(saving);
  saving = setTimeout(() => {
    const text = addressText();
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  }, 150);
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    button.textContent = "press Ctrl+C";
    getSelection().selectAllChildren($(button.dataset.copies));
  }
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}

readAddress();
buildControls($("controls"), () => { drawSoon(); saveAddress(); });
draw();
addEventListener("hashchange", () => { readAddress(); drawSoon(); });
$("reset").addEventListener("click", () => { state = initialState(); drawSoon(); saveAddress(); });
for (const button of document.querySelectorAll("[data-copies]")) {
  button.addEventListener("click", () => copy(button, $(button.dataset.copies).textContent));
}
