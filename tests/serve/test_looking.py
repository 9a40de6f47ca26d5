"""The views of a served model give what the Python API gives."""

import math
from pathlib import Path

import pytest
import torch

import scratchlm
from inference.tiny import byte_tokenizer, tiny_model
from scratchlm import ModelConfig, TransformerLM
from scratchlm.accounting import account
from scratchlm.config import MLP, Attention, LayerNorm, MoE
from scratchlm.inference import Engine, Sampling, next_tokens
from scratchlm.inference.device_sampling import masked, shifted
from scratchlm.inspect import attention_weights, head_scores, inspect
from scratchlm.serve import look_engine, look_inside, look_numbers, look_tokens
from scratchlm.serve.look_inside import Scaling
from scratchlm.serve.subject import Subject

IDS = [*b"ab ab abc"]


@pytest.fixture(scope="module")
def subject():
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=tokenizer.vocab_size, context_length=96)
    return Subject.of(model, tokenizer, "tiny")


@pytest.fixture(scope="module")
def mixture():
    ffn = MoE(num_experts=4, experts_per_token=2)
    config = ModelConfig(61, 32, d_model=16, num_layers=2, num_heads=2, ffn=ffn)
    model = TransformerLM(config)
    model.reset_parameters(torch.Generator().manual_seed(1))
    return Subject.of(model.eval(), None, "mixture")


def log_p(subject, ids):
    with torch.no_grad():
        return subject.model(torch.tensor([ids]))[0].double().log_softmax(-1)


# The copy of the modules


def test_the_modules_are_copied_and_the_tensors_shared(subject):
    model = tiny_model(vocab_size=257, context_length=96)
    ours, theirs = dict(model.named_parameters()), dict(subject.model.named_parameters())
    assert all(ours[name].data_ptr() == theirs[name].data_ptr() for name in ours)
    assert all(a is not b for a, b in zip(model.modules(), subject.model.modules(), strict=True))


def test_bytes_that_are_no_character_are_told_apart(subject):
    """Half a character is a token of its own in many texts."""
    assert [subject.text(token) for token in (97, 0xE3, 0x81)] == ["a", "<0xE3>", "<0x81>"]


def test_an_edit_reaches_no_answer_of_the_engine(subject):
    model = tiny_model(vocab_size=257, context_length=96)
    engine = Engine(model, num_pages=16)
    before = engine.submit(IDS, max_new_tokens=4, seed=1, num_logprobs=0).result()
    with inspect(subject.model) as look:
        look.zero("layers.0.attn.out")
        subject.model(torch.tensor([IDS]))
        engine.forget_prefixes()
        during = engine.submit(IDS, max_new_tokens=4, seed=1, num_logprobs=0).result()
    assert during == before


# Tokens and choices


def test_tokens_are_read_with_probability_rank_surprise_and_entropy(subject):
    table = log_p(subject, IDS)
    found = look_tokens.read(subject, IDS)["tokens"]
    assert [t["id"] for t in found] == IDS
    assert "probability" not in found[0]
    for place, token in enumerate(found[1:], 1):
        row = table[place - 1]
        own = float(row[token["id"]])
        assert token["probability"] == pytest.approx(math.exp(own), rel=1e-12)
        assert token["surprise"] == pytest.approx(-own / math.log(2), rel=1e-12)
        assert token["rank"] == 1 + int((row > own).sum())
        assert token["entropy"] == pytest.approx(float(-(row.exp() * row).sum() / math.log(2)))


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, top_k=9),
    Sampling(temperature=1.5, top_k=40, top_p=0.8, min_p=0.02),
    Sampling(typical=0.6, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3),
    Sampling(temperature=0.0, repetition_penalty=1.3),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_filtered_probabilities_are_those_that_are_drawn_from(subject, sampling):
    found = look_tokens.choices(subject, IDS, 9, sampling=sampling, num_prompt=4, seed=5)
    settings = look_tokens.settings_of(subject, IDS, 4, sampling, 5)
    logits = subject.last_logits(IDS)[None]
    after = masked(shifted(logits, settings), settings).softmax(-1)[0]
    if sampling.temperature == 0:
        after = torch.nn.functional.one_hot(shifted(logits, settings).argmax(), 257)
    for row in found["rows"]:
        assert row["after"] == float(after[row["id"]])
        assert (row["removed_by"] is None) == (row["after"] > 0)
    assert found["left"] == int((after > 0).sum())
    assert found["left"] + sum(found["removed"].values()) == 257


def test_each_token_is_removed_by_the_first_filter_that_refuses_it(subject):
    """A naive version: lists, sorted and cut."""
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.7, min_p=0.3)
    found = look_tokens.choices(subject, IDS, 9, sampling=sampling, num_prompt=9, best=100)
    logits = [x / 0.9 for x in subject.last_logits(IDS).double().tolist()]
    ranked = sorted(range(257), key=lambda t: -logits[t])
    expected = {t: "top_k" for t in ranked[40:]}
    left = ranked[:40]
    weights = [math.exp(logits[t]) for t in left]
    mass, kept = 0.0, []
    for token, weight in zip(left, weights, strict=True):
        if mass < 0.7 * sum(weights):
            kept.append(token)
        mass += weight
    expected |= {t: "top_p" for t in left if t not in kept}
    expected |= {t: "min_p" for t in kept if logits[t] < logits[ranked[0]] + math.log(0.3)}
    assert {name: list(expected.values()).count(name) for name in found["removed"]} == found[
        "removed"
    ]
    assert {"top_k", "top_p", "min_p"} == set(found["removed"])
    assert {r["id"]: r["removed_by"] for r in found["rows"]} == {
        r["id"]: expected.get(r["id"]) for r in found["rows"]
    }


def test_the_draw_shown_is_the_one_the_engine_made(subject):
    sampling = Sampling(temperature=1.2, top_k=30, frequency_penalty=0.5)
    engine = Engine(tiny_model(vocab_size=257, context_length=96), num_pages=16)
    options = {"sampling": sampling, "seed": 11, "eos_ids": ()}
    wrote = engine.submit(IDS, max_new_tokens=6, **options).result().token_ids
    for step in range(6):
        ids = [*IDS, *wrote]
        found = look_tokens.choices(
            subject, ids, len(IDS) + step, sampling=sampling, num_prompt=len(IDS), seed=11
        )
        assert found["draw"]["id"] == found["chosen"] == wrote[step]


def test_choices_are_the_next_tokens(subject):
    found = look_tokens.choices(subject, IDS, 9, sampling=Sampling(), num_prompt=9, best=5)
    for row, one in zip(found["rows"], next_tokens(subject.model, IDS, best=5), strict=False):
        assert row["id"] == one.token_id
        assert row["probability"] == pytest.approx(one.probability, rel=1e-6)
    with pytest.raises(ValueError, match=r"at must lie in \[1, 9\]"):
        look_tokens.choices(subject, IDS, 0, sampling=Sampling(), num_prompt=9)


# Inside


def test_heads_are_pictures_of_their_weights_with_their_scores(subject):
    weights = attention_weights(subject.model, IDS)
    found = look_inside.heads(subject, IDS)
    scores = head_scores(subject.model)
    for one in found["heads"]:
        layer, head = one["layer"], one["head"]
        assert one["pixels"] == look_inside.pixels(weights[layer, head])
        assert one["induction"] == float(scores.induction[layer, head])
        assert one["first"] == pytest.approx(float(weights[layer, head, :, 0].mean()))
    full = look_inside.attention(subject, IDS, 1, 2, 5)
    assert full["row"] == weights[1, 2, 5].tolist()


def test_a_long_text_is_pooled_and_no_large_weight_is_lost(subject, monkeypatch):
    monkeypatch.setattr(look_inside, "CELLS", 1)  # layer by layer
    ids = IDS * 10
    found = look_inside.heads(subject, ids)["heads"][5]
    weights = attention_weights(subject.model, ids)[1, 1]
    assert max(__import__("base64").b64decode(found["pixels"])) == round(float(weights.max()) * 255)


def test_the_lens_is_that_of_the_whole_forward(subject):
    with torch.no_grad(), inspect(subject.model) as look:
        look.keep(["embed", "layers.*.out"])
        subject.model(torch.tensor([IDS]))
    table = look.lens()[:, 0].double().softmax(-1)
    found = look_inside.lens(subject, IDS, 2, 6)
    assert [layer["point"] for layer in found["layers"]] == [
        "embed",
        "layers.0.out",
        "layers.1.out",
    ]
    for layer, row in zip(found["layers"], table, strict=True):
        for cell, p in zip(layer["cells"], row[2:6], strict=True):
            assert cell[0][0] == int(p.argmax())
            assert cell[0][2] == pytest.approx(float(p.max()), rel=1e-5)


def test_shares_add_up_to_the_logit(subject):
    found = look_inside.attribution(subject, IDS, 98, against=97)
    logits = subject.last_logits(IDS)
    assert sum(share for _, share in found["parts"]) == pytest.approx(found["sum"])
    assert found["sum"] == pytest.approx(float(logits[98] - logits[97]), abs=1e-4)
    assert found["token"] == [98, "b"]


def test_an_ablation_is_that_of_the_python_api_and_off_it_changes_no_bit(subject):
    edits = [
        Scaling("layers.0.attn.heads", 0.0, heads=[1]),
        Scaling("layers.1.ffn.hidden", 0.5, units=[3]),
    ]
    found = look_inside.ablate(subject, IDS, edits)
    with torch.no_grad(), inspect(subject.model) as look:
        look.zero("layers.0.attn.heads", heads=[1])
        look.scale("layers.1.ffn.hidden", 0.5, units=[3])
        after = subject.model(torch.tensor([IDS]))[0, -1].double().softmax(-1)
    assert not found["same_bits"]
    assert {r["id"]: r["after"] for r in found["rows"]} == {
        r["id"]: float(after[r["id"]]) for r in found["rows"]
    }
    off = look_inside.ablate(subject, IDS, [Scaling("layers.0.attn.heads", 1.0, heads=[1])])
    assert off["same_bits"]
    assert off["bits"] == [found["bits"][0]] * 2
    assert found["divergence"] > 0 == off["divergence"]


def test_a_divergence_is_finite_where_a_probability_is_not_above_zero(subject):
    edits = [Scaling("logits", 100.0)]  # the difference of two is more than exp can hold
    with torch.no_grad():
        logits = subject.model(torch.tensor([IDS]))[0, -1]
    log_p, log_q = (x.double().log_softmax(-1) for x in (logits, 100 * logits))
    assert log_q.exp().min() == 0
    wanted = torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True)
    assert look_inside.ablate(subject, IDS, edits)["divergence"] == pytest.approx(wanted.item())
    assert explained(subject, "divergence", edits=edits)["value"] == pytest.approx(wanted.item())
    overflow = [Scaling("logits", 1000.0)] * 20
    with pytest.raises(ValueError, match="not finite"):
        look_inside.ablate(subject, IDS, overflow)


def test_patching_the_last_stream_brings_the_answer_back(subject):
    other = [*b"ba ba bca"]
    found = look_inside.patch(subject, IDS, other, 98, against=97)
    assert found["values"][-1][-1] == pytest.approx(found["clean"], abs=1e-5)
    assert found["values"][-1][0] == pytest.approx(found["other"], abs=1e-5)
    by_head = look_inside.patch(subject, IDS, other, 98, what="heads")
    assert [len(row) for row in by_head["values"]] == [4, 4]
    with pytest.raises(ValueError, match="as many tokens; got 9 and 3"):
        look_inside.patch(subject, IDS, other[:3], 98)


def test_experts_are_those_the_model_routed_to(mixture):
    ids = [1, 5, 9, 13]
    found = look_inside.experts(mixture, ids)["layers"]
    routes = []
    with torch.no_grad():
        mixture.model.hidden(torch.tensor([ids]), routes=routes)
    for layer, routed in zip(found, routes, strict=True):
        assert layer["experts"] == routed.experts.tolist()
        chosen = routed.probabilities.gather(1, routed.experts)
        chosen = chosen / chosen.sum(-1, keepdim=True)
        torch.testing.assert_close(torch.tensor(layer["weights"]), chosen)
        assert sum(layer["load"]) == pytest.approx(1)
    weight = explained(mixture, "expert", ids=ids, layer=1, position=2, chosen=0)
    assert weight["value"] == pytest.approx(found[1]["weights"][2][0], rel=1e-5)
    check_source(weight)
    for expert, load in enumerate(found[1]["load"]):
        shown = explained(mixture, "load", ids=ids, layer=1, chosen=expert)
        assert shown["value"] == pytest.approx(load)


def test_a_model_without_experts_has_none(subject):
    assert look_inside.experts(subject, IDS) == {"layers": []}


# Numbers


def explained(subject, kind, **given):
    return look_numbers.number(subject, kind, given.pop("ids", IDS), **given)


def check_source(found):
    """What is shown as the code is what stands in that file, at that line."""
    source = found["source"]
    lines = (Path(scratchlm.__file__).parent / source["file"]).read_text().splitlines()
    at = source["first"] - 1
    shown = [line.strip() for line in source["code"]]
    assert shown == [line.strip() for line in lines[at : at + len(shown)]]
    assert source["first"] <= source["line"] < source["first"] + len(shown)


def test_numbers_of_the_next_token_are_explained_by_their_value_and_line(subject):
    table = log_p(subject, IDS)[-1]
    logits = subject.last_logits(IDS)
    settings = {"num_prompt": 4}
    settings["sampling"] = Sampling(
        temperature=0.7,
        top_k=250,
        repetition_penalty=1.5,
        presence_penalty=0.3,
        frequency_penalty=0.2,
    )
    after = look_tokens.choices(subject, IDS, 9, **settings, seed=3, best=100)
    row = next(row for row in after["rows"] if row["id"] == 98)
    with torch.no_grad(), inspect(subject.model) as look:
        look.keep(["embed", "layers.*.out"])
        subject.model(torch.tensor([IDS]))
    by_layer = look.lens()[:, 0].double().softmax(-1)
    expected = [
        ("probability", {"token": 98}, float(table[98].exp())),
        ("surprise", {"token": 98}, float(-table[98] / math.log(2))),
        ("entropy", {}, float(-(table.exp() * table).sum() / math.log(2))),
        ("logit", {"token": 98}, float(logits[98])),
        ("logit", {"token": 98, "against": 97}, float(logits[98] - logits[97])),
        ("rank", {"token": 98}, row["rank"]),
        ("filtered", {"token": 98, **settings}, row["after"]),
        ("shift", {"token": 98, **settings}, row["shift"]),
        ("rank", {"token": 98, **settings}, row["rank_after"]),
        ("entropy", settings, after["entropy_after"]),
        ("draw", {"seed": 3, **settings}, after["draw"]["number"]),
        ("lens", {"token": 98, "position": 5, "layer": 0}, float(by_layer[1, 5, 98])),
        ("lens", {"token": 98, "position": 5}, float(by_layer[0, 5, 98])),
    ]
    for kind, given, value in expected:
        found = explained(subject, kind, **given)
        assert found["value"] == pytest.approx(value, rel=2e-5), kind
        check_source(found)
    assert row["shift"] != 0
    drawn = explained(subject, "draw", seed=3, **settings)["parts"]
    number = after["draw"]["number"]
    assert drawn[0][1] <= number < drawn[0][1] + drawn[1][1]
    assert drawn[1][2]["token"] == after["draw"]["id"]


def test_numbers_from_inside_are_explained_by_their_value_and_line(subject):
    weights = attention_weights(subject.model, IDS)
    heads = look_inside.heads(subject, IDS)["heads"]
    one = next(h for h in heads if (h["layer"], h["head"]) == (1, 3))
    place = {"layer": 1, "head": 3}
    other, pair = [*b"ba ba bca"], {"token": 98, "against": 97}
    shares = look_inside.attribution(subject, IDS, **pair)
    expected = [("attention", {**place, "query": 6, "key": 2}, float(weights[1, 3, 6, 2]))]
    for kind in ("first", "self", "previous_token", "duplicate_token", "induction"):
        expected.append(("head", {**place, "what": kind}, one[kind]))
    expected += [("share", {**pair, "part": part}, share) for part, share in shares["parts"]]
    expected.append(("shares", pair, shares["sum"]))
    rest = sum(share for _, share in shares["parts"][3:])
    expected.append(("shares", {**pair, "start": 3}, rest))
    expected.append(("rounding", pair, shares["error"]))
    for what, index in (("stream", "position"), ("attention", "position"), ("heads", "head")):
        values = look_inside.patch(subject, IDS, other, **pair, what=what)["values"]
        at = 2 if index == "head" else len(IDS) - 1  # no other place of the last layer counts
        given = {**pair, "other": other, "what": what, "layer": 1, index: at}
        expected.append(("patched", given, values[1][at]))
    for kind, given, value in expected:
        found = explained(subject, kind, **given)
        assert found["value"] == pytest.approx(value, rel=5e-5, abs=1e-6), (kind, given)
        check_source(found)
    with pytest.raises(ValueError, match="token 2 does not see token 6"):
        explained(subject, "attention", **place, query=2, key=6)
    with pytest.raises(ValueError, match="patching heads needs head"):
        explained(subject, "patched", other=other, token=98, what="heads", layer=1, position=2)


def test_what_edits_do_is_explained_with_the_edits_in(subject):
    edits = [Scaling("layers.0.attn.heads", 0.0, heads=[1]), Scaling("layers.1.ffn.out", 0.5)]
    found = look_inside.ablate(subject, IDS, edits)
    row = found["rows"][2]
    given = {"token": row["id"], "edits": edits}
    assert explained(subject, "probability", **given)["value"] == pytest.approx(row["after"])
    assert explained(subject, "moved", **given)["value"] == pytest.approx(
        100 * (row["after"] - row["before"])
    )
    assert explained(subject, "divergence", edits=edits)["value"] == pytest.approx(
        found["divergence"]
    )
    with torch.no_grad(), inspect(subject.model) as look:
        look_inside.apply_edits(look, edits)
        logits = subject.model(torch.tensor([IDS]))[0, -1]
    value = explained(subject, "logit", **given)["value"]
    assert value == pytest.approx(float(logits[row["id"]]), rel=1e-5)
    with pytest.raises(ValueError, match="no product any more"):
        explained(subject, "logit", token=98, edits=[Scaling("logits", 0.5)])


def test_shares_of_biases_are_explained_too():
    parts = {
        "norm": LayerNorm(bias=True),
        "ffn": MLP(bias=True),
        "attention": Attention(bias="all"),
    }
    config = ModelConfig(61, 32, d_model=16, num_layers=1, num_heads=2, **parts)
    model = TransformerLM(config)
    generator = torch.Generator().manual_seed(1)
    model.reset_parameters(generator)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(61))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 4)
    subject = Subject.of(model.eval(), None, "biased")
    given = {"token": 7, "against": 3}
    shares = look_inside.attribution(subject, [1, 5, 9], **given)["parts"]
    assert {"ln_final.bias", "lm_head.bias", "layers.0.ffn.w2.bias"} < {part for part, _ in shares}
    for part, share in shares:
        found = explained(subject, "share", ids=[1, 5, 9], part=part, **given)
        assert found["value"] == pytest.approx(share), part
    logits = subject.last_logits([1, 5, 9])
    found = explained(subject, "logit", ids=[1, 5, 9], **given)
    assert found["value"] == pytest.approx(float(logits[7] - logits[3]), rel=1e-5)


def test_what_a_parts_explanation_asks_further_is_that_value(subject):
    """A value that can be asked in its turn is explained by itself, down to the bottom."""
    other = [*b"ba ba bca"]
    starts = [
        {"kind": "probability", "token": 98},
        {"kind": "entropy", "sampling": Sampling(top_k=9), "num_prompt": 4},
        {"kind": "rounding", "token": 98, "against": 97},
        {"kind": "head", "layer": 1, "head": 2, "what": "induction"},
        {"kind": "patched", "other": other, "token": 98, "layer": 0, "position": 4},
        {"kind": "cost", "what": "line"},
        {"kind": "cost", "what": "seconds"},
    ]
    asked = [{"ids": IDS, **start} for start in starts]
    count = 0
    while asked:
        given = asked.pop()
        for _, value, more in explained(subject, **given)["parts"]:
            if more is None:
                continue
            more = {"ids": given["ids"], **more}
            if "sampling" in more:
                more["sampling"] = Sampling(**more["sampling"])
            inner = explained(subject, **more)
            if not inner["name"].startswith("probability") or given["kind"] != "entropy":
                assert inner["value"] == pytest.approx(value, rel=1e-4, abs=1e-5), (given, more)
            asked.append(more)
            count += 1
    assert count > 40


# Cost and cache


def test_a_tokens_cost_is_that_of_the_account(subject):
    config = subject.model.config
    step = look_engine.cost(subject.model, 20, 10, "h200")
    found = account(config, machine="h200", precision="fp32", phase="decode", cache=19)
    assert step["flops"] == found.flops["causal"].value
    assert step["seconds"] == found.roofline.seconds
    read = look_engine.cost(subject.model, 10, 10, "t4")
    assert read["phase"] == "prefill"
    assert read["flops"] == account(config, phase="prefill", prompt=10).flops["causal"].value


@pytest.mark.parametrize("given", [0, 9], ids=["decode", "prefill"])
def test_every_figure_of_the_cost_is_explained(subject, mixture, given):
    for one, ids in ((subject, IDS), (mixture, [1, 5, 9] * 3)):
        found = look_engine.cost(one.model, 9, given, "a100-80")
        asked = {"ids": ids, "num_prompt": given, "machine": "a100-80"}
        expected = [("line", None, found["flops"])]
        expected += [(what, None, found[what]) for what in ("bytes", "seconds")]
        expected += [("line", line["name"], line["value"]) for line in found["lines"]]
        for part in found["parts"]:
            expected += [(what, part["name"], part[what]) for what in ("flops", "bytes", "seconds")]
        for what, part, value in expected:
            shown = explained(one, "cost", what=what, part=part, **asked)
            assert shown["value"] == pytest.approx(value), (what, part)
            check_source(shown)
    with pytest.raises(ValueError, match=r"part must be one of layers, .*; got 'W9'"):
        explained(subject, "cost", what="line", part="W9")


def test_the_cache_shows_pages_that_are_held_shared_and_found(subject):
    engine = Engine(tiny_model(vocab_size=257, context_length=96), num_pages=16, page_size=4)
    assert look_engine.cache(engine, IDS)["shared"] == {"pages": [], "tokens": 0}
    handles = [engine.submit(IDS, max_new_tokens=20, seed=i, eos_ids=()) for i in (1, 2)]
    for _ in range(4):
        engine.step()
    during = look_engine.cache(engine, IDS)
    assert during["shared"]["tokens"] == 8
    assert [during["pages"][p] for p in during["shared"]["pages"]] == [[2, True]] * 2
    assert len(during["running"]) == 2
    assert during["counts"]["shared"] == 2
    assert during["counts"]["held"] == during["num_held"] - 2
    assert sum(during["counts"].values()) == 16
    assert during["tokens_found"] == 8
    for handle in handles:
        handle.result()
    after = look_engine.cache(engine, IDS)
    assert after["num_held"] == 0
    assert after["counts"]["free"] + after["counts"]["kept"] == 14
    assert after["shared"]["tokens"] == 8  # free, and still found
    total = engine.cache.keys.nbytes + engine.cache.values.nbytes
    assert after["bytes_per_page"] * 16 == total
