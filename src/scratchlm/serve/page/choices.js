// One token's alternatives: rank and probability before and after the filters, and which filter removed which.
import { bar, make, percent, quoted, scroller, signed, table } from "./dom.js";
import { look, offline } from "./api.js";
import { givenAt, idsOf, state } from "./state.js";
import { number } from "./numbers.js";
import { branchFrom, sampling } from "./write.js";

export const FILTER_NAMES = { top_k: "top-k", top_p: "top-p", min_p: "min-p", typical: "typical", logit_bias: "bias", "temperature 0": "temperature 0" };

export const choicesBody = () => ({
  ids: idsOf(), at: state.at, num_prompt: givenAt(state.at), seed: state.settings.seed, sampling: sampling(), best: 12,
});

export async function drawChoices(box) {
  const asked = choicesBody();
  const found = await look("choices", asked);
  const context = asked.ids.slice(0, asked.at);
  const settings = { sampling: asked.sampling, num_prompt: asked.num_prompt };
  const rows = found.rows.map((row) => {
    const of = (kind, more = {}) => ({ ids: context, kind, token: row.id, ...more });
    const chosen = row.id === found.chosen;
    const go = make("button", { type: "button", class: "go", disabled: offline || chosen, "aria-label": `Continue with ${quoted(row.text)}`, onclick: () => branchFrom(asked.at, row) }, chosen ? "chosen" : "continue");
    return [
      make("code", {}, quoted(row.text)),
      [number(percent(row.probability), of("probability"), "probability before"), bar(row.probability, 1, { wide: false })],
      row.removed_by ? make("span", { class: "removed" }, "removed by " + (FILTER_NAMES[row.removed_by] ?? row.removed_by)) : [number(percent(row.after), of("filtered", settings), "probability after"), bar(row.after, 1, { wide: false })],
      go,
      number(String(row.rank), of("rank"), "rank"),
      row.rank_after === null ? "–" : number(String(row.rank_after), of("rank", settings), "rank after"),
      number(row.logit.toFixed(3), of("logit"), "logit"),
      row.shift === null ? "−∞" : row.shift ? number(signed(row.shift), of("shift", settings), "penalties") : "",
    ];
  });
  const made = table(`Candidates for token ${asked.at}`, ["token", "before filters", "after filters", "branch", "rank", "rank after", "logit", "penalties"], rows, { numeric: [4, 5, 6, 7], className: "choices" });
  [...made.tBodies[0].rows].forEach((tr, i) => { if (found.rows[i].id === found.chosen) tr.className = "chosen"; });
  box.replaceChildren(summary(found, context, { ...settings, seed: asked.seed }), scroller("Candidates", made));
}

function summary(found, ids, { seed, ...settings }) {
  const removed = Object.entries(found.removed).map(([name, count]) => `${FILTER_NAMES[name] ?? name} removed ${count}`);
  const left = `${found.left} of ${found.vocabulary} tokens remain after the filters` + (removed.length ? `: ${removed.join(", ")}.` : ".");
  const draw = found.draw ? [" The draw for this seed and step is ", number(found.draw.number.toFixed(4), { ids, kind: "draw", seed, ...settings }, "draw"), `, which selects ${quoted(found.draw.text)}.`] : [];
  return make("p", {}, left, " Entropy ", number(found.entropy.toFixed(3), { ids, kind: "entropy" }, "entropy before"),
    " bits before, ", number(found.entropy_after.toFixed(3), { ids, kind: "entropy", ...settings }, "entropy after"), " after.", ...draw);
}
