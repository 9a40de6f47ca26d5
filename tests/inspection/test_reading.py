"""What is read off a run: the lens, attribution, sweeps, and heads worth looking at."""

import math

import pytest
import torch

from interop.hf_models import HF_CONFIGS
from scratchlm.config import Attention, LayerNorm, NoPositions
from scratchlm.inspect import PARTS, head_scores, inspect
from scratchlm.interop import from_hf_config
from scratchlm.model import Linear
from tiny_models import FAMILIES, PLAIN, build, ids

PRE_NORM = [name for name in FAMILIES if name != "post-norm"]


def kept(model, tokens, names=PARTS, edit=None):
    with inspect(model) as look:
        look.keep(names)
        if edit is not None:
            edit(look)
        logits = model(tokens)
    return look.cache, logits


# The lens


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lens_ends_in_the_logits_and_begins_with_the_embedding(family):
    model, tokens = build(FAMILIES[family]), ids(2, 6)
    with inspect(model) as look:
        look.keep(["embed", "layers.*.out"])
        logits = model(tokens)
        lens = look.lens()
    assert lens.shape == (3, 2, 6, 29)
    torch.testing.assert_close(lens[-1], logits)
    torch.testing.assert_close(lens[0], model.lm_head(model.ln_final(look.cache["embed"])))


def test_the_lens_of_a_model_whose_second_layer_does_nothing_is_final_after_the_first():
    model, tokens = build(PLAIN), ids(1, 6)
    with inspect(model) as look:
        look.keep(["embed", "layers.*.out"])
        look.zero(["layers.1.attn.out", "layers.1.ffn.out"])
        logits = model(tokens)
    assert torch.equal(look.lens()[1], logits)


def test_a_lens_without_its_points_says_what_to_keep():
    model = build(PLAIN)
    cache, _ = kept(model, ids(1, 4), ["layers.*.out"])
    with pytest.raises(ValueError, match=r"embed was not kept; kept: layers.0.out, layers.1.out"):
        cache.lens()


# 4. Attribution


def assert_adds_up(attribution, logit):
    total = attribution.shares.sum(dim=-1)
    torch.testing.assert_close(total, logit.double(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("family", PRE_NORM)
def test_shares_add_up_to_the_logit_and_to_a_difference(family):
    model, tokens = build(FAMILIES[family]), ids(3, 7)
    cache, logits = kept(model, tokens)
    assert_adds_up(cache.attribute(5), logits[:, -1, 5])
    assert_adds_up(cache.attribute(5, against=6), logits[:, -1, 5] - logits[:, -1, 6])
    assert_adds_up(cache.attribute(2, position=3), logits[:, 3, 2])


@pytest.mark.parametrize("family", HF_CONFIGS)
def test_shares_add_up_for_every_family_we_import(family):
    config = from_hf_config({**HF_CONFIGS[family]().to_dict(), "torch_dtype": "float32"})
    model, tokens = build(config), ids(2, 7, config)
    cache, logits = kept(model, tokens)
    assert_adds_up(cache.attribute(5, against=6), logits[:, -1, 5] - logits[:, -1, 6])


@pytest.mark.parametrize("family", ["plain", "gpt2", "qwen3", "mixtral"])
def test_a_heads_share_is_what_the_logit_loses_without_it_with_the_scale_held_fixed(family):
    model, tokens = build(FAMILIES[family]), ids(2, 7)
    cache, logits = kept(model, tokens)
    last, d = model.layers[-1], model.config.d_head
    share = cache.attribute(5).share("layers.1.attn.heads.2")
    heads = cache["layers.1.attn.heads"][:, 2, -1]  # (batch, d_head)
    written = heads @ last.attn.output_proj.weight[:, 2 * d : 3 * d].T
    stream = cache["layers.1.out"][:, -1]
    centred = stream - stream.mean(-1, keepdim=True) if family == "gpt2" else stream
    deviation = (centred.square().mean(-1, keepdim=True) + model.ln_final.eps).sqrt()
    without = centred - written
    if family == "gpt2":
        without = without + written.mean(-1, keepdim=True)
    final = without / deviation * model.ln_final.weight
    if family == "gpt2":
        final = final + model.ln_final.bias
    torch.testing.assert_close(logits[:, -1, 5] - model.lm_head(final)[:, 5], share)


def test_parts_are_the_embedding_every_head_every_layer_and_every_bias():
    cache, _ = kept(build(FAMILIES["gpt2"]), ids(1, 4))
    parts = cache.attribute(1).parts
    assert parts[:6] == ("embed", *(f"layers.0.attn.heads.{h}" for h in range(4)), *parts[5:6])
    assert [part for part in parts if "heads" not in part] == [
        "embed",
        *("layers.0.attn.output_proj.bias", "layers.0.ffn", "layers.0.ffn.w2.bias"),
        *("layers.1.attn.output_proj.bias", "layers.1.ffn", "layers.1.ffn.w2.bias"),
        "ln_final.bias",
    ]


def test_a_head_with_a_bias_has_a_share_for_it():
    model, tokens = build(PLAIN), ids(2, 5)
    weight = model.lm_head.weight
    model.lm_head = Linear(16, 29, bias=True, dtype=torch.float64)
    with torch.no_grad():
        model.lm_head.weight.copy_(weight)
        model.lm_head.bias.normal_()
    cache, logits = kept(model, tokens)
    assert_adds_up(cache.attribute(5, against=2), logits[:, -1, 5] - logits[:, -1, 2])


@pytest.mark.parametrize(
    "point", ["layers.0.in", "layers.0.mid", "layers.1.out", "layers.1.attn.out"]
)
def test_edits_of_the_stream_have_a_share_of_their_own(point):
    model, tokens = build(PLAIN), ids(2, 5)
    plain = kept(model, tokens)[0].attribute(5)
    cache, logits = kept(model, tokens, edit=lambda look: look.add(point, 2.0))
    steered = cache.attribute(5)
    assert_adds_up(steered, logits[:, -1, 5])
    assert steered.parts == (*plain.parts, "edits")
    assert steered.share("edits").abs().min() > 1e-3


def test_edits_of_parts_are_in_the_shares_of_the_parts():
    model, tokens = build(PLAIN), ids(2, 5)
    cache, logits = kept(model, tokens, edit=lambda look: look.zero("layers.1.attn.heads", heads=2))
    attribution = cache.attribute(5)
    assert_adds_up(attribution, logits[:, -1, 5])
    assert not attribution.share("layers.1.attn.heads.2").any()


def test_in_float32_the_error_is_its_rounding_and_is_told():
    cache, logits = kept(build(PLAIN, dtype=torch.float32), ids(2, 5))
    attribution = cache.attribute(5)
    torch.testing.assert_close(attribution.logit.float(), logits[:, -1, 5])
    assert 0 < attribution.error < 1e-5


def test_attribution_works_after_generation():
    from scratchlm.inference import GREEDY, generate

    model = build(PLAIN)
    with inspect(model) as look:
        look.keep(PARTS)
        (done,) = generate(model, [[1, 2, 3]], max_new_tokens=4, sampling=GREEDY, eos_ids=())
    tokens = torch.tensor([[1, 2, 3, *done.token_ids]])
    logits = model(tokens[:, :-1])
    for position in (2, 4):
        assert_adds_up(look.cache.attribute(7, position=position), logits[:, position, 7])


@pytest.mark.parametrize(
    ("family", "names", "edit", "call", "message"),
    [
        ("post-norm", PARTS, None, lambda c: c.attribute(1), "needs a pre-norm model"),
        ("plain", ["embed"], None, lambda c: c.attribute(1), "layers.1.out was not kept; kept"),
        ("plain", PARTS, None, lambda c: c.attribute(29), r"token must lie in \[0, 29\); got 29"),
        ("plain", PARTS, None, lambda c: c.attribute(1, position=9), "not kept at position 9"),
        (
            "plain",
            PARTS,
            lambda look: look.zero("final", units=0),
            lambda c: c.attribute(1),
            "final was edited: the logit is no sum",
        ),
        ("plain", PARTS, None, lambda c: c.attribute(1).share("ffn"), "no part is called 'ffn'"),
    ],
)
def test_what_cannot_be_attributed_is_one_line(family, names, edit, call, message):
    cache, _ = kept(build(FAMILIES[family]), ids(1, 4), names, edit)
    with pytest.raises(ValueError, match=message):
        call(cache)


# 6. Sweeps


def lead(logits):
    return logits[:, -1, 5] - logits[:, -1, 6]


def one_by_one(model, tokens, from_, names, parts):
    """Run the model once for each patch."""
    found = []
    for name in names:
        for part in parts:
            with inspect(model) as look:
                if from_ is None:
                    look.zero(name, **part)
                else:
                    look.patch(name, from_=from_, **part)
                found.append(lead(model(tokens)))
    return torch.cat(found)


@pytest.mark.parametrize("family", ["plain", "llama", "gpt2", "mistral", "mixtral"])
@pytest.mark.parametrize("batch", [3, 32])
def test_a_sweep_equals_its_single_runs(family, batch):
    model, tokens = build(FAMILIES[family]).requires_grad_(False), ids(1, 5)
    kinds = ["layers.*.attn.heads", "layers.*.attn.weights", "layers.*.attn.q", "layers.*.mid"]
    a, _ = kept(model, ids(1, 5, seed=3), kinds)
    heads, places = [{"heads": h} for h in range(4)], [{"positions": p} for p in range(5)]
    both = [{"positions": p, "heads": h} for p in range(5) for h in range(4)]
    cases = [
        ("layers.*.attn.heads", "head", heads, (2, 4)),
        ("layers.*.mid", "position", places, (2, 5)),
        ("layers.*.attn.weights", "position head", both, (2, 5, 4)),
        ("layers.*.attn.q", "point", [{}], (2,)),
    ]
    for pattern, each, parts, shape in cases:
        names = [pattern.replace("*", str(i)) for i in range(2)]
        for from_ in (a, None):
            with inspect(model) as look:
                swept = look.sweep(
                    pattern, lead, tokens=tokens, from_=from_, each=each, batch=batch
                )
            single = one_by_one(model, tokens, from_, names, parts)
            assert swept.shape == shape
            torch.testing.assert_close(swept.flatten(), single, rtol=1e-12, atol=1e-12)


def test_a_sweep_leaves_edits_and_what_is_kept_as_they_were():
    model, tokens = build(PLAIN), ids(1, 5)
    with inspect(model) as look:
        look.keep("layers.1.out")
        look.add("layers.0.out", 1.0)
        before = model(tokens)
        cache = look.cache
        swept = look.sweep("layers.0.attn.heads", lead, tokens=tokens, each="head")
        assert look.cache is cache
        assert torch.equal(model(tokens), before)
    with inspect(model) as look:
        look.add("layers.0.out", 1.0)
        look.zero("layers.0.attn.heads", heads=3)
        torch.testing.assert_close(swept[0, 3], lead(model(tokens))[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"each": "layer"}, "each must be one of point, position, head, position head"),
        ({"each": "head"}, "all points must have the same number of heads"),
        ({"tokens": ids(2, 5)}, r"tokens must be one row, \(1, seq\); got \(2, 5\)"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"metric": lambda logits: logits.mean()}, r"one number a row, \(2,\); got \(\)"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_one_line(options, message):
    model = build(PLAIN)
    arguments = {"metric": lead, "tokens": ids(1, 5), **options}
    with inspect(model) as look, pytest.raises(ValueError, match=message):
        look.sweep("layers.*.out", arguments.pop("metric"), **arguments)


# Heads worth looking at


def model_that_looks_back(steps):
    """Build one layer whose head h looks `steps[h]` positions back, by positions it can read."""
    width = 64
    config = PLAIN.replace(
        d_model=2 * width,
        context_length=width,
        num_layers=1,
        num_heads=len(steps),
        d_head=width,
        positions=NoPositions(),
        norm=LayerNorm(),
        attention=Attention(bias="all"),
    )
    model = build(config)
    with torch.no_grad():
        for module in (model.layers[0].attn.q_proj, model.layers[0].attn.k_proj):
            module.weight.zero_()
            module.bias.zero_()
        for h, back in enumerate(steps):
            eye = torch.eye(width, dtype=torch.float64)
            model.layers[0].attn.q_proj.weight[h * width : (h + 1) * width, width:] = eye.roll(
                -back, 0
            )
            model.layers[0].attn.k_proj.weight[h * width : (h + 1) * width, width:] = 1e3 * eye
    model.layers[0].ln1 = torch.nn.Identity()
    return model, width


def test_heads_are_found_by_where_they_look():
    model, width = model_that_looks_back([1, 10, 9, 3])

    def place(_, args):
        x = args[0].clone()
        x[..., width:] = torch.eye(width, dtype=x.dtype)[: x.shape[1]]
        return (x,)

    model.layers[0].register_forward_pre_hook(place)  # the position, one-hot
    scores = head_scores(model, block=10, rows=2)
    one = pytest.approx(1.0, abs=1e-3)
    assert scores.previous_token[0].tolist() == [one, *scores.previous_token[0, 1:].tolist()]
    assert scores.top("previous_token", 1) == [(0, 0, one)]
    assert scores.top("duplicate_token", 1) == [(0, 1, one)]
    assert scores.top("induction", 1) == [(0, 2, one)]
    assert scores.induction[0, 3] < 0.1


def test_scores_of_a_model_that_looks_everywhere_alike_are_those_of_chance():
    model = build(PLAIN.replace(num_kv_heads=1))
    with torch.no_grad():
        for layer in model.layers:
            layer.attn.q_proj.weight.zero_()
    scores = head_scores(model, block=8)
    at = [1 / (i + 1) for i in range(16)]
    torch.testing.assert_close(
        scores.previous_token[0, 0].item(), sum(at[1:]) / 15, rtol=1e-9, atol=0
    )
    torch.testing.assert_close(scores.induction[1, 3].item(), sum(at[8:]) / 8, rtol=1e-9, atol=0)
    assert math.isclose(scores.duplicate_token[1, 0], sum(at[8:]) / 8)


def test_heads_are_scored_in_one_forward_as_far_as_memory_goes(monkeypatch):
    model, read = build(PLAIN), []
    model.layers[0].register_forward_pre_hook(lambda *_: read.append(0))
    together = head_scores(model, block=8)
    assert len(read) == 1
    monkeypatch.setattr("scratchlm.inspect.finding.CELLS", 1)
    apart = head_scores(model, block=8)
    assert len(read) == 1 + PLAIN.num_layers
    torch.testing.assert_close(together.induction, apart.induction)


def test_a_block_that_does_not_fit_twice_is_refused():
    with pytest.raises(ValueError, match=r"block must lie in \[2, 12\], half the context; got 13"):
        head_scores(build(PLAIN), block=13)
