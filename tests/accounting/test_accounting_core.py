"""Formulas, parameters and FLOPs: the worked answer, and naive counting as the oracle."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchlm.accounting import (
    CONVENTIONS,
    Execution,
    Setup,
    bindings,
    count_parameters,
    evaluate,
    flops_tree,
    training_flops_per_token,
)
from scratchlm.accounting.expr import Num, Sym, ceil_div, largest, least
from scratchlm.accounting.work import PHASES
from scratchlm.config import MLP, PRESETS, Attention, Learned, ModelConfig, MoE, preset

XL = preset("cs336-gpt2-xl")


def flops(config, phase="forward", convention="full", execution=None, **work):
    setup = Setup(phase=phase, **work)
    tree = flops_tree(config, phase, convention, execution, packed=bool(setup.documents))
    return evaluate(tree, bindings(config, setup))


# Formulas


def test_a_formula_prints_evaluates_and_serialises():
    S, d = Sym("S"), Sym("d")
    f = 8 * S * d**2
    env = {"S": 1024, "d": 1600}
    assert f.value(env) == 20_971_520_000
    assert f.symbols() == "8·S·d²"
    assert f.numbers(env) == "8 × 1,024 × 1,600²"
    assert f.data() == ["*", 8, "S", ["^", "d", 2]]


def test_constants_fold_and_neutral_elements_vanish():
    x = Sym("x")
    assert (2 * (2 * x)).symbols() == "4·x"
    assert (x + 0).symbols() == (1 * x).symbols() == (x / 1).symbols() == "x"
    assert 0 * x == Num(0)


def test_parentheses_keep_the_meaning():
    x, y = Sym("x"), Sym("y")
    assert (x * (y + 1)).symbols() == "x·(y + 1)"
    assert (x - (y - 1)).symbols() == "x − (y − 1)"
    assert (2 * (x * (x + 1) / 2)).symbols() == "2·(x·(x + 1) / 2)"
    assert ((x + y) ** 2).symbols() == "(x + y)²"
    assert least(x + 1, y).symbols() == "min(x + 1, y)"
    assert ceil_div(x, y).symbols() == "⌈x / y⌉"


numbers = st.integers(1, 50)


@given(numbers, numbers, numbers)
def test_a_printed_formula_means_what_it_evaluates_to(a, b, c):
    x, y, z = Sym("x"), Sym("y"), Sym("z")
    env = {"x": a, "y": b, "z": c}
    for f in (x - (y - z) * x, (x + y) * z / (z * y), largest(x, y) * (x - y + z) ** 2, -1 * x + z):
        text = f.numbers(env).replace("×", "*").replace("−", "-").replace("²", "**2")
        # the printed text is Python arithmetic: let the compiler's own constant folding judge it
        assert _arithmetic(text) == pytest.approx(f.value(env))


def _arithmetic(text):
    import ast

    def go(node):
        if isinstance(node, ast.BinOp):
            a, b = go(node.left), go(node.right)
            ops = {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b, ast.Pow: a ** min(b, 9)}
            return a / b if isinstance(node.op, ast.Div) else ops[type(node.op)]
        if isinstance(node, ast.Call):
            return max(go(a) for a in node.args)
        return -go(node.operand) if isinstance(node, ast.UnaryOp) else node.value

    return go(ast.parse(text, mode="eval").body)


def test_whole_numbers_stay_exact_at_any_size():
    x = Sym("x")
    assert (x * x / 2).value({"x": 10**20}) == 10**40 // 2
    assert (x / 2).value({"x": 3}) == 1.5


# The worked answer


def test_gpt2_xl_parameters():
    p = count_parameters(XL)
    assert p.total == p.unique == p.active == 2_127_057_600
    assert round(p.total * 4 / 1e9, 2) == 8.51


def test_gpt2_xl_forward_flops():
    tree = flops(XL)
    assert tree["projections"].value == 20_971_520_000
    assert tree["attention"].value == 6_710_886_400
    assert tree["feed-forward"].value == 62_914_560_000
    assert tree["layers"].value // 48 == 90_596_966_400
    assert tree["layers"].value == 4_348_654_387_200
    assert tree["LM head"].value == 164_682_137_600
    assert tree.value == 4_513_336_524_800


def test_gpt2_xl_at_16k_tokens():
    long, short = flops(XL, context=16_384), flops(XL)
    assert float(f"{long.value:.3e}") == 1.495e14
    assert round(long.value / short.value, 1) == 33.1
    share = long["attention"].share * long["layers"].share
    assert 0.545 < share < 0.555


def test_across_the_family_ffn_and_projections_grow_and_attention_and_head_shrink():
    shares = {name: [] for name in ("projections", "attention", "feed-forward", "LM head")}
    for name in ("cs336-gpt2", "cs336-gpt2-medium", "cs336-gpt2-large", "cs336-gpt2-xl"):
        tree = flops(preset(name))
        for part, seen in shares.items():
            item = tree[part]
            seen.append(
                item.value * (1 if part == "LM head" else tree["layers"].times) / tree.value
            )
    assert shares["projections"] == sorted(shares["projections"])
    assert shares["feed-forward"] == sorted(shares["feed-forward"])
    assert shares["attention"] == sorted(shares["attention"], reverse=True)
    assert shares["LM head"] == sorted(shares["LM head"], reverse=True)
    assert shares["feed-forward"][-1] == max(part[-1] for part in shares.values())


# Oracles: released sizes, and loops that count


@pytest.mark.parametrize(
    ("name", "unique"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama3-8b", 8_030_261_248),
        ("llama3.2-1b", 1_235_814_400),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_released_models_have_their_published_size(name, unique):
    assert count_parameters(preset(name)).unique == unique


def test_a_tied_head_counts_twice_in_total_and_once_in_unique():
    p = count_parameters(preset("gpt2"))
    assert p.total - p.unique == 50_257 * 768
    assert p.embedding == (50_257 + 1_024) * 768
    assert p.embedding + p.non_embedding == p.unique


def test_active_parameters_leave_out_the_experts_a_token_does_not_visit():
    p = count_parameters(preset("qwen3-30b-a3b"))
    assert p.unique - p.active == 48 * (128 - 8) * 3 * 2_048 * 768
    assert 3.3e9 < p.active < 3.4e9


@pytest.mark.parametrize("name", PRESETS)
def test_full_convention_is_the_mfu_convention_of_the_benchmarks(name):
    c = preset(name)
    expected = 6 * count_parameters(c).matmul + 12 * c.num_layers * c.num_heads * c.d_head * 777
    assert training_flops_per_token(c, 777) == expected


def loop_pairs(n, window=None):
    return sum(min(i + 1, window or i + 1) for i in range(n))


windows = st.one_of(st.none(), st.integers(1, 40))


def tiny(window=None, **parts):
    return ModelConfig(
        vocab_size=11,
        context_length=64,
        d_model=6,
        num_layers=3,
        num_heads=2,
        d_ff=10,
        d_head=4,
        attention=Attention(sliding_window=window),
        **parts,
    )


def count(c, rows, heads, pairs):
    linear = c.d_model * c.d_head * 2 * (c.num_heads + c.num_kv_heads)
    ffn = (2 if isinstance(c.ffn, MLP) else 3) * c.d_model * c.d_ff
    if isinstance(c.ffn, MoE):
        ffn = ffn * c.ffn.experts_per_token + c.d_model * c.ffn.num_experts
    layer = 2 * rows * (linear + ffn) + 4 * pairs * c.num_heads * c.d_head
    return c.num_layers * layer + 2 * heads * c.d_model * c.vocab_size


@given(st.integers(1, 60), st.integers(1, 5), windows)
def test_causal_flops_are_those_of_a_loop_over_visible_keys(s, b, window):
    c = tiny(window)
    got = flops(c, "forward", "causal", context=s, batch=b).value
    assert got == count(c, b * s, b * s, b * loop_pairs(s, window))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), windows)
def test_packed_documents_attend_only_to_themselves(lengths, window):
    c, s = tiny(window), sum(lengths)
    got = flops(c, "forward", "causal", context=s, documents=tuple(lengths)).value
    assert got == count(c, s, s, sum(loop_pairs(n, window) for n in lengths))


@given(st.integers(1, 30), st.integers(1, 20), st.integers(1, 3), windows)
def test_a_generation_is_the_sum_of_its_steps(p, t, b, window):
    c = tiny(window)
    for convention in ("full", "causal"):
        steps = flops(c, "prefill", convention, prompt=p, batch=b).value + sum(
            flops(c, "decode", convention, cache=p + i, batch=b).value for i in range(t - 1)
        )
        whole = flops(c, "generation", convention, prompt=p, new_tokens=t, batch=b).value
        assert whole == steps


@given(st.integers(1, 30), st.integers(1, 20), windows)
def test_without_a_cache_every_token_costs_a_prefill(p, t, window):
    c = tiny(window)
    for convention in ("full", "causal"):
        steps = sum(flops(c, "prefill", convention, prompt=p + i).value for i in range(t))
        got = flops(c, "generation-no-cache", convention, prompt=p, new_tokens=t).value
        assert got == steps


@pytest.mark.parametrize("ffn", [MLP(), MoE(8, 2)])
def test_other_feed_forwards_count_their_own_matrices(ffn):
    c = tiny(ffn=ffn)
    assert flops(c, context=13).value == count(c, 13, 13, 13 * 13)


def test_a_training_step_is_three_forwards_and_hardware_adds_what_is_recomputed():
    forward, training = flops(XL).value, flops(XL, "training").value
    assert training == 3 * forward
    unfused = Execution(attention="unfused", checkpointing="block")
    again = flops(XL, "training", "hardware", unfused).value - training
    assert again == flops(XL)["layers"].value
    fused = flops(XL, "training", "hardware", Execution())
    assert fused.value - flops(XL, "training", "causal").value == fused["QKᵀ again"].value * 48


def test_a_fused_loss_is_what_the_model_does_and_recomputes_nothing():
    assert Execution().loss == "fused"
    ways = [
        flops(XL, "training", "hardware", Execution(loss=loss)) for loss in ("fused", "unfused")
    ]
    assert ways[0].value == ways[1].value


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_tree_adds_up_and_its_shares_sum_to_one(name, phase, convention):
    tree = flops(preset(name), phase, convention, context=512)
    for _, item in tree.walk():
        if item.children:
            assert item.value == item.times * sum(c.value for c in item.children)
            assert sum(c.share for c in item.children) == pytest.approx(1)
    json.dumps(tree.as_dict())


def test_six_nd_counts_every_active_parameter_once():
    c = dataclasses.replace(tiny(), positions=Learned())
    n = count_parameters(c).active
    assert flops(c, "training", "6ND", context=10, batch=2).value == 6 * n * 20


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"phase": "backwards"}, "phase must be one of"),
        ({"batch": 0}, "batch must lie between 1"),
        ({"batch": 1.5}, "batch must be a whole number"),
        ({"precision": "int1"}, "precision must be one of"),
        ({"cache": -1}, "cache must lie between 0"),
        ({"optimizer": "adam"}, "optimizer must be one of"),
    ],
)
def test_invalid_arguments_are_refused_by_name(wrong, says):
    with pytest.raises((ValueError, TypeError), match=says):
        Setup(**wrong)


def test_documents_must_fill_the_sequence():
    with pytest.raises(ValueError, match="documents must fill the sequence; got 7"):
        bindings(XL, Setup(documents=(3, 4)))
