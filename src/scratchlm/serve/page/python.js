// The view that is open, as a Python script that prints the same numbers.
import { state, idsOf } from "./state.js";
import { choicesBody } from "./choices.js";
import { attentionBody } from "./attention.js";
import { attributionBody, lensBody } from "./lens.js";
import { ablateBody, patchBody } from "./edits.js";
import { costBody } from "./engine.js";
import { model } from "./write.js";

const begun = (ids, imports) => `import torch

${["from scratchlm import load_model", ...imports].sort().join("\n")}

loaded = load_model(${pythonText(model.source)})
model, tokenizer = loaded.model, loaded.tokenizer
ids = [${ids.join(", ")}]
tokens = torch.tensor([ids])
`;
const INSPECT = "from scratchlm.inspect import inspect";
const pythonText = (text) => JSON.stringify(text);
// Python and JSON write numbers alike, and these words differently.
const pythonValue = (x) => (x === true ? "True" : x === false ? "False" : x === null || x === undefined ? "None" : JSON.stringify(x));
const keywords = (object, between) => Object.entries(object).map(([name, value]) => `${name}=${pythonValue(value)}`).join(between);

const WRITERS = {
  choices() {
    const { ids, at, num_prompt, seed, sampling } = choicesBody();
    const imports = ["from scratchlm.inference import Sampling", "from scratchlm.serve.look_tokens import choices", "from scratchlm.serve.subject import Subject"];
    return begun(ids, imports) + `
subject = Subject.of(model, tokenizer, "model")
sampling = Sampling(
    ${keywords(sampling, ",\n    ")},
)
found = choices(subject, ids, ${at}, sampling=sampling, num_prompt=${num_prompt}, seed=${seed}, best=12)
for row in found["rows"]:  # before the filters, and after them
    after = f"removed by {row['removed_by']}" if row["removed_by"] else f"{row['after']:.6f}"
    print(f"{row['text']!r:20} {row['probability']:.6f} {after}")
`;
  },
  attention() {
    const { ids, layer, head, query } = attentionBody();
    return begun(ids, [INSPECT]) + `
with torch.no_grad(), inspect(model) as look:
    look.keep("layers.${layer}.attn.weights", heads=${head})
    model(tokens)
weights = look.cache["layers.${layer}.attn.weights"][0, 0, ${query}]
for key, weight in enumerate(weights[:${query + 1}].tolist()):
    print(f"{key} {tokenizer.decode([ids[key]])!r:20} {weight:.4f}")
`;
  },
  lens() {
    const { ids, start, stop } = lensBody();
    return begun(ids, [INSPECT]) + `
with torch.no_grad(), inspect(model) as look:
    look.keep(["embed", "layers.*.out"], positions=range(${start}, ${stop}))
    model(tokens)
for point, logits in look.cache.lens_by_layer():
    p, best = logits[0].double().softmax(-1).max(-1)
    print(point, [f"{tokenizer.decode([t])!r} {q:.6f}" for t, q in zip(best.tolist(), p.tolist())])
`;
  },
  async attribution() {
    const [{ ids, token, against }] = await attributionBody();
    return begun(ids, ["from scratchlm.inspect import PARTS, inspect"]) + `
with torch.no_grad(), inspect(model) as look:
    look.keep(PARTS)
    model(tokens)
found = look.cache.attribute(${token}, against=${pythonValue(against)})
for part, share in found.top():
    print(f"{part:30} {share:+.4f}")
print(f"{'sum':30} {float(found.shares.sum()):+.4f} = logit {float(found.logit[0]):.4f}")
`;
  },
  ablation() {
    const { ids, edits } = ablateBody();
    const lines = edits.map(({ point, factor, ...part }) => `    look.${factor === 0 ? "zero" : "scale"}(${[pythonText(point), ...(factor === 0 ? [] : [factor]), ...Object.entries(part).map(([name, value]) => `${name}=${pythonValue(value)}`)].join(", ")})\n`);
    return begun(ids, [INSPECT]) + `
with torch.no_grad():
    before = model(tokens)[0, -1].double().softmax(-1)
with torch.no_grad(), inspect(model) as look:
${lines.join("")}    after = model(tokens)[0, -1].double().softmax(-1)
for token in before.topk(10).indices.tolist():
    print(f"{tokenizer.decode([token])!r:20} {before[token]:.6f} {after[token]:.6f}")
`;
  },
  async patch() {
    const [{ ids, other, token, against, what }] = await patchBody();
    const point = { stream: "layers.*.out", attention: "layers.*.attn.out", "feed-forward": "layers.*.ffn.out", heads: "layers.*.attn.heads" }[what];
    const lead = against === undefined ? `logits[:, -1, ${token}]` : `logits[:, -1, ${token}] - logits[:, -1, ${against}]`;
    return begun(ids, [INSPECT]) + `other = torch.tensor([[${other.join(", ")}]])


def metric(logits):
    return ${lead}


with torch.no_grad(), inspect(model) as look:
    look.keep("${point}")
    model(tokens)
with inspect(model) as again:
    found = again.sweep("${point}", metric, tokens=other, from_=look.cache, each="${what === "heads" ? "head" : "position"}")
for layer, row in enumerate(found.tolist()):
    print(layer, *[f"{value:.8f}" for value in row])
`;
  },
  cost() {
    const body = costBody(), first = body.at <= body.num_prompt;
    return `from scratchlm import load_model
from scratchlm.accounting import account

config = load_model(${pythonText(model.source)}).config
found = account(config, machine="${body.machine}", precision="${model.precision}", ${first ? `phase="prefill", prompt=${body.at}` : `phase="decode", cache=${body.at - 1}`})
print(found.flops["causal"].value, "FLOP;", found.roofline.seconds, "s")
`;
  },
  experts() {
    return begun(idsOf(), [INSPECT]) + `
with torch.no_grad(), inspect(model) as look:
    look.keep("layers.*.ffn.router")
    model(tokens)
for point in look.cache:
    ffn = model.get_submodule(point.removesuffix(".router"))
    p, weights, experts = ffn.ops.route(look.cache[point][0], ffn.experts_per_token, ffn.renormalize)
    for position, pairs in enumerate(zip(experts.tolist(), weights.tolist())):
        print(point, position, *[f"{expert}: {weight:.6f}" for expert, weight in zip(*pairs)])
    load = experts.flatten().bincount(minlength=p.shape[-1]) / experts.numel()
    print(point, "load", *[f"{expert:.6f}" for expert in load.tolist()])
`;
  },
  cache() {
    return begun(idsOf(), ["from scratchlm.inference import Engine"]) + `
engine = Engine(model, tokenizer=tokenizer, num_pages=64, page_size=${model.page_size})
for _ in range(2):
    engine.submit(ids[:-1], max_new_tokens=1).result()
print(engine.scheduler.num_found, "tokens found in the prefix cache")
`;
  },
};

export const asPython = async () => WRITERS[state.view]();
