// Attention: every head as a thumbnail, sorted by what it does, and one head in full.
import { at, behind, drawPixels, make, pixelsOf, quoted, scroller, select, shade, table, visible } from "./dom.js";
import { look } from "./api.js";
import { change, idsOf, state } from "./state.js";
import { number } from "./numbers.js";
import { tokens } from "./tokens.js";
import { model } from "./write.js";

export const SORTS = {
  layer: "layer and head", previous_token: "previous token", duplicate_token: "duplicate token",
  induction: "induction", first: "first token, this text", self: "self, this text",
};

// The query: the selected token, or the last one where the selected one is not generated yet.
export const query = () => Math.min(state.at, idsOf().length - 1);

export const attentionBody = () => ({
  ids: idsOf(), layer: Math.min(state.layer, model.layers - 1), head: Math.min(state.head, model.heads - 1), query: query(),
});

export async function drawAttention(box) {
  const ids = idsOf(), asked = attentionBody();
  const [all, one] = await Promise.all([look("heads", { ids }), look("attention", asked)]);
  box.replaceChildren(
    make("p", {}, "One thumbnail per head, named layer.head: rows are queries, columns are keys. Scores are mean attention weights: previous token, duplicate token and induction on repeated random tokens, first token and self on this text."),
    select("sort by", Object.entries(SORTS).filter(([key]) => key === "layer" || key in all.heads[0]), state.sort, (sort) => change({ sort })),
    thumbnails(all, asked), ...headInFull(asked, one), thumbnailsTable(all, ids));
  paintThumbnails(all);
  const canvas = at("pattern");
  drawPixels(canvas, pixelsOf(one.pixels), one.size, one.size);
}

function sorted(all) {
  const by = state.sort in all.heads[0] ? state.sort : "layer";
  const list = [...all.heads];
  return by === "layer" ? list : list.sort((a, b) => b[by] - a[by]);
}

function thumbnails(all, asked) {
  return make("div", { class: "heads", id: "heads", role: "group", "aria-label": "All heads" }, ...sorted(all).map((one) => {
    const score = state.sort === "layer" || !(state.sort in one) ? "" : one[state.sort].toFixed(2);
    const button = make("button", {
      type: "button", class: "head", "aria-label": `layer ${one.layer}, head ${one.head}${score ? ", " + SORTS[state.sort] + " " + score : ""}`,
      "aria-pressed": String(one.layer === asked.layer && one.head === asked.head), onclick: () => change({ layer: one.layer, head: one.head }),
    }, make("canvas", { "aria-hidden": "true" }), make("span", {}, `${one.layer}.${one.head}`), make("small", {}, score));
    return button;
  }));
}

function paintThumbnails(all) {
  const canvases = at("heads").querySelectorAll("canvas");
  sorted(all).forEach((one, i) => drawPixels(canvases[i], pixelsOf(one.pixels), all.size, all.size));
}

function thumbnailsTable(all, ids) {
  const kinds = ["first", "self", ...all.kinds];
  const rows = all.heads.map((one) => [`${one.layer}.${one.head}`, ...kinds.map((kind) => number(one[kind].toFixed(4), { ids, kind: "head", layer: one.layer, head: one.head, what: kind }, SORTS[kind]))]);
  return behind("All heads as a table", scroller("All heads", table("Mean attention weights of every head", ["head", ...kinds.map((kind) => SORTS[kind])], rows, { rowHeaders: true, numeric: [1, 2, 3, 4, 5] })));
}

function headInFull(asked, one) {
  const text = (i) => tokens[i]?.text ?? "";
  const row = one.row.slice(0, asked.query + 1);
  const top = row.map((w, i) => [w, i]).sort((a, b) => b[0] - a[0]);
  const strip = make("ol", { class: "strip", "aria-label": `Attention weights of token ${asked.query}` }, ...row.map((w, i) => {
    const page = i && i % model.page_size === 0 ? "page" : "";
    return make("li", { class: `${shade(w)} ${page}`, title: `${quoted(text(i))} (${i}): ${w.toFixed(4)}` }, visible(text(i)) || "∅");
  }));
  const cells = (list) => list.map(([w, i]) => [String(i), make("code", {}, quoted(text(i))),
    number(w.toFixed(4), { ids: asked.ids, kind: "attention", layer: asked.layer, head: asked.head, query: asked.query, key: i }, "weight")]);
  const heads = ["position", "key", "weight"], canvas = make("canvas", { id: "pattern", role: "img", "aria-label": `Weights of layer ${asked.layer}, head ${asked.head}; the table below holds those of token ${asked.query}` });
  const mark = make("i"), framed = make("div", { class: "pattern" }, canvas, mark);
  mark.style.top = 100 * asked.query / one.size + "%";
  mark.style.height = 100 / one.size + "%";
  canvas.addEventListener("click", (event) => {
    const y = event.offsetY / canvas.clientHeight;
    change({ at: Math.max(1, Math.floor(y * one.size)) });
  });
  const all = behind(`All ${row.length} weights of token ${asked.query} as a table`);
  all.addEventListener("toggle", () => {
    if (all.open && all.children.length === 1) all.append(scroller("Weights", table("Weights by position", heads, cells(row.map((w, i) => [w, i])), { numeric: [0, 2] })));
  });
  return [
    make("h3", {}, `Layer ${asked.layer}, head ${asked.head}: attention from token ${asked.query}, ${quoted(text(asked.query))}`),
    strip,
    make("p", { class: "hint" }, `The stronger the colour, the larger the weight; they sum to ${row.reduce((a, b) => a + b, 0).toFixed(4)}. The KV cache holds the ${row.length} keys in pages of ${model.page_size} tokens; a bar marks the first token of a page.`),
    make("div", { class: "pair" }, framed, scroller("Largest weights", table("Largest weights", heads, cells(top.slice(0, 10)), { numeric: [0, 2] }))),
    all,
  ];
}
