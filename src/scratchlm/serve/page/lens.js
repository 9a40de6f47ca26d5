// The logit lens, layers × positions, and attribution: bars that add up to the logit.
import { bar, make, percent, quoted, scroller, select, shade, signed, table, visible } from "./dom.js";
import { look } from "./api.js";
import { change, idsOf, state } from "./state.js";
import { number } from "./numbers.js";
import { tokens } from "./tokens.js";
import { choicesBody } from "./choices.js";
import { model } from "./write.js";

const WIDTH = 8; // positions beside each other

export function lensBody() {
  const ids = idsOf(), last = Math.max(0, ids.length - WIDTH);
  const start = Math.min(last, Math.max(0, state.at - 1 - WIDTH / 2));
  return { ids, start, stop: Math.min(ids.length, start + WIDTH), best: 3 };
}

export async function drawLens(box) {
  const asked = lensBody(), found = await look("lens", asked);
  const places = [...Array(found.stop - found.start).keys()].map((i) => i + found.start);
  const head = make("tr", {}, make("th", { scope: "col" }, "after"), ...places.map((i) =>
    make("th", { scope: "col", class: i === state.at - 1 ? "here" : "" }, make("small", {}, String(i)), " ", make("code", {}, visible(tokens[i]?.text ?? "").trimStart()))));
  const rows = [...found.layers].reverse().map(({ point, cells }) => make("tr", {}, make("th", { scope: "row" }, point === "embed" ? "embedding" : point.replace("layers.", "layer ").replace(".out", "")),
    ...cells.map((guesses, i) => {
      const [[token, text, p]] = guesses, layer = point === "embed" ? {} : { layer: Number(point.split(".")[1]) };
      const value = number(percent(p), { ids: asked.ids, kind: "lens", token, position: places[i], ...layer }, `${quoted(text)} at ${places[i]}`);
      const said = guesses.map(([, t, q]) => `${quoted(t)} ${percent(q)}`).join(", ");
      return make("td", { class: `${shade(p)} ${places[i] === state.at - 1 ? "here" : ""}`, title: said }, make("code", {}, visible(text).trimStart() || "∅"), make("small", {}, value));
    })));
  box.replaceChildren(
    make("p", {}, "The final norm and the LM head, applied to the residual stream after the embedding and after each layer. A column is a position and what is predicted to follow it; the top row is the model's output."),
    scroller("Logit lens", make("table", { class: "lens" }, make("caption", {}, make("span", {}, `Most likely next token after each layer, positions ${found.start} to ${found.stop - 1}`)), make("thead", {}, head), make("tbody", {}, ...rows))),
    make("p", { class: "hint" }, "The stronger the colour, the higher the probability. Framed: the position that predicts the selected token."));
  showColumn(box);
}

// A narrow screen shows a few columns at a time: that of the chosen token among them.
export function showColumn(box) {
  const region = box.querySelector(".scroller"), here = region?.querySelector(".here");
  if (here) region.scrollLeft = here.offsetLeft - (region.clientWidth - here.offsetWidth) / 2;
}

// Attribution

export async function attributionBody() {
  const choices = await look("choices", choicesBody());
  const token = choices.chosen ?? choices.rows[0].id;
  const against = state.against !== null && state.against !== token ? { against: state.against } : {};
  return [{ ids: idsOf().slice(0, state.at), token, ...against }, choices];
}

export async function drawAttribution(box) {
  if (!model.adds_up) {
    box.replaceChildren(make("p", {}, "In a post-norm model the residual stream is not a sum of the components' outputs, so no contributions add up to a logit."));
    return;
  }
  const [asked, choices] = await attributionBody();
  const found = await look("attribution", asked);
  const low = Math.min(0, ...found.parts.map(([, share]) => share)), high = Math.max(0, ...found.parts.map(([, share]) => share));
  const of = (kind, more = {}) => ({ ...asked, kind, ...more });
  const rows = found.parts.slice(0, 40).map(([part, share]) => [make("code", {}, part), number(signed(share, 4), of("share", { part }), "contribution"), bar(share, high - low || 1, { negative: share < 0, from: Math.min(share, 0) - low })]);
  const rest = found.parts.slice(40).reduce((sum, [, share]) => sum + share, 0);
  if (found.parts.length > 40) rows.push([`${found.parts.length - 40} more`, number(signed(rest, 4), of("shares", { start: 40 }), "contribution of the rest"), ""]);
  rows.push([make("strong", {}, "sum"), number(signed(found.sum, 4), of("shares"), "sum"), ""]);
  const lead = found.against ? ` minus that of ${quoted(found.against[1])}` : "";
  const options = [["", "nothing"], ...choices.rows.filter((row) => row.id !== asked.token).map((row) => [row.id, quoted(row.text)])];
  box.replaceChildren(
    make("p", {}, `The logit of ${quoted(found.token[1])}${lead} is `, number(found.logit.toFixed(4), of("logit"), "logit"), "; the contributions add up to it (rounding error ", number(found.error.toExponential(1), of("rounding"), "rounding"), `). These are direct contributions: the final norm's scale is held fixed, and effects through later layers are not included.`),
    select("minus the logit of", options, asked.against ?? "", (against) => change({ against: against === "" ? null : Number(against) })),
    scroller("Contributions", table(`Contribution of each component to the logit of token ${asked.ids.length}`, ["component", "contribution", "bar"], rows, { numeric: [1] })));
}
