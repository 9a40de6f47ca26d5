"use strict";
// Numbers as the command line prints them, digit for digit: halves are rounded to the even digit.

const commas = (digits) => digits.replace(/\B(?=(\d{3})+(?!\d))/g, ",");

// Round a string of digits to its first `keep`, as a BigInt.
function cut(digits, keep) {
  const kept = BigInt(digits.slice(0, keep) || "0");
  const rest = digits.slice(keep);
  const half = "5".padEnd(rest.length, "0");
  const up = rest > half || (rest === half && kept % 2n === 1n);
  return up ? kept + 1n : kept;
}

// Python's f"{x:,.{places}f}"
function fixed(x, places) {
  if (isWhole(x)) x = Number(x);
  if (Math.abs(x) >= 1e21) return commas(BigInt(x).toString()) + (places ? `.${"0".repeat(places)}` : "");
  const [whole, rest] = Math.abs(x).toFixed(places + 40).split(".");
  const digits = cut(whole + rest, whole.length + places).toString().padStart(places + 1, "0");
  const point = digits.length - places;
  const text = commas(digits.slice(0, point)) + (places ? `.${digits.slice(point)}` : "");
  return x < 0 ? `-${text}` : text;
}

// Python's f"{x:,.{figures}g}"
function general(x, figures) {
  x = Number(x);
  if (x === 0) return "0";
  const [mantissa, power] = Math.abs(x).toExponential(60).split("e");
  let digits = cut(mantissa.replace(".", ""), figures).toString();
  let exponent = Number(power);
  if (digits.length > figures) exponent += 1;
  digits = digits.slice(0, figures);
  const sign = x < 0 ? "-" : "";
  if (exponent < -4 || exponent >= figures) {
    const tail = digits.slice(1).replace(/0+$/, "");
    const size = String(Math.abs(exponent)).padStart(2, "0");
    return `${sign}${digits[0]}${tail ? `.${tail}` : ""}e${exponent < 0 ? "-" : "+"}${size}`;
  }
  if (exponent < 0) return `${sign}0.${"0".repeat(-exponent - 1)}${digits}`.replace(/0+$/, "");
  const tail = digits.slice(exponent + 1).replace(/0+$/, "");
  return sign + commas(digits.slice(0, exponent + 1)) + (tail ? `.${tail}` : "");
}

// A number inside a formula: 1,600 or 0.5 or 9.89e+14
function numberText(value) {
  if (isWhole(value)) return commas(value.toString());
  if (Number.isInteger(value) && Math.abs(value) < 1e12) return commas(value.toString());
  return general(value, 4).replaceAll(",", "");
}

// Whole numbers in full.
const exact = (value) => (isWhole(value) ? commas(value.toString()) : general(value, 4));

const percent = (share) => `${fixed(share * 100, 1)}%`;

function scaled(value, base, units) {
  let size = Number(value);
  let power = 0;
  while (Math.abs(size) >= base && power < units.length - 1) {
    size /= base;
    power += 1;
  }
  const whole = Math.abs(size) >= 100 || Number.isInteger(size);
  return `${whole ? fixed(size, 0) : general(size, 3)} ${units[power]}`.trimEnd();
}

const human = (value) => scaled(value, 1000, ["", "k", "M", "G", "T", "P", "E", "Z", "Y"]);
const bytesText = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);

function secondsText(value) {
  const scales = [
    [1e-3, 1e6, "µs"], [1, 1e3, "ms"], [120, 1, "s"], [7200, 1 / 60, "min"], [172800, 1 / 3600, "h"],
  ];
  for (const [limit, scale, unit] of scales) {
    if (value < limit) return `${general(value * scale, 3).replaceAll(",", "")} ${unit}`;
  }
  return `${fixed(value / 86400, 1)} days`;
}
