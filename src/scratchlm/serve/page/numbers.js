// A number that can be asked where it comes from: its formula, the values, and the line of code.
import { at, fail, make } from "./dom.js";
import { look } from "./api.js";

const DEFINITION = "ops/reference.py";

// `asked` is the body of /look/number, or a function that returns it; the number shown is the text.
export function number(text, asked, label) {
  return make("button", {
    type: "button", class: "asked", "aria-haspopup": "dialog", "aria-label": label ? `${label}: ${text}, how computed` : `${text}, how computed`,
    onclick: () => explain(typeof asked === "function" ? asked() : asked),
  }, text);
}

export async function explain(asked) {
  let found;
  try {
    found = await look("number", asked);
  } catch (error) {
    fail(error);
    return;
  }
  const box = at("formula"), { source } = found;
  at("formula-name").textContent = found.name;
  const parts = found.parts.map(([name, value, more]) => make("tr", {},
    make("th", { scope: "row" }, name),
    make("td", { class: "number" }, more ? number(short(value), { ids: asked.ids, edits: asked.edits, ...more }, name) : short(value))));
  at("formula-body").replaceChildren(
    make("p", { class: "math" }, found.formula),
    make("p", { class: "math" }, "= " + found.numbers),
    make("p", { class: "math result" }, "= " + found.value),
    parts.length ? make("table", {}, make("caption", {}, "Values"), make("tbody", {}, ...parts)) : "",
    make("p", {}, "Computed by ", make("code", {}, `${source.file}:${source.line}`), source.file === DEFINITION ? ", the definition; fast implementations are tested equal to it:" : ":"),
    make("pre", { tabindex: "0", "aria-label": "The code" }, ...source.code.map((line, i) =>
      make(source.first + i === source.line ? "mark" : "span", {}, `${String(source.first + i).padStart(4)}  ${line}\n`))));
  if (!box.open) box.showModal();
}

const short = (x) => String(Number(x.toPrecision(9)));
