"""Several GPUs: what a rank holds and sends, against real models, rings walked by hand, torch."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchlm import config as c
from scratchlm.accounting import (
    MACHINES,
    Execution,
    Setup,
    account,
    collectives,
    count_parameters,
    flops_tree,
    memory,
    memory_bindings,
    plans,
    project,
)
from scratchlm.accounting.machines import NETWORK, ring_rate
from scratchlm.config import ModelConfig, preset
from scratchlm.model import TransformerLM
from scratchlm.parallel.layout import is_read_low

TINY = ModelConfig(96, 32, d_model=16, num_layers=3, num_heads=4, num_kv_heads=2, d_ff=40)
KINDS = {
    "plain": TINY,
    "tied": TINY.replace(tie_embeddings=True),
    "biases": TINY.replace(
        ffn=c.MLP("relu", bias=True), attention=c.Attention(bias="all"), norm=c.LayerNorm()
    ),
    "mixture": TINY.replace(ffn=c.MoE(6, 2)),
    "normed heads": TINY.replace(attention=c.Attention(qk_norm=True)),
}
H100 = MACHINES["h100-sxm"]
LLAMA = preset("llama3-8b")
each_kind = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)


def training(**setup):
    return Setup(phase="training", **setup)


def parameters(config):
    """Return the real model's parameters, tied ones once."""
    return dict(TransformerLM(config, device="meta").named_parameters())


# What a rank holds


@each_kind
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_zero1_holds_copies_whole_and_the_state_in_shares(config, ranks):
    held = memory(config, training(parallel="zero1", gpus=ranks))
    real = parameters(config).items()
    matrices = sum(p.numel() for name, p in real if is_read_low(name, p))
    vectors = sum(p.numel() for name, p in real if not is_read_low(name, p))
    assert held.training["for the products"].value == 2 * matrices + 4 * vectors
    assert held.training["to update"].value * ranks == pytest.approx(4 * matrices)
    state = held.training["optimizer state"].value
    assert state * ranks == pytest.approx(8 * (matrices + vectors))
    gradients = 4 * (matrices + vectors)
    besides = 32 * 2**20 + 4 * config.context_length * config.d_head  # workspace, RoPE tables
    update = 2 * matrices + 4 * vectors + gradients + besides
    update += (4 * matrices + 2 * gradients + gradients) / ranks
    assert held.moments["update"] == pytest.approx(update, abs=1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_zero1_has_one_kind_of_weights_where_products_read_the_stored_ones(precision):
    held = memory(TINY, training(parallel="zero1", gpus=4, precision=precision)).training
    whole = count_parameters(TINY).unique * (4 if precision == "fp32" else 2)
    assert held["for the products"].value == whole
    assert held["to update"].value == 0


@each_kind
def test_one_rank_of_zero1_is_one_gpu(config):
    alone, one = training(batch=4), training(batch=4, parallel="zero1", gpus=1)
    assert memory(config, one) == memory(config, alone)
    assert collectives(config, one) == []
    cut = training(batch=4, parallel="zero1", gpus=2, tp=2)
    whole = training(batch=4, parallel="tp", gpus=2)
    assert memory(config, cut) == memory(config, whole)
    assert collectives(config, cut) == collectives(config, whole)


@each_kind
@pytest.mark.parametrize("ranks", [2, 7])
def test_the_shares_of_fsdp_make_up_the_whole(config, ranks):
    whole = memory(config, training(micro_batches=2)).training
    share = memory(config, training(micro_batches=2, parallel="fsdp", gpus=ranks)).training
    for name in ("weights", "optimizer state"):
        assert share[name].value * ranks == pytest.approx(whole[name].value)


@each_kind
def test_the_shares_of_tp_make_up_the_matrices_and_repeat_what_is_not_divided(config):
    env = memory_bindings(config, training(parallel="tp", gpus=2))
    repeated = ("ln", "norm", "output_proj.bias", "w2.bias", "router")
    assert env["N_all"] == sum(
        p.numel() if any(word in name for word in repeated) else p.numel() // 2
        for name, p in parameters(config).items()
    )


def test_fsdp_and_tp_divide_by_both():
    both = memory(LLAMA, training(parallel="fsdp", gpus=64, tp=4)).training["weights"].value
    rank = memory(LLAMA, training(parallel="tp", gpus=4)).training["weights"].value
    assert both == rank / 16


def test_norms_and_residuals_are_cut_along_the_sequence_where_it_divides():
    def norm(seq):
        setup = training(parallel="tp", gpus=2, context=seq, batch=64)
        return memory(TINY, setup).training["norm 1 input"].value

    assert norm(32) == 4 * 64 * 16 * 16
    assert norm(31) == 4 * 64 * 31 * 16


@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
def test_a_rank_casts_no_weights_and_joins_those_of_one_input(parallel):
    setup = training(parallel=parallel, gpus=2, batch=9)
    items = [item for _, item in memory(TINY, setup).training.walk()]
    assert "norm 1 input" in {item.name for item in items}  # activations are there
    assert "cast weights" not in {item.name for item in items}
    joined = sum(item.value for item in items if item.name == "joined weights")
    names = r".*(q_proj|k_proj|v_proj|w1|w3)\.weight"
    real = sum(p.numel() for name, p in parameters(TINY).items() if re.fullmatch(names, name))
    assert joined == 2 * real / TINY.num_layers  # of one layer: its item says how many there are


# What a rank sends


def sent_in_a_ring(kind, sizes):
    """Walk a ring: each rank passes one piece a hop to the next; return the bytes of each rank."""
    ranks = len(sizes)
    sent = [0] * ranks
    for _ in range(2 if kind == "all-reduce" else 1):
        for hop in range(ranks - 1):
            for rank in range(ranks):
                sent[rank] += sizes[(rank - hop) % ranks]
    return sent


@given(st.integers(2, 9), st.integers(1, 50), st.sampled_from(["zero1", "ddp", "fsdp"]))
def test_what_is_sent_is_what_a_ring_passes_on(ranks, vocab, parallel):
    config = TINY.replace(vocab_size=vocab)
    for made in collectives(config, training(parallel=parallel, gpus=ranks)):
        pieces = [made.bytes * (i + 1) // ranks - made.bytes * i // ranks for i in range(ranks)]
        passed = sent_in_a_ring(made.kind, pieces)
        assert sum(passed) / ranks == pytest.approx(made.moved)
        assert all(abs(one - made.moved) <= 2 for one in passed)


@each_kind
def test_zero1_reduces_the_gradients_and_gathers_the_copies_once(config):
    real = parameters(config)
    for many in (1, 5):  # micro-batches do not change it
        found = collectives(config, training(parallel="zero1", gpus=4, micro_batches=many))
        assert [(made.kind, made.count) for made in found] == [
            ("reduce-scatter", 1),
            ("all-gather", 1),
        ]
        assert found[0].bytes == sum(4 * p.numel() for p in real.values())
        assert found[1].bytes == sum(
            (2 if is_read_low(name, p) else 4) * p.numel() for name, p in real.items()
        )


def test_ddp_sends_what_zero1_sends_in_float32():
    ddp, zero1 = (
        collectives(TINY, training(parallel=parallel, gpus=4, precision="fp32"))
        for parallel in ("ddp", "zero1")
    )
    assert sum(made.moved for made in ddp) == sum(made.moved for made in zero1)


@pytest.mark.parametrize(("seq", "a_layer"), [(32, 8), (31, 4)])
def test_tp_sums_every_half_of_a_layer_forward_and_backward(seq, a_layer):
    found = collectives(TINY, training(parallel="tp", gpus=2, context=seq, batch=5))
    halves = [made for made in found if made.name.startswith("layers")]
    assert sum(made.count for made in halves) == 3 * a_layer
    whole = 5 * seq * 16 * 2  # bytes of the activations between layers
    assert all(made.bytes == made.count * whole for made in halves)
    # a sum that is scattered and gathered, or all-reduced: twice the whole, of which half is sent
    assert sum(made.moved for made in halves) == 3 * 4 * whole
    loss = next(made for made in found if made.name.startswith("loss"))
    assert (loss.kind, loss.count, loss.bytes) == ("all-reduce", 3, 3 * 5 * seq * 4)
    assert all(made.kind == "all-reduce" for made in found) == (seq == 31)


# A projected step


def test_a_ring_that_leaves_its_node_goes_through_all_its_adapters():
    assert ring_rate(450e9, 8, 8) == 450e9
    assert ring_rate(450e9, 16, 8) == 8 * NETWORK
    assert ring_rate(450e9, 16, 1) == NETWORK
    assert ring_rate(32e9, 16, 8) == 32e9


def test_a_step_by_hand():
    setup = training(parallel="fsdp", gpus=64, tp=4, micro_batches=2, batch=3)
    found = project(LLAMA, setup, H100, mfu=0.5)
    assert (found.data_rate, found.tensor_rate) == (2 * NETWORK, 450e9)
    env = memory_bindings(LLAMA, training(batch=3))
    compute = 2 * flops_tree(LLAMA, "training").value(env) / 4 / (0.5 * 989e12)
    made = collectives(LLAMA, setup)
    data = sum(one.moved for one in made if one.ranks == 16) / 100e9
    tensor = sum(one.moved for one in made if one.ranks == 4) / 450e9
    assert found.step.value == pytest.approx(compute + data + tensor)
    assert found.overlapped.value == pytest.approx(max(compute, data) + tensor)
    tokens = 16 * 2 * 3 * 8192
    assert found.tokens.value == pytest.approx(tokens / (compute + data + tensor))
    assert found.tokens_overlapped.value == pytest.approx(tokens / (max(compute, data) + tensor))
    assert found.share == pytest.approx((data + tensor) / (compute + data + tensor))


def test_hsdp_is_fsdp_in_a_node_and_adds_shares_up_over_nodes():
    inside, over = training(parallel="fsdp", gpus=8), training(parallel="hsdp", gpus=32)
    assert memory(LLAMA, over) == memory(LLAMA, inside)
    nodes = [made for made in collectives(LLAMA, over) if made.ranks == 4]
    within = [made for made in collectives(LLAMA, over) if made.ranks == 8]
    assert within == collectives(LLAMA, inside)
    gradients = sum(made.bytes for made in within if made.kind == "reduce-scatter")
    assert {made.kind for made in nodes} == {"all-reduce"}
    assert sum(made.bytes for made in nodes) == gradients / 8
    alone, four = (project(LLAMA, setup, H100, 0.5) for setup in (inside, over))
    between = 2 * gradients / 8 * 3 / 4 / NETWORK  # each GPU through its own adapter
    assert four.step.value == pytest.approx(alone.step.value + between)


@pytest.mark.parametrize(("gpus", "tp", "shards"), [(6, 1, 6), (12, 1, 4), (64, 2, 4), (64, 16, 1)])
def test_hsdp_takes_nodes_alike(gpus, tp, shards):
    setup = training(parallel="hsdp", gpus=gpus, tp=tp)
    assert setup.shards == shards
    assert training(parallel="hsdp", gpus=6).exchange == "fsdp"  # on one node there is one copy


@pytest.mark.parametrize("policy", ["attention", "ffn", "block"])
def test_checkpointing_costs_the_flops_it_repeats(policy):
    execution = Execution("unfused", checkpointing=policy)
    setup = training(parallel="zero1", gpus=8, execution=execution)
    found = project(LLAMA, setup, H100, mfu=0.5)
    hardware = account(LLAMA, setup).flops["hardware"].value  # unfused: S×S, as `full` counts it
    assert found.step.children[0].value == pytest.approx(hardware / (0.5 * 989e12))


def test_a_stated_link_replaces_the_table_and_an_unknown_one_projects_nothing():
    setup = training(parallel="zero1", gpus=64)
    slow, fast = (project(TINY, setup, H100, 0.5, link) for link in (1e9, 2e9))
    assert slow.step.children[1].value == 2 * fast.step.children[1].value
    here = dataclasses.replace(H100, link=None)
    assert project(TINY, setup, here, 0.5) is None
    assert account(TINY, setup, machine=here).projection is None
    with pytest.raises(ValueError, match="no link speed is known of h100-sxm"):
        plans(TINY, training(), here, 0.5)


def test_one_gpu_has_no_projection():
    assert account(TINY, training(), machine="h100-sxm").projection is None


def test_plans_cut_layers_as_far_as_they_divide():
    found = plans(LLAMA, training(), H100, 0.5)
    assert [plan.name for plan in found[:8]] == [
        *("zero1", "fsdp", "tp 8"),
        *("zero1", "fsdp", "hsdp", "zero1 × tp 8", "fsdp × tp 8"),
    ]
    assert {plan.setup.tp for plan in plans(preset("gpt2-xl"), training(), H100, 0.5)} == {1}
    chosen = plans(LLAMA, training(gpus=2, tp=2), H100, 0.5)
    assert {plan.setup.tp for plan in chosen} == {1, 2}


def test_a_plan_fits_where_its_peak_does():
    found = plans(LLAMA, training(batch=2), H100, 0.5, counts=(8, 1024))
    peaks = [max(memory(LLAMA, plan.setup).moments.values()) for plan in found]
    assert [plan.fits for plan in found] == [peak <= H100.memory for peak in peaks]
    assert {plan.fits for plan in found} == {True, False}
