// Changing the model while it runs: parts scaled by sliders, and patches between two prompts.
import { at, bar, fail, make, percent, quoted, scroller, select, shade, signed, table, visible } from "./dom.js";
import { ask, look, offline } from "./api.js";
import { change, idsOf, state } from "./state.js";
import { number } from "./numbers.js";
import { tokens } from "./tokens.js";
import { model } from "./write.js";

export const KINDS = {
  head: { name: "head", index: () => model.heads, point: (e) => [`layers.${e.layer}.attn.heads`], part: "heads" },
  attention: { name: "attention of a layer", point: (e) => [`layers.${e.layer}.attn.out`] },
  ffn: { name: "feed-forward of a layer", point: (e) => [`layers.${e.layer}.ffn.out`] },
  layer: { name: "whole layer", point: (e) => [`layers.${e.layer}.attn.out`, `layers.${e.layer}.ffn.out`] },
  neuron: { name: "neuron", index: () => model.neurons, point: (e) => [`layers.${e.layer}.ffn.hidden`], part: "units" },
};

export function ablateBody() {
  const edits = state.edits.filter((e) => e.on && e.factor !== 1 && KINDS[e.kind]).flatMap((e) =>
    KINDS[e.kind].point(e).map((point) => ({ point, factor: e.factor, ...(KINDS[e.kind].part ? { [KINDS[e.kind].part]: [e.index] } : {}) })));
  return { ids: idsOf().slice(0, state.at), edits, best: 10 };
}

const nameOf = (e) => e.kind === "head" ? `head ${e.layer}.${e.index}` : e.kind === "neuron" ? `neuron ${e.index} of layer ${e.layer}`
  : e.kind === "layer" ? `layer ${e.layer}` : e.kind === "ffn" ? `feed-forward of layer ${e.layer}` : `attention of layer ${e.layer}`;

export async function drawAblation(box) {
  if (!at("edits") || !box.contains(at("edits"))) {
    box.replaceChildren(
      make("p", {}, "Scale the output of a component in the forward pass: 0 ablates it, 1 leaves it as it is. The table compares the next token's probabilities."),
      adder(), make("ul", { id: "edits" }), make("div", { id: "ablated" }));
  }
  drawEdits();
  await drawAblated();
}

function adder() {
  const chosen = { kind: "head", layer: Math.min(state.layer, model.layers - 1), index: state.head };
  const index = make("input", { type: "number", min: "0", step: "1", value: String(chosen.index), id: "edit-index" });
  const label = make("label", { for: "edit-index" }, "index ");
  const kind = select("component", Object.entries(KINDS).filter(([key]) => key !== "neuron" || model.neurons).map(([key, one]) => [key, one.name]), chosen.kind, (value) => {
    chosen.kind = value;
    index.hidden = label.hidden = !KINDS[value].index;
  });
  const layer = select("layer", [...Array(model.layers).keys()].map((i) => [i, String(i)]), chosen.layer, (value) => { chosen.layer = Number(value); });
  const add = make("button", { type: "button", id: "edit-add", disabled: offline, onclick: () => {
    const most = KINDS[chosen.kind].index?.() ?? 1;
    const i = KINDS[chosen.kind].index ? Math.max(0, Math.min(most - 1, Math.floor(Number(index.value) || 0))) : 0;
    change({ edits: [...state.edits, { kind: chosen.kind, layer: chosen.layer, index: i, factor: 0, on: true }] });
  } }, "Ablate");
  return make("div", { class: "row" }, kind, layer, label, index, add);
}

function drawEdits() {
  const list = at("edits");
  if (list.children.length === state.edits.length && list.contains(document.activeElement) && document.activeElement.type === "range") return;
  list.replaceChildren(...state.edits.map((e, i) => {
    const set = (changes) => change({ edits: state.edits.map((old, j) => (j === i ? { ...old, ...changes } : old)) });
    const shown = make("output", {}, "× " + e.factor.toFixed(2));
    const slider = make("input", { type: "range", min: "0", max: "2", step: "0.05", value: String(e.factor), "aria-label": `Factor of ${nameOf(e)}`, disabled: offline, oninput: () => {
      shown.textContent = "× " + Number(slider.value).toFixed(2);
      set({ factor: Number(slider.value) });
    } });
    const on = make("input", { type: "checkbox", checked: e.on, disabled: offline, onchange: () => set({ on: on.checked }) });
    return make("li", {}, make("label", {}, on, " " + nameOf(e)), slider, shown,
      make("button", { type: "button", disabled: offline, "aria-label": `Remove ${nameOf(e)}`, onclick: () => change({ edits: state.edits.filter((_, j) => j !== i) }) }, "Remove"));
  }));
}

let latest = 0;
async function drawAblated() {
  const mine = ++latest, asked = ablateBody(), found = await look("ablate", asked);
  if (mine !== latest || !at("ablated")) return;
  const moves = found.rows.map((row) => row.after - row.before), low = Math.min(0, ...moves), span = Math.max(0, ...moves) - low || 1;
  const of = (kind, row) => ({ ids: asked.ids, edits: asked.edits, kind, ...(row ? { token: row.id } : {}) });
  const rows = found.rows.map((row, i) => [make("code", {}, quoted(row.text)), number(percent(row.before), { ids: asked.ids, kind: "probability", token: row.id }, "probability before"),
    number(percent(row.after), of("probability", row), "probability after"), number(signed(100 * moves[i], 2), of("moved", row), "difference"),
    bar(moves[i], span, { negative: moves[i] < 0, from: Math.min(moves[i], 0) - low })]);
  at("ablated").replaceChildren(
    make("p", { id: "bits" }, ...(found.same_bits ? [`The logits are the model's own, bit for bit (SHA-256 ${found.bits[0]}…).`]
      : [`The logits differ (SHA-256 ${found.bits[0]}… → ${found.bits[1]}…): KL divergence `, number(found.divergence.toPrecision(3), of("divergence"), "KL divergence"), " nats."])),
    scroller("Next tokens", table(`Probabilities of token ${state.at} before and after the ablation; difference in percentage points`, ["token", "before", "after", "difference", "bar"], rows, { numeric: [1, 2, 3] })));
}

// Patching

export const PATCHES = { stream: "residual stream, by position", attention: "attention output, by position", "feed-forward": "feed-forward output, by position", heads: "head output, all positions" };

export async function patchBody() {
  const ids = idsOf().slice(0, state.at);
  const other = (await ask("/tokenize", { prompt: state.other, return_token_strs: true })).tokens;
  if (other.length !== ids.length) throw new Error(`The other prompt must have ${ids.length} tokens, as many as precede the selected token; it has ${other.length}.`);
  const plain = { edits: [], best: 1 };
  const [mine, theirs] = await Promise.all([look("ablate", { ids, ...plain }), look("ablate", { ids: other, ...plain })]);
  const token = idsOf()[state.at] ?? mine.rows[0].id;
  const against = theirs.rows[0].id;
  return [{ ids, other, token, ...(against === token ? {} : { against }), what: state.what }, mine, theirs];
}

export async function drawPatch(box) {
  const input = make("textarea", { id: "other", rows: "2", "aria-describedby": "other-hint" }, "");
  input.value = state.other;
  const go = make("button", { type: "button", id: "patch-go", disabled: offline, onclick: () => change({ other: input.value }) }, "Run");
  const result = make("div", { id: "patched" });
  box.replaceChildren(
    make("p", {}, "Activation patching: run another prompt with one activation at a time replaced by its value in this text. Where this text's prediction is restored, the activation carries it."),
    make("label", { for: "other" }, "Other prompt"), input,
    make("p", { class: "hint", id: "other-hint" }, `It must have ${Math.min(state.at, idsOf().length)} tokens, as many as precede the selected token: ${quoted(tokens.slice(0, state.at).map((t) => t.text).join(""))}`),
    make("div", { class: "row" }, select("patch", Object.entries(PATCHES), state.what, (what) => change({ what })), go), result);
  if (!state.other) return;
  try {
    result.replaceChildren(...heatMap(...(await patched())));
    fail(null);
  } catch (error) {
    result.replaceChildren(make("p", { class: "error" }, error.message));
  }
}

async function patched() {
  const [asked, mine, theirs] = await patchBody();
  return [asked, await look("patch", asked), mine, theirs];
}

function heatMap(asked, found, mine, theirs) {
  const name = (id) => quoted([...mine.rows, ...theirs.rows].find((row) => row.id === id)?.text ?? tokens[state.at]?.text ?? "#" + id);
  const span = found.clean - found.other || 1;
  const digits = Math.min(6, Math.max(2, 1 - Math.floor(Math.log10(Math.abs(span))))); // so that cells differ where their colours do
  const cell = (value, layer, i) => {
    const x = (value - found.other) / span, of = { ...asked, kind: "patched", layer, [found.by]: i };
    return make("td", { class: `number ${x >= 0 ? "" : "negative "}${shade(Math.abs(x))}` }, number(value.toFixed(digits), of, `layer ${layer}, ${found.by} ${i}`));
  };
  const column = (i) => make("th", { scope: "row" }, make("small", {}, String(i)), " ", found.by === "position" ? make("code", {}, visible(tokens[i]?.text ?? "").trimStart()) : "");
  const metric = asked.against === undefined ? `the logit of ${name(asked.token)}` : `the logit of ${name(asked.token)} minus that of ${name(asked.against)}`;
  const lead = (value, ids, label) => number(value.toFixed(digits + 1), { ids, kind: "logit", token: asked.token, against: asked.against }, label);
  return [
    make("p", {}, `Shown is ${metric}: `, lead(found.clean, asked.ids, "in this text"), " in this text, ", lead(found.other, asked.other, "in the other"), ` in the other prompt. The stronger the colour, the closer to this text; striped: further away than the other prompt.`),
    scroller("Patches", make("table", { class: "lens" }, make("caption", {}, make("span", {}, `With one activation patched: ${found.by}s × layers`)),
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, found.by), ...found.rows.map((row) => make("th", { scope: "col" }, row.replace("layers.", "layer "))))),
      make("tbody", {}, ...found.columns.map((i) => make("tr", {}, column(i), ...found.values.map((row, layer) => cell(row[i], layer, i))))))),
  ];
}
