// Taking it along: a link, one file that works offline, and the view as Python.
import { at, fail, make } from "./dom.js";
import { answers, look, template } from "./api.js";
import { address, idsOf, state } from "./state.js";
import { asPython } from "./python.js";
import { choicesBody } from "./choices.js";
import { attentionBody } from "./attention.js";
import { attributionBody, lensBody } from "./lens.js";
import { ablateBody, patchBody } from "./edits.js";
import { costBody } from "./engine.js";
import { model } from "./write.js";

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return "Copied.";
  } catch {
    return "Select the text and copy it: the browser does not let the page.";
  }
}

function show(title, text, said = "") {
  at("share-name").textContent = title;
  const status = make("p", { role: "status" }, said);
  const area = make("textarea", { readonly: "", rows: String(Math.min(24, text.split("\n").length + 1)), "aria-label": title, class: "code", spellcheck: "false" });
  area.value = text;
  at("share-body").replaceChildren(area, make("button", { type: "button", onclick: async () => { status.textContent = await copy(text); } }, "Copy"), status);
  if (!at("share").open) at("share").showModal();
}

export async function showPython() {
  try {
    show("This view as Python", await asPython());
  } catch (error) {
    fail(error);
  }
}

export const showLink = () => show("A link to this view", location.href.split("#")[0] + "#" + address());

// Ask for every view of the chosen token, so that the file holds them all.
async function fillAnswers() {
  const ids = idsOf();
  const asked = [["model", {}], ["read", { ids }]];
  if (ids.length) {
    asked.push(["choices", choicesBody()], ["heads", { ids }], ["attention", attentionBody()], ["lens", lensBody()],
      ["ablate", ablateBody()], ["cost", costBody()], ["experts", { ids }], ["cache", { ids }]);
    for (let layer = 0; layer < model.layers && model.layers * model.heads * ids.length ** 2 < 1e6; layer++) {
      for (let head = 0; head < model.heads; head++) asked.push(["attention", { ...attentionBody(), layer, head }]);
    }
    if (model.adds_up) asked.push(["attribution", (await attributionBody())[0]]);
    if (state.other) asked.push(["patch", await patchBody().then(([body]) => body, () => null)]);
  }
  for (const [name, body] of asked) if (body) await look(name, body);
}

export async function exportFile() {
  try {
    await fillAnswers();
    const kept = { address: address(), answers: [...answers] };
    const text = JSON.stringify(kept).replaceAll("<", "\\u003c");
    const page = (await template()).split("<!-- answers" + " -->").join(text);
    const link = make("a", { href: URL.createObjectURL(new Blob([page], { type: "text/html" })), download: model.name.replace(/[^\w.-]+/g, "-") + ".html" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    return page;
  } catch (error) {
    fail(error);
    return "";
  }
}
