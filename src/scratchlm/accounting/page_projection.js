"use strict";
// Several GPUs: what they send each other, a projected step, and plans side by side.

// Bytes/s in a ring of `group` GPUs, `inNode` of them in each node.
function ringRate(link, group, inNode) {
  const out = BigInt(inNode) * BigInt(DATA.projection.network);
  return group <= inNode || link <= out ? link : out;
}

function ratesOf(env, choices) {
  if (choices.link !== null) return [0, 0, 0].map(() => choices.link * 1e9);
  const link = read(DATA.machines[choices.gpu].link);
  const node = BigInt(DATA.projection.node);
  const share = node / env.G_t || 1n; // data-parallel ranks in a node
  const ring = exchangeOf(env, choices) === "hsdp" ? env.R : env.G_d;
  return [ringRate(link, ring, share), ringRate(link, 2n, 1n), ringRate(link, env.G_t, node)];
}

const hasLink = (choices) => choices.link !== null || DATA.machines[choices.gpu].link !== null;

function projectionOf(env, choices) {
  if (!hasLink(choices)) return null;
  const P = DATA.projection;
  const exchange = env.G_d > 1n ? exchangeOf(env, choices) : "none";
  const cut = env.G_t > 1n ? "cut" : "whole";
  const divides = env.S % env.G_t === 0n ? "divides" : "does not";
  const [full, again] = P.flops[`${choices.ffn}/${choices.checkpointing}`];
  const rank = rankOf(env, choices);
  [rank.W_d, rank.W_n, rank.W_t] = ratesOf(env, choices);
  rank.F_step = nodeValue(full, env, choices);
  rank.F_again = again.map((node) => nodeValue(node, env, choices)).reduce(add, 0n);
  const sent = evaluate(P.sent[`${exchange}/${cut}/${divides}`], rank, choices);
  const to = (name) => sent.children.find((child) => child.name.includes(name))?.value ?? 0n;
  rank.X_d = to("data");
  rank.X_n = to("nodes");
  rank.X_t = to("tensor");
  const here = bind(P.seconds, rank);
  const step = evaluate(P.step, here, choices);
  return {
    sent,
    step,
    overlapped: evaluate(P.overlapped, here, choices),
    tokens: evaluate(P.tokens, here, choices),
    tokensOverlapped: evaluate(P.tokens_overlapped, here, choices),
    share: 1 - Number(step.children[0].value) / Number(step.value),
    dataRate: rank.W_d,
    nodeRate: rank.W_n,
    tensorRate: rank.W_t,
    env: here,
  };
}

// The most GPUs of a node that divide what tensor parallelism divides.
function widestCut(sizes) {
  const { divided } = DATA.projection;
  return [8n, 4n, 2n, 1n].find((n) => n <= BigInt(DATA.projection.node) &&
    divided.every((name) => sizes[name] % n === 0n));
}

function plansOf(sizes, choices) {
  if (!hasLink(choices)) return [];
  const cut = choices.tp > 1n ? choices.tp : widestCut(sizes);
  const room = read(DATA.machines[choices.gpu].memory);
  return DATA.projection.gpu_counts.map(BigInt).flatMap((G) => {
    const ways = [["zero1", 1n], ["fsdp", 1n]];
    if (G > BigInt(DATA.projection.node)) ways.push(["hsdp", 1n]);
    if (cut > 1n && G % cut === 0n) ways.push(...(G === cut ? [["tp", cut]] : [["zero1", cut], ["fsdp", cut]]));
    return ways.map(([parallel, G_t]) => {
      const way = { ...choices, parallel };
      const env = environment({ ...sizes, G, G_t }, way);
      const { moments, peak } = momentsOf(rankOf(env, way), way);
      return {
        gpus: G,
        name: planName(env, way),
        memory: moments[peak],
        fits: moments[peak] <= room,
        ...projectionOf(env, way),
      };
    });
  });
}

// zero1, fsdp × tp 8, tp 8
function planName(env, choices) {
  const data = env.G_d > 1n ? exchangeOf(env, choices) : "";
  const tensor = env.G_t > 1n ? `tp ${env.G_t}` : "";
  return [data, tensor].filter(Boolean).join(" × ") || "none";
}
