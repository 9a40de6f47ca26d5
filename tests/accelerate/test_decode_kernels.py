"""The decoding kernels, each against the formula in float64, at sizes that fit no block."""

import math

import pytest
import torch

from accelerate.gpu import compiled_lines
from scratchlm.accelerate.kernels.triton import decode, decode_attention
from scratchlm.accelerate.kernels.triton import decode_batch as decode_many
from scratchlm.accelerate.kernels.triton.argmax import greatest
from scratchlm.accelerate.kernels.triton.decode_tiles import (
    MAX_ROWS,
    MEASURED,
    SHORT,
    Spread,
    Tile,
    choose_spread,
    choose_spreads,
    choose_tile,
    power_of_two,
)
from scratchlm.model.fused import FusedStep
from scratchlm.ops import CausalMask, reference
from tiny_models import FAMILIES, build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
K = 27  # a width that is no power of two, and odd


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).to(DEVICE)


def relative_error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


def normed(kind, x, gain, shift):
    """Return norm(x) in float64."""
    if kind == decode.NO_NORM:
        return x.double()
    if kind == decode.RMS_NORM:
        return reference.rms_norm(x.double(), gain.double(), 1e-5)
    return reference.layer_norm(x.double(), gain.double(), shift.double(), 1e-5)


@dtypes
@pytest.mark.parametrize("kind", [decode.NO_NORM, decode.RMS_NORM, decode.LAYER_NORM])
@pytest.mark.parametrize(("rows", "tiles", "biased"), [(1, 1, True), (1, 3, False), (3, 2, True)])
def test_three_maps_of_the_norm_in_one_kernel(dtype, kind, rows, tiles, biased):
    x, gain, shift = draw(rows, K) + 2, draw(K, dtype=dtype), draw(K, dtype=dtype)
    sizes, block = (9, 5, 6), 4
    weights = [draw(n, K, dtype=dtype) for n in sizes]
    biases = [draw(n, dtype=dtype) if biased else None for n in sizes]
    outputs = [torch.full((rows, n), math.nan, device=DEVICE) for n in sizes]
    lengths = torch.tensor([7, 0, 3][:rows], device=DEVICE)
    blocks = sum(-(-n // block) for n in sizes)
    given_shift = shift if kind == decode.LAYER_NORM else None
    decode.norm_project[(-(-blocks // tiles),)](
        *(x, gain if kind else None, given_shift, *weights, *biases, *outputs, lengths),
        *(*sizes, K, 1e-5, kind, biased, rows, block, power_of_two(K), tiles, False),
    )
    h = normed(kind, x, gain, shift)
    for weight, bias, output in zip(weights, biases, outputs, strict=True):
        expected = reference.linear(h, weight.double(), None if bias is None else bias.double())
        assert relative_error(output, expected) < TOLERANCE[torch.float32]  # weights are exact
    assert lengths.tolist() == [8, 1, 4][:rows]


@pytest.mark.parametrize("activation", decode.ACTIVATIONS)
@pytest.mark.parametrize(("gated", "biased", "tiles"), [(True, False, 2), (False, True, 1)])
def test_norm_gate_is_the_first_half_of_a_feed_forward_layer(activation, gated, biased, tiles):
    x, gain = draw(2, K), draw(K)
    w1, w3 = draw(11, K) / 5, draw(11, K) / 5 if gated else None
    b1, b3 = (draw(11), draw(11) if gated else None) if biased else (None, None)
    y = torch.full((2, 11), math.nan, device=DEVICE)
    decode.norm_gate[(-(-11 // (4 * tiles)),)](
        *(x, gain, None, w1, w3, b1, b3, y, 11, K, 1e-5, decode.RMS_NORM),
        *(decode.ACTIVATIONS[activation], 2, 4, power_of_two(K), tiles, False),
    )
    h = normed(decode.RMS_NORM, x, gain, None)
    expected = reference.linear(h, w1.double(), None if b1 is None else b1.double())
    expected = reference.ACTIVATIONS[activation](expected)
    if gated:
        expected = expected * reference.linear(h, w3.double(), None if b3 is None else b3.double())
    assert relative_error(y, expected) < TOLERANCE[torch.float32]


@dtypes
@pytest.mark.parametrize("width", [K, 21, 24])  # 21 and 24 also in three fourths of 32
@pytest.mark.parametrize(("rows", "tiles", "biased"), [(1, 1, False), (1, 2, True), (3, 2, False)])
def test_project_add_adds_the_map_to_the_stream(dtype, rows, tiles, biased, width):
    x, v, w = draw(rows, 10), draw(rows, width, dtype=dtype), draw(10, width, dtype=dtype)
    bias = draw(10, dtype=dtype) if biased else None
    y = torch.full((rows, 10), math.nan, device=DEVICE)
    parts, part = Tile(4, 4, fourths=4 if width == K else 3).parts(width)
    decode.project_add[(-(-10 // (4 * tiles)),)](
        *(x, v, None, w, bias, y, 10, width, 1, 1, rows, 4, part, parts, tiles, False)
    )
    product = reference.linear(v.double(), w.double(), None if bias is None else bias.double())
    assert relative_error(y, x.double() + product) < TOLERANCE[torch.float32]


def turned(x, gain, rope, cos, sin, place):
    """Norm and turn one row's heads (heads, d) to their place, in float64."""
    x = x.double()
    if gain is not None:
        x = reference.rms_norm(x, gain.double(), 1e-6)
    if rope == decode_attention.NO_ROPE:
        return x
    layout = "half" if rope == decode_attention.HALF else "interleaved"
    return reference.rope(x[:, None], cos[place, None].double(), sin[place, None].double(), layout)[
        :, 0
    ]


CASES = {  # heads, kv_heads, d, keys at a time, splits, window, qk_norm, rope
    "plain": (2, 2, 8, 16, 1, 0, False, decode_attention.NO_ROPE),
    "half": (2, 2, 8, 16, 1, 0, False, decode_attention.HALF),
    "interleaved": (2, 2, 8, 16, 1, 0, False, decode_attention.INTERLEAVED),
    "grouped, normed, split": (4, 2, 6, 4, 3, 0, True, decode_attention.HALF),
    "window": (2, 1, 10, 4, 1, 5, False, decode_attention.INTERLEAVED),
    "window, split": (2, 1, 10, 2, 5, 7, True, decode_attention.HALF),
    "split, all held at once": (2, 1, 8, 8, 3, 0, False, decode_attention.HALF),
}


@dtypes
@pytest.mark.parametrize("case", CASES)
def test_attention_of_one_token_over_a_ragged_cache(dtype, case):
    heads, kv_heads, d, block, splits, window, qk_norm, rope = CASES[case]
    capacity, lengths = 21, [0, 20, 9]
    rows = len(lengths)
    q, k, v = draw(rows, heads, d), draw(rows, kv_heads, d), draw(rows, kv_heads, d)
    q_gain, k_gain = (draw(d), draw(d)) if qk_norm else (None, None)
    cos, sin = draw(capacity, d // 2), draw(capacity, d // 2)
    keys = draw(rows, kv_heads, capacity, d, dtype=dtype)
    values = draw(rows, kv_heads, capacity, d, dtype=dtype)
    expected_keys, expected_values = keys.double(), values.double()
    out = torch.full((rows, heads, d), math.nan, device=DEVICE)
    partial = torch.full((rows * heads * splits * (d + 2),), math.nan, device=DEVICE)
    tickets = torch.zeros(rows * heads, dtype=torch.int32, device=DEVICE)
    device_lengths = torch.tensor(lengths, device=DEVICE)
    for _ in range(2):  # tickets must stand at zero again, and a second run find the same
        decode_attention.attend[(heads, splits, rows)](
            *(q, k, v, q_gain, k_gain, cos, sin, keys, values, device_lengths),
            *(
                partial,
                tickets,
                out,
                None,
                capacity,
                capacity,
                heads,
                kv_heads,
                d,
                power_of_two(d),
                block,
            ),
            *(splits, power_of_two(splits), 1e-6, qk_norm, rope, window, d**-0.5, False),
        )
    assert not tickets.any()
    for row, length in enumerate(lengths):
        new_key = turned(k[row], k_gain, rope, cos, sin, length)
        expected_keys[row, :, length] = new_key.float().to(dtype).double()
        expected_values[row, :, length] = v[row].to(dtype).double()
        query = turned(q[row], q_gain, rope, cos, sin, length)
        mask = CausalMask(start=length, window=window or None)
        every = expected_keys[row, :, : length + 1], expected_values[row, :, : length + 1]
        mixed = reference.attention(query[None, :, None], every[0][None], every[1][None], mask)
        assert relative_error(out[row], mixed[0, :, 0]) < 3 * TOLERANCE[dtype]
    # The interpreter cuts bfloat16 off where a GPU rounds.
    torch.testing.assert_close(keys.double(), expected_keys, atol=1e-6, rtol=TOLERANCE[dtype])
    torch.testing.assert_close(values.double(), expected_values, atol=0, rtol=TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize(("splits", "block", "tiles"), [(2, 16, 1), (3, 8, 2), (4, 2, 1)])
def test_shares_of_attention_are_added_up_by_the_projection_that_reads_them(
    dtype, splits, block, tiles
):
    heads, d, capacity, lengths = 3, 8, 21, [0, 1, 20]  # the first two leave shares empty
    rows = len(lengths)
    q, k, v = (4 * draw(rows, heads, d) for _ in range(3))  # scores far from each other
    keys, values = (draw(rows, heads, capacity, d, dtype=dtype) for _ in range(2))
    x, w = draw(rows, 10), draw(10, heads * d, dtype=dtype)
    shares = torch.full((splits, rows, heads, d), math.nan, device=DEVICE).to(dtype)
    sums = torch.full((splits, rows, heads), math.nan, device=DEVICE)
    y = torch.full((rows, 10), math.nan, device=DEVICE)
    no_rope = decode_attention.NO_ROPE
    decode_attention.attend[(heads, splits, rows)](
        *(q, k, v, None, None, None, None, keys, values, torch.tensor(lengths, device=DEVICE)),
        *(None, None, shares, sums, capacity, capacity, heads, heads, d, d, block),
        *(splits, power_of_two(splits), 1e-6, False, no_rope, 0, d**-0.5, False),
    )
    decode.project_add[(-(-10 // (4 * tiles)),)](
        *(x, shares, sums, w, None, y, 10, heads * d, d, splits),
        *(rows, 4, power_of_two(heads * d), 1, tiles, False),
    )
    for row, length in enumerate(lengths):
        every = (kept[row : row + 1, :, : length + 1].double() for kept in (keys, values))
        query = q[row].double()[None, :, None]
        mixed = reference.attention(query, *every, CausalMask(start=length))
        added = reference.linear(mixed[0, :, 0].reshape(-1), w.double(), None)
        assert relative_error(y[row], x[row].double() + added) < 3 * TOLERANCE[dtype]


def test_embedding_adds_positions_and_marks_unknown_ids():
    table, positions = draw(7, K), draw(9, K)
    ids, lengths = torch.tensor([6, 7, -1, 0]).to(DEVICE), torch.tensor([8, 0, 0, 2]).to(DEVICE)
    x = torch.zeros(4, K, device=DEVICE)
    decode.embed[(4, 2)](ids, table, positions, lengths, x, 7, K, 16, False)
    torch.testing.assert_close(x[0], table[6] + positions[8])
    torch.testing.assert_close(x[3], table[0] + positions[2])
    assert x[1:3].isnan().all()


def test_add_norm_moves_the_stream_on_and_norms_it():
    x, delta, gain = draw(3, K), draw(3, K), draw(K)
    expected, h = x.double() + delta.double(), torch.zeros(3, K, device=DEVICE)
    decode_many.add_norm[(3,)](x, delta, gain, None, h, K, 1e-5, decode.RMS_NORM, power_of_two(K))
    assert relative_error(x, expected) < TOLERANCE[torch.float32]
    assert relative_error(h, normed(decode.RMS_NORM, expected, gain, None)) < 2e-6


def test_the_greatest_logit_is_found_and_the_first_among_equals():
    logits = draw(3, 45)
    logits[0, [44, 13, 30]] = 9.0
    logits[1, 44] = 9.0
    logits[2] = -math.inf
    logits[2, 17] = -1e30
    ids = torch.full((3,), -1, device=DEVICE)
    best = torch.zeros(3 * 4 * 2, device=DEVICE)
    tickets = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        greatest[(4, 3)](logits, best, tickets, ids, 45, 12, 16, 4, False)
        assert ids.tolist() == [13, 44, 17]


def test_a_row_in_fourths_is_held_whole():
    assert Tile(1, 4).parts(2752) == (1, 4096)
    assert Tile(1, 4, fourths=3).parts(2752) == (3, 1024)
    assert Tile(1, 4, fourths=3).parts(3072) == (3, 1024)
    with pytest.raises(ValueError, match="3073"):
        Tile(1, 4, fourths=3).parts(3073)
    for (_, _, width, _), tile in MEASURED.items():
        parts, part = tile.parts(width)
        assert parts * part >= width


def test_the_rules_give_what_the_kernels_can_take():
    for kernel in ("qkv", "out", "gate", "down", "head"):
        for rows, width in ((1, 1), (1600, 6400), (151936, 1024), (29, 16)):
            tile = choose_tile(kernel, rows, width, 2)
            assert tile.rows == power_of_two(tile.rows)
            assert tile.warps in (4, 8)
    for capacity in (1, 100, 513, 131072):
        spread = choose_spread(capacity, 16, 1, 128)
        assert spread.keys == power_of_two(spread.keys)
        assert 1 <= spread.splits <= 64


@pytest.mark.parametrize(("heads", "d_head"), [(25, 64), (16, 64), (16, 128)])
@pytest.mark.parametrize("reach", [257, 320, 512, 1024])
def test_past_a_block_a_row_is_held_at_once_and_nobody_draws_a_ticket(reach, heads, d_head):
    spread = choose_spread(reach, heads, 1, d_head)
    assert spread.keys * spread.splits >= reach
    assert spread.handed_on
    # keys and values in half of the registers, the rest to compute
    assert 2 * spread.keys * d_head <= 128 * 32 * spread.warps


def test_short_rows_and_long_ones_are_attended_each_in_their_way():
    both = choose_spreads(320, 16, 1, 64)
    assert both == {SHORT: choose_spread(SHORT, 16, 1, 64), 320: choose_spread(320, 16, 1, 64)}
    assert both[SHORT].splits == 1
    assert both[320].splits > 1
    assert list(choose_spreads(100, 16, 1, 64)) == [100]
    assert list(choose_spreads(320, 16, MAX_ROWS + 1, 64)) == [320]  # products of the library


def test_shares_are_handed_on_where_few_rows_and_whole_heads_read_them():
    assert not choose_spread(320, 16, 1, 80).handed_on
    assert not choose_spread(320, 16, MAX_ROWS + 1, 64).handed_on
    assert not choose_spread(100_000, 16, 1, 64).handed_on
    model = build(FAMILIES["llama"], dtype=torch.float32)
    with pytest.raises(ValueError, match="few rows"):
        FusedStep(model, model.new_cache(MAX_ROWS + 1, 16), spread=Spread(16, 4, 2, handed_on=True))


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mistral"])
def test_everything_compiles_and_asks_for_weights_before_it_waits(family):
    found = [line.split() for line in compiled_lines("compile_decode.py", family)]
    assert {name for name, _, _ in found} >= {"embed", "norm_project", "attend", "greatest"}
    for name, early, _ in found:
        if name in ("norm_project", "norm_gate", "project_add"):
            assert int(early) >= 2, found
