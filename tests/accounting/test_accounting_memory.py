"""Memory, time, money, what fits, and sweeps: properties that must hold, and hand-made sums."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchlm.accelerate import lm_head_loss
from scratchlm.accounting import (
    MACHINES,
    Execution,
    Setup,
    account,
    component_shares,
    count_parameters,
    fits,
    machine,
    memory,
    memory_bindings,
    mfu,
    parse_sweep,
    peak_bytes,
    roofline,
    suggested_tokens,
    summarize,
    sweep,
    training_flops_per_token,
    training_run,
)
from scratchlm.accounting.activations import SLICE_ELEMENTS, SLICE_ROWS
from scratchlm.accounting.fits import largest_that
from scratchlm.accounting.scaling import SWEEPS
from scratchlm.config import ModelConfig, preset

XL = preset("cs336-gpt2-xl")
SMALL = preset("cs336-gpt2")
GIB = 2**30


def training(**setup):
    return Setup(phase="training", **setup)


def item(config, name, setup):
    return memory(config, setup).training[name].value


# Memory


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"), [("adamw", 8), ("sgd", 0), ("sgd-momentum", 4)]
)
def test_optimizer_state_per_parameter(optimizer, per_parameter):
    state = item(SMALL, "optimizer state", training(optimizer=optimizer))
    assert state == per_parameter * count_parameters(SMALL).unique


def test_muon_keeps_one_number_for_matrices_and_two_for_the_rest():
    matrices = 12 * (4 * 768 * 768 + 3 * 768 * 3072)
    rest = count_parameters(SMALL).unique - matrices
    assert item(SMALL, "optimizer state", training(optimizer="muon")) == 4 * matrices + 8 * rest


def test_checkpointing_saves_memory_in_the_order_of_what_it_drops():
    setups = {
        policy: training(batch=8, execution=Execution(checkpointing=policy))
        for policy in ("none", "attention", "ffn", "block")
    }
    peaks = {policy: peak_bytes(XL, setup) for policy, setup in setups.items()}
    assert peaks["block"] < peaks["ffn"] < peaks["attention"] < peaks["none"]


def test_unfused_attention_holds_tables_that_grow_with_the_square():
    def extra(context):
        unfused = training(context=context, execution=Execution(attention="unfused"))
        return peak_bytes(XL, unfused) - peak_bytes(XL, training(context=context))

    assert extra(8192) / extra(4096) == pytest.approx(4, rel=0.02)


def test_a_fused_loss_never_holds_all_logits():
    unfused = training(batch=64, execution=Execution(loss="unfused"))
    saved = peak_bytes(SMALL, unfused) - peak_bytes(SMALL, training(batch=64))
    logits = 64 * 1024 * 50_257
    assert 11 * logits < saved < 12 * logits
    assert item(SMALL, "a slice of logits", training(batch=64)) <= 2 * SLICE_ELEMENTS * 1.02


@given(st.integers(1, 2**22), st.integers(1, 300_000))
def test_the_fused_loss_takes_the_slices_that_the_op_takes(rows, vocab):
    config = SMALL.replace(vocab_size=vocab, context_length=rows)
    env = memory_bindings(config, training())
    length = vocab if vocab % 8 == 0 else -(-vocab // 128) * 128
    assert env["V_p"] == length
    assert SLICE_ROWS.value(env) == lm_head_loss._chunk_size(rows, length, "cuda")


def test_the_fused_loss_holds_as_many_logits_as_the_op():
    assert lm_head_loss.CHUNK_ELEMENTS["cuda"] == SLICE_ELEMENTS


@pytest.mark.parametrize(
    ("precision", "vocab", "each"),
    [
        ("bf16-mixed", 50_257, 2),
        ("bf16-mixed", 50_304, 2),
        ("fp32", 50_257, 4),
        ("fp32", 50_304, 0),
        ("bf16", 50_303, 2),
        ("bf16", 50_304, 0),
    ],
)
def test_the_head_is_copied_where_it_must_be_cast_or_padded(precision, vocab, each):
    setup = training(precision=precision, batch=16)
    copied = item(SMALL.replace(vocab_size=vocab), "LM head, cast or padded", setup)
    assert copied == each * 50_304 * 768


def test_fsdp_divides_the_state_and_ddp_does_not():
    alone, ddp = training(), training(parallel="ddp", gpus=8)
    fsdp = training(parallel="fsdp", gpus=8)
    for name in ("weights", "optimizer state"):
        assert item(XL, name, fsdp) == item(XL, name, alone) / 8
        assert item(XL, name, ddp) == item(XL, name, alone)
    assert peak_bytes(XL, fsdp) < peak_bytes(XL, alone) < peak_bytes(XL, ddp)


def test_tp_divides_matrices_and_repeats_norms():
    llama = preset("llama3-8b")
    norms = (2 * 32 + 1) * 4096
    whole = count_parameters(llama).unique - norms
    split = item(llama, "weights", training(parallel="tp", gpus=8))
    assert split == 4 * (whole / 8 + norms)


def test_tp_refuses_heads_it_cannot_divide():
    with pytest.raises(ValueError, match="num_heads divisible by tp; got num_heads=25, tp=2"):
        memory(XL, training(parallel="tp", gpus=2))


def test_accumulated_gradients_are_there_at_the_loss_too():
    grown = peak_bytes(XL, training(batch=8, accumulate=True)) - peak_bytes(XL, training(batch=8))
    assert grown == 4 * count_parameters(XL).unique


def test_kv_cache_bytes_by_hand():
    llama = preset("llama3-8b")
    held = memory(llama, Setup(phase="decode", batch=3, cache=99))
    assert held.kv_cache_per_token == 2 * 32 * 8 * 128 * 2
    assert held.kv_cache == 3 * 100 * held.kv_cache_per_token


def test_a_dtype_of_half_the_size_serves_in_about_half_the_memory():
    low, high = (peak_bytes(XL, Setup(precision=p), serving=True) for p in ("bf16", "fp32"))
    assert low / high == pytest.approx(0.5, abs=0.01)


# What fits


@given(st.integers(0, 5000))
def test_the_largest_that_holds_is_found(limit):
    assert largest_that(lambda n: n <= limit, most=4096) == min(limit, 4096)


@pytest.mark.parametrize("serving", [False, True])
def test_what_fits_fits_and_one_more_does_not(serving):
    room = 40 * GIB
    found = fits(XL, training(), room, serving=serving)

    def needed(config=XL, **changes):
        return peak_bytes(config, training(**changes), serving)

    assert needed(batch=found.batch) <= room < needed(batch=found.batch + 1)
    assert peak_bytes(found.model, training(), serving) <= room
    longer = XL.replace(context_length=found.context)
    assert peak_bytes(longer, training(cache=found.context - 1), serving) <= room
    assert found.parameters == count_parameters(found.model).unique > XL.num_layers


def test_what_cannot_fit_is_said_so():
    found = fits(XL, training(), 2**20)
    assert (found.batch, found.context, found.model) == (0, 0, None)


# Machines, time, money


def test_a_machine_is_found_by_its_common_name_and_a_wrong_one_answered():
    assert machine("H100").name == "h100-sxm"
    assert machine("A100-80").memory == 80 * GIB
    with pytest.raises(ValueError, match="unknown GPU 'h2000'; did you mean 'h200'"):
        machine("h2000")


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_is_plausible(name):
    m = MACHINES[name]
    assert 8 * GIB < m.memory < 300 * GIB
    assert 1e11 < m.bandwidth < 1e13
    assert 0 < m.fp32 <= m.peak("bf16") < 1e16


def test_decoding_is_bound_by_memory_and_training_by_compute():
    decode = roofline(XL, Setup(phase="decode"), machine("h200"))
    assert {part.bound for part in decode.parts} == {"memory"}
    step = roofline(XL, training(batch=16), machine("h200"))
    assert all(part.bound == "compute" for part in step.parts if part.flops)


def test_a_decode_step_cannot_be_faster_than_reading_weights_and_cache_once():
    decode = roofline(XL, Setup(phase="decode", cache=1023), machine("h200"))
    cache = memory(XL, Setup(phase="decode", cache=1023)).kv_cache
    read = 2 * count_parameters(XL).matmul + cache
    assert decode.seconds == pytest.approx(read / 4.8e12, rel=0.01)


def test_roofline_of_a_training_step_counts_the_causal_flops():
    h200 = machine("h200")
    plain = training(batch=2, execution=Execution(attention="unfused"))
    result = account(XL, plain, machine=h200)
    assert sum(p.flops for p in result.roofline.parts) == result.flops["causal"].value
    fused = account(XL, training(batch=2), machine=h200)
    assert sum(p.flops for p in fused.roofline.parts) == fused.flops["hardware"].value
    again = account(XL, training(batch=2, execution=Execution(checkpointing="block")), machine=h200)
    assert sum(p.flops for p in again.roofline.parts) == again.flops["hardware"].value


def test_a_fused_loss_passes_over_the_logits_in_their_own_dtype():
    def moved(phase, how):
        asked = Setup(phase=phase, execution=Execution(loss=how))
        parts = roofline(XL, asked, machine("h200")).parts
        return next(part.bytes for part in parts if part.name == "loss")

    logits = 1024 * 50_257
    assert moved("training", "fused") == 2 * 2 * logits  # read once, written once
    assert moved("forward", "fused") == 2 * logits
    assert moved("training", "unfused") == 8 * 4 * logits


def test_an_mfu_names_its_convention_and_its_peak():
    found = mfu(10_000, XL, 1024, machine("h200"))
    assert found.value == pytest.approx(10_000 * training_flops_per_token(XL, 1024) / 989e12)
    assert str(found).endswith("(full FLOPs of h200 bf16 dense peak, 989 TFLOP/s)")
    measured = mfu(10_000, XL, 1024, 790e12, convention="causal")
    assert measured.convention == "causal"
    assert "measured 790 TFLOP/s" in str(measured)


def test_the_anchor_run_has_the_anchors_mfu():
    medium = ModelConfig(50_304, 1_024, 1_024, 24, 16, 2_752)
    # 92,363 tokens/s were 0.285 of a measured 788 to 799 TFLOP/s
    assert 0.282 < mfu(92_363, medium, 1024, 793e12).value < 0.288


def test_a_run_on_twice_the_gpus_takes_half_the_time_and_the_same_money():
    one = training_run(XL, machine("h100"), 1024, tokens=10**10)
    two = training_run(XL, machine("h100"), 1024, tokens=10**10, gpus=2)
    assert two.days == pytest.approx(one.days / 2)
    assert two.dollars == pytest.approx(one.dollars)
    flops = training_flops_per_token(XL, 1024) * 10**10
    assert one.seconds.value == pytest.approx(flops / (0.4 * 989e12))


def test_suggested_tokens_are_twenty_per_active_parameter():
    assert suggested_tokens(XL) == 20 * 2_127_057_600
    moe = preset("qwen3-30b-a3b")
    assert suggested_tokens(moe) == 20 * count_parameters(moe).active


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"utilisation": 0}, "mfu must lie"), ({"price": -1}, "price"), ({"tokens": 0}, "tokens")],
)
def test_nonsense_runs_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        training_run(XL, machine("h100"), 1024, **wrong)


# Scaling


def test_a_sweep_doubles_steps_or_lists():
    assert parse_sweep("context_length=1024..8192") == ("context_length", [1024, 2048, 4096, 8192])
    assert parse_sweep("num_layers=12..48+12") == ("num_layers", [12, 24, 36, 48])
    assert parse_sweep("batch=1,3,7") == ("batch", [1, 3, 7])


@pytest.mark.parametrize(
    "text", ["", "batch", "batch=", "colour=1..2", "batch=5..1", "batch=1..x", "batch=1..9999+1"]
)
def test_a_wrong_sweep_is_refused(text):
    with pytest.raises(ValueError, match="sweep"):
        parse_sweep(text)


@pytest.mark.parametrize("field", SWEEPS)
def test_everything_grows_along_every_sweep(field):
    config = preset("qwen3-30b-a3b") if field == "num_experts" else SMALL
    start = {"d_model": 768, "num_experts": 16, "context_length": 1024}.get(field, 8)
    rows = sweep(config, training(), field, [start, 2 * start, 4 * start])
    for before, after in itertools.pairwise(rows):
        assert before.training_bytes < after.training_bytes
        assert before.flops <= after.flops


def test_widening_keeps_the_heads_width():
    wide = sweep(SMALL, Setup(), "d_model", [1536])[0]
    by_hand = dataclasses.replace(SMALL, d_model=1536, num_heads=24, num_kv_heads=24, d_ff=6144)
    assert wide.parameters == count_parameters(by_hand).unique
    with pytest.raises(ValueError, match="d_model must be a multiple of 64"):
        sweep(SMALL, Setup(), "d_model", [800])


@pytest.mark.parametrize("phase", ["forward", "training", "decode"])
@pytest.mark.parametrize("convention", ["full", "causal", "hardware"])
def test_component_shares_sum_to_one(phase, convention):
    row = summarize("x", preset("qwen3-30b-a3b"), Setup(phase=phase, context=512), convention)
    assert sum(row.shares.values()) == pytest.approx(1)


def test_6nd_knows_no_components():
    assert component_shares(account(SMALL).flops["6ND"]) == {}


def test_account_takes_a_setup_or_its_fields():
    assert account(SMALL, batch=4).setup == Setup(batch=4)
    with pytest.raises(TypeError, match="a Setup or its fields"):
        account(SMALL, Setup(), batch=4)
