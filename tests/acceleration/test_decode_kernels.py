"""Each decode kernel matches the formula in float64, at sizes that fit no block."""

import math

import pytest
import torch

from acceleration.gpu import compiled_lines
from scratchlm.accelerate.gpu_decode import GPUStep
from scratchlm.accelerate.kernels.triton import decode, decode_attention, decode_batch
from scratchlm.accelerate.kernels.triton.argmax import argmax
from scratchlm.accelerate.kernels.triton.decode_tiles import (
    MAX_ROWS,
    MEASURED_TILES,
    SHORT_KV_LEN,
    KVSplits,
    Tile,
    choose_tile,
    kv_splits_for,
    power_of_two,
)
from scratchlm.ops import CausalMask, reference
from scratchlm.paged import PagedCache
from tiny_models import FAMILIES, build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
K = 27  # an odd width


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).to(DEVICE)


def relative_error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


def normed(kind, x, weight, bias):
    """Return norm(x) in float64."""
    if kind == decode.NO_NORM:
        return x.double()
    if kind == decode.RMS_NORM:
        return reference.rms_norm(x.double(), weight.double(), 1e-5)
    return reference.layer_norm(x.double(), weight.double(), bias.double(), 1e-5)


@dtypes
@pytest.mark.parametrize("kind", [decode.NO_NORM, decode.RMS_NORM, decode.LAYER_NORM])
@pytest.mark.parametrize(("rows", "tiles", "biased"), [(1, 1, True), (1, 3, False), (3, 2, True)])
def test_norm_project_matches_norm_and_three_linears(dtype, kind, rows, tiles, biased):
    x, norm_weight, norm_bias = draw(rows, K) + 2, draw(K, dtype=dtype), draw(K, dtype=dtype)
    sizes, block = (9, 5, 6), 4
    weights = [draw(n, K, dtype=dtype) for n in sizes]
    biases = [draw(n, dtype=dtype) if biased else None for n in sizes]
    outputs = [torch.full((rows, n), math.nan, device=DEVICE) for n in sizes]
    lengths = torch.tensor([7, 0, 3][:rows], device=DEVICE)
    blocks = sum(-(-n // block) for n in sizes)
    given_bias = norm_bias if kind == decode.LAYER_NORM else None
    decode.norm_project[(-(-blocks // tiles),)](
        *(x, norm_weight if kind else None, given_bias, *weights, *biases, None, None, None),
        *(
            *outputs,
            lengths,
            *sizes,
            K,
            1e-5,
            kind,
            biased,
            rows,
            block,
            power_of_two(K),
            tiles,
            False,
        ),
    )
    h = normed(kind, x, norm_weight, norm_bias)
    for weight, bias, output in zip(weights, biases, outputs, strict=True):
        expected = reference.linear(h, weight.double(), None if bias is None else bias.double())
        assert relative_error(output, expected) < TOLERANCE[torch.float32]  # weights are exact
    assert lengths.tolist() == [8, 1, 4][:rows]


@pytest.mark.parametrize("activation", decode.ACTIVATIONS)
@pytest.mark.parametrize(("gated", "biased", "tiles"), [(True, False, 2), (False, True, 1)])
def test_norm_up_matches_the_first_half_of_a_feed_forward_layer(activation, gated, biased, tiles):
    x, norm_weight = draw(2, K), draw(K)
    w1, w3 = draw(11, K) / 5, draw(11, K) / 5 if gated else None
    b1, b3 = (draw(11), draw(11) if gated else None) if biased else (None, None)
    y = torch.full((2, 11), math.nan, device=DEVICE)
    decode.norm_up[(-(-11 // (4 * tiles)),)](
        *(x, norm_weight, None, w1, w3, b1, b3, None, None, y, 11, K, 1e-5, decode.RMS_NORM),
        *(decode.ACTIVATIONS[activation], 2, 4, power_of_two(K), tiles, False),
    )
    h = normed(decode.RMS_NORM, x, norm_weight, None)
    expected = reference.linear(h, w1.double(), None if b1 is None else b1.double())
    expected = reference.ACTIVATIONS[activation](expected)
    if gated:
        expected = expected * reference.linear(h, w3.double(), None if b3 is None else b3.double())
    assert relative_error(y, expected) < TOLERANCE[torch.float32]


@dtypes
@pytest.mark.parametrize("width", [K, 21, 24])  # 21 and 24 fit three quarters of 32
@pytest.mark.parametrize(("rows", "tiles", "biased"), [(1, 1, False), (1, 2, True), (3, 2, False)])
def test_project_add_adds_a_linear_to_the_residual_stream(dtype, rows, tiles, biased, width):
    x, v, w = draw(rows, 10), draw(rows, width, dtype=dtype), draw(10, width, dtype=dtype)
    bias = draw(10, dtype=dtype) if biased else None
    y = torch.full((rows, 10), math.nan, device=DEVICE)
    chunks, chunk = Tile(4, 4, quarters=4 if width == K else 3).k_chunks(width)
    decode.project_add[(-(-10 // (4 * tiles)),)](
        *(x, v, None, w, bias, None, y, 10, width, 1, 1, rows, 4, chunk, chunks, tiles, False)
    )
    product = reference.linear(v.double(), w.double(), None if bias is None else bias.double())
    assert relative_error(y, x.double() + product) < TOLERANCE[torch.float32]


def norm_rope(x, norm_weight, rope, cos, sin, position):
    """Apply QK-norm and RoPE to one row's heads (heads, d), in float64."""
    x = x.double()
    if norm_weight is not None:
        x = reference.rms_norm(x, norm_weight.double(), 1e-6)
    if rope == decode_attention.NO_ROPE:
        return x
    layout = "half" if rope == decode_attention.HALF else "interleaved"
    tables = (table[position, None].double() for table in (cos, sin))
    return reference.rope(x[:, None], *tables, layout)[:, 0]


CASES = {  # heads, kv_heads, d, block_keys, splits, window, qk_norm, rope
    "plain": (2, 2, 8, 16, 1, 0, False, decode_attention.NO_ROPE),
    "half": (2, 2, 8, 16, 1, 0, False, decode_attention.HALF),
    "interleaved": (2, 2, 8, 16, 1, 0, False, decode_attention.INTERLEAVED),
    "GQA, QK-norm, split": (4, 2, 6, 4, 3, 0, True, decode_attention.HALF),
    "window": (2, 1, 10, 4, 1, 5, False, decode_attention.INTERLEAVED),
    "window, split": (2, 1, 10, 2, 5, 7, True, decode_attention.HALF),
    "split, one block each": (2, 1, 8, 8, 3, 0, False, decode_attention.HALF),
}


PAGE = 4


def to_pages(cache):
    """Cut (rows, kv_heads, capacity, d) into pages in a random order; return them and the tables.

    What is beyond the capacity is NaN: nobody may read it.
    """
    rows, kv_heads, capacity, d = cache.shape
    count = -(-capacity // PAGE)
    padded = cache.new_full((rows, kv_heads, count * PAGE, d), math.nan)
    padded[:, :, :capacity] = cache
    pages = padded.unflatten(2, (count, PAGE)).transpose(1, 2).flatten(0, 1)
    order = torch.randperm(rows * count, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    shuffled = torch.empty_like(pages)
    shuffled[order] = pages
    return shuffled, order.to(torch.int32).view(rows, count)


def from_pages(pages, tables, capacity):
    """Undo `to_pages`."""
    return pages[tables.long()].transpose(1, 2).flatten(2, 3)[:, :, :capacity]


@dtypes
@pytest.mark.parametrize("case", CASES)
def test_decode_attention_matches_the_reference_over_a_ragged_cache(dtype, case):
    heads, kv_heads, d, block, splits, window, qk_norm, rope = CASES[case]
    capacity, lengths = 21, [0, 20, 9]
    rows = len(lengths)
    q, k, v = draw(rows, heads, d), draw(rows, kv_heads, d), draw(rows, kv_heads, d)
    q_weight, k_weight = (draw(d), draw(d)) if qk_norm else (None, None)
    cos, sin = draw(capacity, d // 2), draw(capacity, d // 2)
    keys = draw(rows, kv_heads, capacity, d, dtype=dtype)
    values = draw(rows, kv_heads, capacity, d, dtype=dtype)
    expected_keys, expected_values = keys.double(), values.double()
    out = torch.full((rows, heads, d), math.nan, device=DEVICE)
    partial = torch.full((rows * heads * splits * (d + 2),), math.nan, device=DEVICE)
    tickets = torch.zeros(rows * heads, dtype=torch.int32, device=DEVICE)
    device_lengths = torch.tensor(lengths, device=DEVICE)
    key_pages, tables = to_pages(keys)
    value_pages, _ = to_pages(values)
    for _ in range(2):  # tickets must be reset, and a second run give the same
        decode_attention.decode_attention[(heads, splits, rows)](
            *(q, k, v, q_weight, k_weight, cos, sin, key_pages, value_pages, device_lengths),
            *(tables, partial, tickets, out, None, PAGE, tables.shape[1], capacity),
            *(heads, kv_heads, d, power_of_two(d), block),
            *(splits, power_of_two(splits), 1e-6, qk_norm, rope, window, d**-0.5, False),
        )
    assert not tickets.any()
    keys, values = (from_pages(pages, tables, capacity) for pages in (key_pages, value_pages))
    for row, length in enumerate(lengths):
        new_key = norm_rope(k[row], k_weight, rope, cos, sin, length)
        expected_keys[row, :, length] = new_key.float().to(dtype).double()
        expected_values[row, :, length] = v[row].to(dtype).double()
        query = norm_rope(q[row], q_weight, rope, cos, sin, length)
        mask = CausalMask(start=length, window=window or None)
        kept = (kv[row : row + 1, :, : length + 1] for kv in (expected_keys, expected_values))
        attn_out = reference.attention(query[None, :, None], *kept, mask)
        assert relative_error(out[row], attn_out[0, :, 0]) < 3 * TOLERANCE[dtype]
    # The interpreter truncates to bfloat16 where a GPU rounds.
    torch.testing.assert_close(keys.double(), expected_keys, atol=1e-6, rtol=TOLERANCE[dtype])
    torch.testing.assert_close(values.double(), expected_values, atol=0, rtol=TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize(("splits", "block", "tiles"), [(2, 16, 1), (3, 8, 2), (4, 2, 1)])
def test_deferred_combine_in_project_add_matches_the_reference(dtype, splits, block, tiles):
    heads, d, capacity, lengths = 3, 8, 21, [0, 1, 20]  # the first two leave splits empty
    rows = len(lengths)
    q, k, v = (4 * draw(rows, heads, d) for _ in range(3))  # so that scores differ widely
    keys, values = (draw(rows, heads, capacity, d, dtype=dtype) for _ in range(2))
    x, w = draw(rows, 10), draw(10, heads * d, dtype=dtype)
    split_out = torch.full((splits, rows, heads, d), math.nan, device=DEVICE).to(dtype)
    lse = torch.full((splits, rows, heads), math.nan, device=DEVICE)
    y = torch.full((rows, 10), math.nan, device=DEVICE)
    no_rope = decode_attention.NO_ROPE
    (key_pages, tables), (value_pages, _) = to_pages(keys), to_pages(values)
    decode_attention.decode_attention[(heads, splits, rows)](
        *(q, k, v, None, None, None, None, key_pages, value_pages),
        *(torch.tensor(lengths, device=DEVICE), tables, None, None, split_out, lse),
        *(PAGE, tables.shape[1], capacity, heads, heads, d, d, block),
        *(splits, power_of_two(splits), 1e-6, False, no_rope, 0, d**-0.5, False),
    )
    keys, values = (from_pages(pages, tables, capacity) for pages in (key_pages, value_pages))
    decode.project_add[(-(-10 // (4 * tiles)),)](
        *(x, split_out, lse, w, None, None, y, 10, heads * d, d, splits),
        *(rows, 4, power_of_two(heads * d), 1, tiles, False),
    )
    for row, length in enumerate(lengths):
        kept = (kv[row : row + 1, :, : length + 1].double() for kv in (keys, values))
        query = q[row].double()[None, :, None]
        attn_out = reference.attention(query, *kept, CausalMask(start=length))
        projected = reference.linear(attn_out[0, :, 0].reshape(-1), w.double(), None)
        assert relative_error(y[row], x[row].double() + projected) < 3 * TOLERANCE[dtype]


def test_embed_adds_positions_and_gives_nan_for_invalid_ids():
    table, positions = draw(7, K), draw(9, K)
    ids, lengths = torch.tensor([6, 7, -1, 0]).to(DEVICE), torch.tensor([8, 0, 0, 2]).to(DEVICE)
    x = torch.zeros(4, K, device=DEVICE)
    decode.embed[(4, 2)](ids, table, positions, lengths, x, 7, K, 16, False)
    torch.testing.assert_close(x[0], table[6] + positions[8])
    torch.testing.assert_close(x[3], table[0] + positions[2])
    assert x[1:3].isnan().all()


def test_add_norm_updates_the_residual_stream_and_normalizes_it():
    x, delta, norm_weight = draw(3, K), draw(3, K), draw(K)
    expected, h = x.double() + delta.double(), torch.zeros(3, K, device=DEVICE)
    decode_batch.add_norm[(3,)](
        x, delta, norm_weight, None, h, K, 1e-5, decode.RMS_NORM, power_of_two(K)
    )
    assert relative_error(x, expected) < TOLERANCE[torch.float32]
    assert relative_error(h, normed(decode.RMS_NORM, expected, norm_weight, None)) < 2e-6


def test_argmax_returns_the_first_of_equal_maxima():
    logits = draw(3, 45)
    logits[0, [44, 13, 30]] = 9.0
    logits[1, 44] = 9.0
    logits[2] = -math.inf
    logits[2, 17] = -1e30
    ids, previous = (torch.full((3,), -1, device=DEVICE) for _ in range(2))
    partial = torch.zeros(3 * 4 * 2, device=DEVICE)
    tickets = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        before = ids.clone()
        argmax[(4, 3)](logits, partial, tickets, ids, previous, 45, 12, 16, 4, False)
        assert torch.equal(previous, before)
        assert ids.tolist() == [13, 44, 17]


def test_k_chunks_cover_the_whole_row():
    assert Tile(1, 4).k_chunks(2752) == (1, 4096)
    assert Tile(1, 4, quarters=3).k_chunks(2752) == (3, 1024)
    assert Tile(1, 4, quarters=3).k_chunks(3072) == (3, 1024)
    with pytest.raises(ValueError, match="3073"):
        Tile(1, 4, quarters=3).k_chunks(3073)
    for (_, _, width, _), tile in MEASURED_TILES.items():
        chunks, chunk = tile.k_chunks(width)
        assert chunks * chunk >= width


def test_chosen_tiles_and_kv_splits_are_valid_for_the_kernels():
    for kernel in ("qkv", "out", "gate", "down", "head"):
        for rows, width in ((1, 1), (1600, 6400), (151936, 1024), (29, 16)):
            tile = choose_tile(kernel, rows, width, 2)
            assert tile.rows == power_of_two(tile.rows)
            assert tile.warps in (4, 8)
    for capacity in (1, 100, 513, 131072):
        splits = kv_splits_for(capacity, 16, 1, 128)
        assert splits.block_keys == power_of_two(splits.block_keys)
        assert 1 <= splits.num_splits <= 64


@pytest.mark.parametrize(("heads", "d_head"), [(25, 64), (16, 64), (16, 128)])
@pytest.mark.parametrize("max_kv_len", [257, 320, 512, 1024])
def test_medium_kv_len_is_loaded_at_once_and_combined_later(max_kv_len, heads, d_head):
    splits = kv_splits_for(max_kv_len, heads, 1, d_head)
    assert splits.block_keys * splits.num_splits >= max_kv_len
    assert splits.deferred_combine
    # keys and values take half of the registers
    assert 2 * splits.block_keys * d_head <= 128 * 32 * splits.warps


def test_short_rows_are_not_split():
    assert kv_splits_for(SHORT_KV_LEN, 16, 1, 64).num_splits == 1
    assert kv_splits_for(320, 16, 1, 64).num_splits > 1


def test_deferred_combine_needs_few_rows_and_a_power_of_two_head():
    assert not kv_splits_for(320, 16, 1, 80).deferred_combine
    assert not kv_splits_for(320, 16, MAX_ROWS + 1, 64).deferred_combine
    assert not kv_splits_for(100_000, 16, 1, 64).deferred_combine
    model = build(FAMILIES["llama"].replace(d_head=6), dtype=torch.float32)
    with pytest.raises(ValueError, match="heads of a power of two"):
        GPUStep(
            model,
            PagedCache(model.config, 1, 16),
            rows=1,
            max_kv_len=16,
            kv_splits=KVSplits(16, 4, 2, deferred_combine=True),
        )


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mistral"])
def test_kernels_compile_and_load_weights_before_the_pdl_wait(family):
    found = [line.split() for line in compiled_lines("compile_decode.py", family)]
    assert {name for name, _, _ in found} >= {"embed", "norm_project", "decode_attention", "argmax"}
    for name, prefetched, _ in found:
        if name in ("norm_project", "norm_up", "project_add"):
            assert int(prefetched) >= 2, found
    early = {name for name, prefetched, _ in found if int(prefetched)}  # where sizes allow it
    assert early >= {
        *("norm_project_batch", "norm_up_batch", "project_add_batch"),
        *("norm_project:int8", "norm_up:int8", "project_add:int8"),
        *("norm_project_blocks:q8_0", "norm_up_blocks:q8_0", "project_add_blocks:q8_0"),
    }
    assert {name for name, _, _ in found} >= {"project_add_blocks:q4_0", "project_add_blocks:q4_k"}
