// Draws a report: the lens as a table, a head's weights as pixels, shares as bars.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const percent = (p) => (100 * p).toFixed(p < 0.1 ? 2 : 1) + " %";
const quoted = (text) => JSON.stringify(text);

function cell(row, text, kind = "td") {
  const made = document.createElement(kind);
  made.textContent = text;
  row.append(made);
  return made;
}

function bar(row, from, to, scale, less = false) {
  const box = cell(row, "");
  const holder = document.createElement("div"), fill = document.createElement("i");
  holder.className = "bar";
  fill.className = less ? "less" : "";
  fill.style.left = 100 * Math.min(from, to) / scale + "%";
  fill.style.width = 100 * Math.abs(to - from) / scale + "%";
  holder.append(fill);
  box.append(holder);
}

function drawNext() {
  at("name").textContent = data.name;
  at("prompt").textContent = data.tokens.join("");
  at("ablated").textContent = data.ablated.length
    ? "Without " + data.ablated.join(", ") + ", which were set to 0. Everything below is of that run." : "";
  if (data.ablated.length) {
    const head = at("next").insertRow();
    for (const title of ["token", "before", "after", ""]) cell(head, title, "th");
    for (const [text, before, after] of data.changes) {
      const row = at("next").insertRow();
      cell(row, quoted(text));
      cell(row, percent(before)).className = "number";
      cell(row, percent(after)).className = "number";
      bar(row, 0, after, 1, after < before);
    }
    return;
  }
  for (const [text, p] of data.next) {
    const row = at("next").insertRow();
    cell(row, quoted(text));
    cell(row, percent(p)).className = "number";
    bar(row, 0, p, 1);
  }
}

function drawLens() {
  const head = at("lens").insertRow();
  cell(head, "", "th");
  for (const token of data.tokens) cell(head, token.replace(/\n/g, "⏎"), "th");
  for (const { point, best } of data.lens) {
    const row = at("lens").insertRow();
    cell(row, point, "th");
    for (const guesses of best) {
      const [text, p] = guesses[0];
      const made = cell(row, text.replace(/\n/g, "⏎"));
      made.style.background = `rgba(var(--mark), ${0.85 * p})`;
      made.title = guesses.map(([t, q]) => `${quoted(t)} ${percent(q)}`).join("\n");
    }
  }
}

let pattern = null, margin = 0; // the margin holds the tokens that look
function drawPattern() {
  const heads = data.weights[at("layer").value], n = data.tokens.length;
  pattern = Uint8Array.from(atob(heads[+at("head").value]), (c) => c.charCodeAt(0));
  const canvas = at("pattern"), size = Math.max(2, Math.min(24, Math.floor(640 / n)));
  margin = size >= 12 ? 110 : 0;
  canvas.width = margin + n * size;
  canvas.height = n * size;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.body);
  const mark = style.getPropertyValue("--mark");
  pen.fillStyle = style.getPropertyValue("--ink");
  pen.font = "12px ui-monospace, Menlo, Consolas, monospace";
  pen.textBaseline = "middle";
  if (margin) data.tokens.forEach((token, i) => pen.fillText(quoted(token).slice(0, 14), 4, (i + 0.5) * size));
  for (let i = 0; i < n * n; i++) {
    pen.fillStyle = `rgba(${mark}, ${pattern[i] / 255})`;
    pen.fillRect(margin + (i % n) * size, Math.floor(i / n) * size, size, size);
  }
}

function point(event) {
  const n = data.tokens.length, box = at("pattern").getBoundingClientRect();
  const x = (event.clientX - box.left) / box.width * at("pattern").width - margin;
  const key = Math.max(0, Math.min(n - 1, Math.floor(x / (at("pattern").width - margin) * n)));
  const query = Math.min(n - 1, Math.floor((event.clientY - box.top) / box.height * n));
  const weight = (pattern[query * n + key] / 255).toFixed(2);
  at("pointed").textContent =
    `${quoted(data.tokens[query])} (${query}) looks at ${quoted(data.tokens[key])} (${key}): ${weight}`;
}

function drawAttention() {
  const layers = Object.keys(data.weights);
  at("attention").hidden = !layers.length;
  if (!layers.length) return;
  for (const layer of layers) at("layer").append(new Option(layer, layer));
  data.weights[layers[0]].forEach((_, head) => at("head").append(new Option(head, head)));
  at("layer").value = data.opened[0];
  at("head").value = data.opened[1];
  at("layer").addEventListener("change", drawPattern);
  at("head").addEventListener("change", drawPattern);
  at("pattern").addEventListener("mousemove", point);
  drawPattern();
}

function drawShares() {
  const found = data.attribution;
  at("parts").hidden = !found;
  if (!found) return;
  const lead = found.against === null ? "" : ", against " + quoted(found.against);
  at("whose").textContent = `Who wrote the logit of ${quoted(found.token)}${lead}`;
  at("sum").textContent = `Shares add up to the logit, ${found.logit.toFixed(4)} ` +
    `(rounding: ${found.error.toExponential(1)}). The final norm's scale is held fixed, and what a ` +
    "part does through later layers is not in its share.";
  const low = Math.min(0, ...found.parts.map(([, share]) => share));
  const high = Math.max(0, ...found.parts.map(([, share]) => share));
  for (const [part, share] of found.parts.slice(0, 40)) {
    const row = at("shares").insertRow();
    cell(row, part);
    cell(row, (share >= 0 ? "+" : "−") + Math.abs(share).toFixed(4)).className = "number";
    bar(row, -low, share - low, high - low || 1, share < 0);
  }
  const rest = found.parts.slice(40).reduce((sum, [, share]) => sum + share, 0);
  if (found.parts.length > 40) {
    const row = at("shares").insertRow();
    cell(row, `${found.parts.length - 40} more`);
    cell(row, (rest >= 0 ? "+" : "−") + Math.abs(rest).toFixed(4)).className = "number";
    bar(row, -low, rest - low, high - low || 1, rest < 0);
  }
}

drawNext();
drawLens();
drawAttention();
drawShares();
