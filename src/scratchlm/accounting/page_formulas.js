"use strict";
// The account's formulas, evaluated. Whole numbers are BigInt and exact at any size; everything
// else is a float, divided and rounded as Python does it, so that the numbers are the same.

const DATA = JSON.parse(document.getElementById("data").textContent);

const isWhole = (value) => typeof value === "bigint";

// A number of the data: whole ones are BigInt, {float: x} is a float.
function read(value) {
  if (value === null || value === undefined) return null;
  return typeof value === "object" ? value.float : BigInt(value);
}

const bits = (n) => n.toString(2).length;

// a / b as the nearest float, also where a or b exceed 2^53.
function quotient(a, b) {
  if (!isWhole(a) || !isWhole(b)) return Number(a) / Number(b);
  if (a === 0n) return 0;
  const sign = a < 0n === b < 0n ? 1 : -1;
  const top = a < 0n ? -a : a;
  const bottom = b < 0n ? -b : b;
  const shift = BigInt(Math.max(0, 66 + bits(bottom) - bits(top)));
  let result = (top << shift) / bottom;
  if (result * bottom !== top << shift) result |= 1n; // keep what lies below the last bit in view
  return (sign * Number(result)) / 2 ** Number(shift);
}

function add(a, b) {
  return isWhole(a) && isWhole(b) ? a + b : Number(a) + Number(b);
}

function multiply(a, b) {
  return isWhole(a) && isWhole(b) ? a * b : Number(a) * Number(b);
}

function divide(a, b) {
  return isWhole(a) && isWhole(b) && a % b === 0n ? a / b : quotient(a, b);
}

function ceilDivide(a, b) {
  const cut = a / b; // towards zero
  return a % b !== 0n && a > 0n === b > 0n ? cut + 1n : cut;
}

const OPERATORS = {
  "+": (args) => args.reduce(add, 0n),
  "-": ([a, b]) => (isWhole(a) && isWhole(b) ? a - b : Number(a) - Number(b)),
  "*": (args) => args.reduce(multiply, 1n),
  "/": ([a, b]) => divide(a, b),
  "^": ([a, b]) => (isWhole(a) ? a ** b : a ** Number(b)),
  min: (args) => args.reduce((a, b) => (b < a ? b : a)),
  max: (args) => args.reduce((a, b) => (b > a ? b : a)),
  ceildiv: ([a, b]) => ceilDivide(a, b),
};

function compute(tree, env) {
  if (typeof tree === "number") return BigInt(tree);
  if (typeof tree === "string") {
    if (!(tree in env)) throw new Error(`no number for ${tree}`);
    return env[tree];
  }
  return OPERATORS[tree[0]](tree.slice(1).map((part) => compute(part, env)));
}

const valueOf = (formula, env) => compute(DATA.formulas[formula][0], env);

const symbolsOf = (formula) =>
  DATA.formulas[formula][1].replaceAll("*", "·").replace(/\{(\w+)\}/g, "$1");

const numbersOf = (formula, env) =>
  DATA.formulas[formula][1]
    .replaceAll("*", " × ")
    .replace(/\{(\w+)\}/g, (_, name) => numberText(env[name]));

// Bind names to formulas in order; later ones may use earlier ones.
function bind(named, env) {
  const bound = { ...env };
  for (const [name, formula] of named) bound[name] = valueOf(formula, bound);
  return bound;
}

// A tree of formulas becomes a tree of items: name, formula, the same with numbers, value, share.
function nodeOf(index, choices) {
  const node = DATA.nodes[index];
  return node.optimizer ? DATA.nodes[node.optimizer[choices.optimizer]] : node;
}

function evaluate(index, env, choices, whole = null, unit = "") {
  const node = nodeOf(index, choices);
  unit = node.unit ?? unit;
  env = bind(node.where ?? [], env);
  const times = node.times === undefined ? 1n : valueOf(node.times, env);
  const value = nodeValue(index, env, choices);
  const one = times ? quotient(value, times) : 0;
  const children = (node.parts ?? []).map((part) => evaluate(part, env, choices, one, unit));
  const share = whole === null ? 1 : whole ? Number(value) / whole : 0;
  const note = [node.note, ...(node.where ?? []).map(([name, formula]) =>
    `${name} = ${symbolsOf(formula)} = ${numberText(env[name])}`)].filter(Boolean).join("; ");
  return { name: node.name, unit, times, value, share, children, note, ...words(node, children, env) };
}

function nodeValue(index, env, choices) {
  const node = nodeOf(index, choices);
  env = bind(node.where ?? [], env);
  const once = node.formula === undefined
    ? (node.parts ?? []).map((part) => nodeValue(part, env, choices)).reduce(add, 0n)
    : valueOf(node.formula, env);
  return node.times === undefined ? once : multiply(valueOf(node.times, env), once);
}

function words(node, children, env) {
  if (node.shown !== undefined) {
    return { symbols: symbolsOf(node.shown), numbers: numbersOf(node.shown, env) };
  }
  const names = children.map((child) => child.name).join(" + ") || "0";
  const values = children.map((child) => numberText(child.value)).join(" + ") || "0";
  if (node.times === undefined) return { symbols: names, numbers: values };
  return {
    symbols: `${symbolsOf(node.times)}·(${names})`,
    numbers: `${numbersOf(node.times, env)} × (${values})`,
  };
}

// The whole account. `sizes` binds the symbols one can set, `choices` holds everything else.
function account(sizes, choices) {
  const variant = variantOf(choices);
  const machine = DATA.machines[choices.gpu];
  const env = environment(sizes, choices);
  const full = bind(variant.derived, env);
  const result = {
    env: full,
    parameters: evaluate(variant.parameters, env, choices),
    counts: Object.fromEntries(variant.counts.map(([name, f]) => [name, valueOf(f, env)])),
    flops: flopsOf(choices.phase, env, choices),
    forward: flopsOf("forward", env, choices),
    training: flopsOf("training", env, choices),
    memory: memoryOf(env, choices),
    time: rooflineOf(choices.phase, full, choices),
    stepTime: rooflineOf("training", full, choices),
    machine,
    peak: machine.peak_names[choices.dtype],
  };
  result.run = runOf(env, choices);
  result.projection = projectionOf(env, choices);
  result.plans = plansOf(sizes, choices);
  return result;
}

const variantOf = (choices) =>
  DATA.variants[`${choices.ffn}/${choices.tie_embeddings ? "tied" : "untied"}`];

// Every symbol of the model, the work and the machines.
function environment(sizes, choices) {
  const machine = DATA.machines[choices.gpu];
  const env = { ...sizes };
  for (const [name, bytes] of Object.entries(DATA.precisions[choices.dtype])) env[name] = BigInt(bytes);
  env.G_d = env.G / env.G_t;
  env.R = shardsOf(env, choices);
  env.G_c = env.G_d / env.R;
  env.S_r = valueOf(DATA.sequence_share, env);
  env.N = valueOf(variantOf(choices).N, env);
  env.F_peak = read(machine.peaks[choices.dtype]);
  env.M_bw = read(machine.bandwidth);
  return env;
}

// How data-parallel ranks share the state.
function exchangeOf(env, choices) {
  if (choices.parallel === "hsdp" && shardsOf(env, choices) === env.G_d) return "fsdp"; // one node
  const alone = choices.parallel === "zero1" && env.G_d === 1n;
  return alone || choices.parallel === "tp" ? "none" : choices.parallel;
}

// Ranks that the state is split over: with hsdp those of one node, in nodes alike.
function shardsOf(env, choices) {
  if (choices.parallel === "hsdp") {
    const inside = BigInt(DATA.projection.node) / env.G_t || 1n;
    return env.G_d <= inside ? env.G_d : gcd(env.G_d, inside);
  }
  return ["zero1", "fsdp"].includes(exchangeOf(env, choices)) ? env.G_d : 1n;
}

const gcd = (a, b) => (b === 0n ? a : gcd(b, a % b));

// The symbols of one rank: its share of what tensor parallelism divides.
function rankOf(env, choices) {
  return bind(variantOf(choices).derived, { ...env, ...pick(DATA.rank_share, env) });
}

const executionKey = (c) => `${c.attention}/${c.loss}/${c.checkpointing}`;

function flopsOf(phase, env, choices) {
  const items = {};
  for (const convention of ["full", "causal", "6ND", "hardware"]) {
    const how = convention === "hardware" ? `/${executionKey(choices)}` : "";
    items[convention] = evaluate(DATA.flops[`${choices.ffn}/${phase}/${convention}${how}`], env, choices);
  }
  return items;
}

// What one GPU holds at each moment of a training step, and the largest of them.
function momentsOf(rank, choices) {
  const often = choices.accumulate || rank.m > 1n ? "accumulate" : "once";
  const key = `${choices.ffn}/${executionKey(choices)}/${often}/${exchangeOf(rank, choices)}`;
  const trees = DATA.memory[key];
  const moments = Object.fromEntries(Object.entries(trees).map(([name, tree]) =>
    [name, roundEven(nodeValue(tree, rank, choices))]));
  const peak = Object.keys(moments).reduce((a, b) => (moments[b] > moments[a] ? b : a));
  return { trees, moments, peak };
}

function memoryOf(env, choices) {
  const rank = rankOf(env, choices);
  const { trees, moments, peak } = momentsOf(rank, choices);
  const shards = ["fsdp", "hsdp"].includes(choices.parallel) ? "fsdp" : "whole";
  return {
    training: evaluate(trees[peak], rank, choices),
    moments,
    peak,
    serving: evaluate(DATA.serving[`${choices.ffn}/${shards}`], rank, choices),
    kvCache: roundEven(valueOf(DATA.kv_cache, rank)),
    kvCachePerToken: roundEven(valueOf(DATA.kv_cache, { ...rank, B: 1n, C: 0n })),
  };
}

// The nearest whole number; a half goes to the even one.
function roundEven(value) {
  if (isWhole(value)) return value;
  const low = Math.floor(value);
  const rest = value - low;
  const up = rest > 0.5 || (rest === 0.5 && low % 2 !== 0);
  return BigInt(up ? low + 1 : low);
}

function rooflineOf(phase, env, choices) {
  const steps = DATA.generation[phase];
  let parts = [];
  let rows;
  if (steps === undefined) {
    [parts, rows] = boundsOf(phase, env, choices);
  } else {
    rows = valueOf(DATA.generated_rows, env);
    for (const step of steps) {
      const count = valueOf(step.count, env);
      if (count === 0n) continue;
      const [once] = boundsOf(step.phase, { ...env, ...pick(step.lengths, env) }, choices);
      parts.push(...once.map((part) => ({
        ...part,
        name: `${step.name}: ${part.name}`,
        flops: part.flops * Number(count),
        bytes: part.bytes * Number(count),
        seconds: part.seconds * Number(count),
        symbols: `steps·${part.symbols}`,
        numbers: `${numberText(count)} × ${part.numbers}`,
      })));
    }
  }
  const seconds = parts.reduce((sum, part) => sum + part.seconds, 0);
  for (const part of parts) part.share = part.seconds / seconds;
  const full = Number(nodeValue(DATA.flops[`${choices.ffn}/${phase}/full`], env, choices));
  const computing = parts.filter((part) => part.bound === "compute").reduce((s, p) => s + p.share, 0);
  return {
    parts, seconds, computing, tokens: Number(rows), mfu: full / seconds / Number(env.F_peak),
  };
}

const pick = (named, env) => Object.fromEntries(named.map(([name, f]) => [name, valueOf(f, env)]));

function boundsOf(phase, env, choices) {
  const step = phase === "training" ? `/${choices.checkpointing}/${choices.optimizer}` : "";
  const found = DATA.roofline[`${choices.ffn}/${phase}/${choices.attention}/${choices.loss}${step}`];
  env = bind(found.where, env);
  const parts = found.parts.map(([name, flops, bytes, seconds]) => {
    const work = Number(valueOf(flops, env));
    const moved = Number(valueOf(bytes, env));
    const computing = work / Number(env.F_peak) >= moved / Number(env.M_bw);
    return {
      name,
      flops: work,
      bytes: moved,
      seconds: Number(valueOf(seconds, env)),
      bound: computing ? "compute" : "memory",
      symbols: symbolsOf(seconds),
      numbers: numbersOf(seconds, env),
    };
  });
  return [parts, valueOf(found.rows, env)];
}

// Days and dollars: every token costs what one sequence's training step costs, by its tokens.
function runOf(env, choices) {
  const step = nodeValue(DATA.run.flops[`${choices.ffn}/${choices.convention}`], { ...env, B: 1n }, choices);
  const perToken = quotient(step, env.S);
  const suggested = valueOf(DATA.run.suggested, env);
  const here = { ...env, F_token: perToken, D: env.D ?? suggested };
  const seconds = Number(valueOf(DATA.run.seconds, here));
  const hours = (seconds / 3600) * Number(env.G);
  return {
    tokens: here.D,
    suggested,
    perToken,
    seconds,
    hours,
    dollars: env.price === null ? null : hours * env.price,
    symbols: symbolsOf(DATA.run.seconds),
    numbers: numbersOf(DATA.run.seconds, here),
  };
}
