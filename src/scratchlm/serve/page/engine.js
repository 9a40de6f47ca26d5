// What a token cost, where experts sent it, and what the engine's cache holds.
import { amount, behind, duration, keepingFocus, make, percent, quoted, scroller, select, shade, table, visible } from "./dom.js";
import { look, offline } from "./api.js";
import { change, givenAt, idsOf, state } from "./state.js";
import { number } from "./numbers.js";
import { showColumn } from "./lens.js";
import { times, tokens } from "./tokens.js";
import { model } from "./write.js";

export const costBody = () => ({ at: Math.max(1, state.at), num_prompt: givenAt(state.at), machine: state.machine });

export async function drawCost(box) {
  const asked = costBody(), found = await look("cost", asked);
  const how = found.phase === "prefill" ? `predicted by a prefill of the ${found.prompt} tokens before it` : `predicted by one decode step over the token before it, with ${found.cache} tokens in the KV cache`;
  const ids = idsOf().slice(0, asked.at), { num_prompt, machine } = asked;
  const of = (what, part) => ({ ids, kind: "cost", num_prompt, machine, what, ...(part ? { part } : {}) });
  const took = times.get(`${state.branch}.${state.at}`);
  const lines = found.lines.map((line) => [make("span", { class: "depth-" + Math.min(4, line.depth) }, line.name), make("code", { class: "wraps" }, line.symbols), make("code", { class: "wraps" }, line.numbers), number(String(line.value), of("line", line.name), line.name)]);
  const parts = found.parts.map((part) => [part.name, number(amount(part.flops, "FLOP"), of("flops", part.name), "compute"), number(amount(part.bytes, "B"), of("bytes", part.name), "memory"),
    number(duration(part.seconds), of("seconds", part.name), "time"), part.bound]);
  box.replaceChildren(
    make("p", {}, `Token ${asked.at}: ${how}.`),
    make("dl", { class: "figures" },
      ...figure("compute", number(amount(found.flops, "FLOP"), of("line"), "compute")), ...figure("memory traffic", number(amount(found.bytes, "B"), of("bytes"), "memory traffic")),
      ...figure(`roofline time on ${found.machine}`, number(duration(found.seconds), of("seconds"), "time")), ...figure("measured here", took === undefined ? "not measured" : duration(took))),
    select("machine", found.machines.map((name) => [name, name]), state.machine, (machine) => change({ machine })),
    scroller("By component", table(`Roofline by component, ${found.precision}: the slower of compute and memory bounds each`, ["component", "compute", "memory", "time", "bound by"], parts, { numeric: [1, 2, 3] })),
    behind("FLOPs term by term, with formulas", scroller("Formulas", table("FLOPs of this step", ["term", "formula", "with the sizes in", "FLOP"], lines, { numeric: [3] }))));
}

const figure = (name, value) => [make("div", {}, make("dt", {}, name), make("dd", {}, value))];

export async function drawExperts(box) {
  const ids = idsOf(), found = await look("experts", { ids });
  if (!found.layers.length) {
    box.replaceChildren(make("p", {}, "This model has no experts: every token goes through the same feed-forward layers."));
    return;
  }
  const places = ids.map((_, i) => i).slice(Math.max(0, state.at - 3), Math.max(0, state.at - 3) + 10);
  const head = make("tr", {}, make("th", { scope: "col" }, "layer"), ...places.map((i) => make("th", { scope: "col", class: i === state.at ? "here" : "" }, make("small", {}, String(i)), " ", make("code", {}, visible(tokens[i]?.text ?? "")))));
  const rows = found.layers.map((layer) => make("tr", {}, make("th", { scope: "row" }, String(layer.layer)), ...places.map((i) =>
    make("td", { class: i === state.at ? "here" : "" }, ...layer.experts[i].map((expert, j) => make("div", {}, `${expert}: `, number(percent(layer.weights[i][j]), { ids, kind: "expert", layer: layer.layer, position: i, chosen: j }, `weight of expert ${expert}`)))))));
  const loads = found.layers[0].load.map((_, expert) => make("tr", {}, make("th", { scope: "row" }, String(expert)), ...found.layers.map(({ layer, load }) =>
    make("td", { class: `number ${shade(load[expert])}` }, number(percent(load[expert]), { ids, kind: "load", layer, chosen: expert }, `load of expert ${expert} in layer ${layer}`)))));
  const layers = make("tr", {}, make("th", { scope: "col" }, "expert"), ...found.layers.map(({ layer }) => make("th", { scope: "col" }, `layer ${layer}`)));
  box.replaceChildren(
    make("p", {}, "The router sends each token to its top experts in every layer; the layer's output is the sum of theirs, with these weights."),
    scroller("Experts", make("table", { class: "lens" }, make("caption", {}, make("span", {}, "Experts of each token, with their routing weights")), make("thead", {}, head), make("tbody", {}, ...rows))),
    scroller("Load", make("table", { class: "lens" }, make("caption", {}, make("span", {}, "Load: the fraction of a layer's routing choices in this text")), make("thead", {}, layers), make("tbody", {}, ...loads))));
  showColumn(box);
}

export async function drawCache(box) {
  const ids = idsOf(), found = await look("cache", { ids }, { fresh: !offline });
  const shared = new Set(found.shared.pages);
  const kindOf = ([holders, kept], i) => (shared.has(i) ? "shared" : holders > 1 ? "many" : holders ? "held" : kept ? "kept" : "free");
  const names = { shared: "holds a prefix of this text", many: "in use by several requests", held: "in use by one request", kept: "free, content still cached", free: "free" };
  const cells = found.pages.map((page, i) => make("i", { class: "page-" + kindOf(page, i), title: `page ${i}: ${names[kindOf(page, i)]}` }));
  const rows = Object.entries(names).map(([kind, name]) => [make("i", { class: "swatch page-" + kind, "aria-hidden": "true" }), name, String(found.counts[kind])]);
  const shown = found.pages.length < found.num_pages ? `The first ${found.pages.length} pages` : "All pages";
  box.replaceChildren(
    make("p", {}, found.shared.tokens
      ? `The first ${found.shared.tokens} tokens of this text are in the KV cache (pages ${found.shared.pages.join(", ")}): a request with this prefix does not compute them again.`
      : `No full page of this text is in the KV cache: a page holds ${found.page_size} tokens, and only full pages of prompts are shared.`),
    make("dl", { class: "figures counts" }, ...figure("pages", `${found.num_held} of ${found.num_pages} in use`), ...figure("page size", `${found.page_size} tokens, ${amount(found.bytes_per_page, "B")}`),
      ...figure("prefix cache hits", `${found.tokens_found} tokens`), ...figure("requests", `${found.running.length} running, ${found.waiting} waiting`)),
    make("div", { class: "pages", role: "img", "aria-label": `${shown}; the table below counts all`, tabindex: "0" }, ...cells),
    scroller("Pages by state", table("Pages by state", ["mark", "state", "pages"], rows, { numeric: [2] })),
    make("button", { type: "button", disabled: offline, onclick: () => keepingFocus(box, () => drawCache(box)) }, "Refresh"),
    behind("Running requests", scroller("Running requests", table("Running requests", ["tokens", "pages"], found.running.map((one) => [String(one.length), one.pages.join(", ")]), { numeric: [0] }))));
}
