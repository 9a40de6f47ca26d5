// Elements, tables and numbers. Text only ever becomes text: nothing here parses HTML.
export const at = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const percent = (p) =>
  p >= 0.9995 && p < 1 ? "> 99.9 %" : p > 0 && p < 0.00005 ? "< 0.01 %" : (100 * p).toFixed(p < 0.1 ? 2 : 1) + " %";
export const quoted = (text) => JSON.stringify(text);
export function signed(x, digits = 3) {
  const size = Math.abs(x).toFixed(digits);
  return (Number(size) === 0 ? "" : x < 0 ? "−" : "+") + size;
}
// A token on one line: line ends, control characters and a lone space are made visible.
export const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +$/, (s) => "␣".repeat(s.length))
  .replace(/[\0-\x1f\x7f]/g, (c) => byteName(c.charCodeAt(0).toString(16)));
const byteName = (hex) => `<0x${hex.padStart(2, "0").toUpperCase()}>`;
// As the API names a token that is no whole characters; the views name its bytes as llama.cpp does.
export const named = (text) => (text.startsWith("bytes:\\x") ? text.slice(6).replace(/\\x(..)/g, (_, hex) => byteName(hex)) : text);

export function amount(x, unit) {
  const steps = ["", "k", "M", "G", "T", "P"];
  let i = 0;
  while (Math.abs(x) >= 1000 && i < steps.length - 1) [x, i] = [x / 1000, i + 1];
  return `${i ? x.toPrecision(3) : Math.round(x * 100) / 100} ${steps[i]}${unit}`;
}

export function duration(seconds) {
  if (seconds >= 1) return seconds.toFixed(2) + " s";
  if (seconds >= 1e-3) return (seconds * 1e3).toPrecision(3) + " ms";
  return seconds >= 1e-6 ? (seconds * 1e6).toPrecision(3) + " µs" : (seconds * 1e9).toPrecision(3) + " ns";
}

// rows: lists of texts or elements; the first of a row is its header where `rowHeaders` is set
export function table(caption, heads, rows, { rowHeaders = false, numeric = [], className = "" } = {}) {
  const cell = (tag, content, i, more = {}) =>
    make(tag, { ...more, class: numeric.includes(i) ? "number" : "" }, ...(Array.isArray(content) ? content : [content]));
  return make("table", { class: className },
    make("caption", {}, make("span", {}, caption)),
    make("thead", {}, make("tr", {}, ...heads.map((head, i) => cell("th", head, i, { scope: "col" })))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((content, i) =>
      rowHeaders && i === 0 ? cell("th", content, i, { scope: "row" }) : cell("td", content, i))))));
}

// A region that scrolls sideways must be reachable by keyboard.
export const scroller = (label, ...children) =>
  make("div", { class: "scroller", role: "region", "aria-label": label, tabindex: "0" }, ...children);

export const behind = (summary, ...children) =>
  make("details", { class: "behind" }, make("summary", {}, summary), ...children);

export function bar(value, scale, { negative = false, from = 0, wide = true } = {}) {
  const fill = make("i", { class: negative ? "less" : "" });
  fill.style.left = 100 * Math.max(0, Math.min(1, from / scale)) + "%";
  fill.style.width = 100 * Math.max(0, Math.min(1, Math.abs(value) / scale)) + "%";
  return make("span", { class: wide ? "bar wide" : "bar", "aria-hidden": "true" }, fill);
}

export function select(label, options, value, changed) {
  const made = make("select", { onchange: () => changed(made.value) },
    ...options.map(([key, text]) => make("option", { value: String(key) }, text)));
  made.value = String(value);
  return make("label", {}, label + " ", made);
}

// Shades of the accent colour in 12 steps, set by class: the sheet knows them in light and dark.
export const shade = (x) => "shade-" + Math.max(0, Math.min(11, Math.floor(12 * x)));

export function pixelsOf(base64) {
  const text = atob(base64), found = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) found[i] = text.charCodeAt(i);
  return found;
}

export function drawPixels(canvas, bytes, width, height) {
  canvas.width = width;
  canvas.height = height;
  const style = getComputedStyle(document.documentElement);
  const [low, high] = ["--sheet-rgb", "--mark-rgb"].map((name) => style.getPropertyValue(name).split(",").map(Number));
  const image = new ImageData(width, height), words = new Uint32Array(image.data.buffer);
  const colours = new Uint8ClampedArray(4 * 256).map((_, i) => {
    const x = Math.sqrt((i >> 2) / 255); // small weights are to be seen
    return i % 4 === 3 ? 255 : low[i % 4] + (high[i % 4] - low[i % 4]) * x;
  });
  const table256 = new Uint32Array(colours.buffer);
  for (let i = 0; i < words.length; i++) words[i] = table256[bytes[i]];
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// Draw a part of the page anew; what had the focus has it again, or else the whole part.
export async function keepingFocus(box, draw) {
  const path = [];
  for (let node = document.activeElement; node && node !== box; node = node.parentElement) path.unshift([...node.parentElement?.children ?? []].indexOf(node));
  const isInside = box.contains(document.activeElement) && document.activeElement !== box;
  await draw();
  if (!isInside || document.activeElement !== document.body) return;
  path.reduce((node, i) => node?.children[i], box)?.focus();
  if (document.activeElement === document.body) box.focus();
}

let saying = null;
// Say something to those who do not see it; pieces that come fast are joined.
export function announce(text) {
  const live = at("live");
  if (!live) return;
  if (saying) { saying.text = text; return; }
  saying = { text };
  setTimeout(() => { live.textContent = saying.text; saying = null; }, 400);
}

export function fail(error) {
  const box = at("problem");
  box.textContent = error ? String(error.message || error) : "";
  box.hidden = !error;
}
