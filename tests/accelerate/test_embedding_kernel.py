"""The lookup and the gradient of its table: the kernels' sums are those of the definition."""

import pytest
import torch

from accelerate.gpu import compiled_lines
from scratchlm.accelerate.kernels.triton import embedding as kernel
from scratchlm.accelerate.kernels.triton.embedding import (
    Lookup,
    embedding_backward,
    embedding_forward,
)
from scratchlm.ops import OPS, fast, ranges, reference
from scratchlm.training.learner import apply_precision
from tiny_models import FAMILIES, build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CHUNK = 4
ROWS = kernel.ROWS  # as it is compiled


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Let few tokens fill many chunks, and few columns several blocks."""
    sizes = {"CHUNK": CHUNK, "ROWS": 2, "BLOCK": 16, "SHARES": 2, "SHARE_BLOCK": 8}
    for name, size in sizes.items():
        monkeypatch.setattr(kernel, name, size)


def exact(above, ids, vocab, padding_id=None):
    """Add up one by one, in float64."""
    rows = above.reshape(-1, above.shape[-1]).double()
    total = rows.new_zeros(vocab, rows.shape[1]).index_add_(0, ids.flatten(), rows)
    if padding_id is not None:
        total[padding_id] = 0
    return total


def assert_adds_up(ids, vocab, width=10, above=torch.float32, table=torch.float32, padding=None):
    ids = ids.to(DEVICE)
    slopes = torch.randn(*ids.shape, width, device=DEVICE).to(above)
    found = embedding_backward(slopes, ids, vocab, padding, table)
    assert (found.dtype, found.shape) == (table, (vocab, width))
    truth = exact(slopes, ids, vocab, padding)
    size = exact(slopes.abs(), ids, vocab) + 1e-30  # what rounding is relative to
    assert float(((found.double() - truth).abs() / size).max()) < TOLERANCE[table]
    return found


def in_runs(*lengths):
    """Return ids that stand as often as this, out of order; sorted they are these runs."""
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return ids[torch.randperm(len(ids))]


RUNS = {
    "one": (1,),
    "all different": (1,) * 11,
    "one id everywhere": (50,),
    "one id in a chunk": (CHUNK,),
    "one id in whole chunks": (6 * CHUNK,),
    "from border to border": (CHUNK, 2 * CHUNK, CHUNK, 5 * CHUNK, CHUNK),
    "up to a border and from it": (3, 1, 2, 2, 1, 7, 1, 3),
    "across one border": (3, 2, 3, 1, 1, 3, 4, 3),
    "across many borders": (2, 23, 3, 17, 1, 9),
    "a chunk more, a place less, a place more": (CHUNK + 1, CHUNK - 1, 2 * CHUNK - 1, CHUNK + 2),
}


@pytest.mark.parametrize("runs", RUNS)
def test_the_gradient_of_a_row_is_the_sum_over_its_places(runs):
    ids = in_runs(*RUNS[runs])
    assert_adds_up(ids, len(RUNS[runs]))


@pytest.mark.parametrize("draw", range(6))
def test_whatever_the_runs(draw):
    generator = torch.Generator().manual_seed(draw)
    lengths = torch.randint(1, [2, 4, 12][draw % 3], (7,), generator=generator)
    assert_adds_up(in_runs(*lengths.tolist()), 7, width=1 + 3 * draw)


@pytest.mark.parametrize(
    ("tokens", "vocab", "width"), [(17, 7, 10), (1, 3, 1), (25, 2, 33), (9, 4000, 5)]
)
def test_sizes_that_fit_nothing(tokens, vocab, width):
    assert_adds_up(torch.randint(vocab, (tokens,)), vocab, width)


def test_without_tokens_the_gradient_is_zero():
    ids = torch.empty(2, 0, dtype=torch.long, device=DEVICE)
    rows = embedding_forward(ids, torch.ones(5, 6, device=DEVICE), torch.float32)
    assert rows.shape == (2, 0, 6)
    found = embedding_backward(rows, ids, 5, None, torch.float32)
    assert torch.equal(found, torch.zeros(5, 6, device=DEVICE))


@pytest.mark.parametrize("vocab", [1 << 16, (1 << 16) + 1], ids=["in 16 bits", "in 32 bits"])
def test_an_id_past_what_16_bits_hold_finds_its_row(vocab):
    ids = torch.tensor([0, vocab - 1, 32_767, 32_768, vocab - 1, 0, 32_768, 1, 65_535])
    found = assert_adds_up(ids, vocab, width=3)
    assert found.any(dim=1).nonzero().flatten().tolist() == sorted(set(ids.tolist()))


def test_rows_that_nobody_names_are_zero():
    ids = torch.tensor([5, 2, 5, 5, 5, 5, 9])
    found = assert_adds_up(ids, 12)
    assert found.any(dim=1).nonzero().flatten().tolist() == [2, 5, 9]


@pytest.mark.parametrize("padding", range(4))
def test_the_padding_row_gets_no_gradient(padding):
    found = assert_adds_up(in_runs(3, 14, 2, 5), 4, padding=padding)
    assert found.any(dim=1).logical_not().nonzero().flatten().tolist() == [padding]


@pytest.mark.parametrize("table", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("above", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
def test_low_gradients_are_summed_wide_and_rounded_once(above, table):
    assert_adds_up(in_runs(14, 1, 3, 6), 4, above=above, table=table)


def test_the_shares_of_a_run_are_kept_wide_for_a_low_table():
    """4.004 and −4: each rounded to 8 bits, their sum would be 0."""
    slopes = torch.tensor([[1.001]] * CHUNK + [[-1.0]] * CHUNK, device=DEVICE)
    ids = torch.zeros(2 * CHUNK, dtype=torch.long, device=DEVICE)
    found = embedding_backward(slopes, ids, 1, None, torch.bfloat16)
    assert found.item() == pytest.approx(0.004, rel=1e-2)


def test_two_runs_give_the_same_bits_and_the_order_of_places_decides_them():
    ids = in_runs(9, 1, 3, 14)
    slopes = torch.randn(len(ids), 10, device=DEVICE)
    first, second = (
        embedding_backward(slopes, ids.to(DEVICE), 4, None, torch.float32) for _ in range(2)
    )
    assert torch.equal(first, second)
    # As if every id's places came in a row, which is what a stable sort makes of them.
    order = torch.sort(ids, stable=True).indices
    sorted_slopes, sorted_ids = slopes[order.to(DEVICE)], ids[order].to(DEVICE)
    assert torch.equal(first, embedding_backward(sorted_slopes, sorted_ids, 4, None, torch.float32))


def test_ids_and_gradients_that_do_not_lie_in_a_row_are_read_right():
    ids = torch.randint(5, (3, 4), device=DEVICE)
    slopes = torch.randn(10, 4, 3, device=DEVICE).permute(2, 1, 0)
    turned = ids.T.contiguous().T
    found = embedding_backward(slopes, turned, 5, None, torch.float32)
    torch.testing.assert_close(found.double(), exact(slopes, ids, 5))
    assert torch.equal(embedding_forward(turned, found, torch.float32), found[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (2, 1, 3)], ids=str)
def test_rows_are_looked_up_in_the_dtype_that_is_wanted(shape, dtype):
    table = torch.randn(6, 37, device=DEVICE)
    ids = torch.randint(6, shape, device=DEVICE, dtype=torch.int32)
    found = embedding_forward(ids, table, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, table[ids.long()].to(dtype))


def test_an_id_outside_the_table_gives_nan_and_writes_nowhere():
    ids = torch.tensor([1, -1, 2, 5, 1 << 40], device=DEVICE)
    table = torch.randn(5, 10, device=DEVICE)
    found = embedding_forward(ids, table, torch.float32)
    assert found.isnan().all(dim=1).tolist() == [False, True, False, True, True]
    torch.testing.assert_close(found[[0, 2]], table[[1, 2]])
    ids = torch.tensor([1, -1, 2, 5, 6, 6], device=DEVICE)
    slopes = torch.randn(6, 10, device=DEVICE)
    gradient = embedding_backward(slopes, ids, 5, None, torch.float32)
    assert gradient.any(dim=1).tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("padding_id", [None, 3])
def test_as_an_op_it_is_the_reference(monkeypatch, padding_id):
    monkeypatch.setattr(fast, "trains_by_kernel", lambda x: torch.is_grad_enabled())
    monkeypatch.setattr(fast.F, "embedding", None)  # so that no other way is taken
    ids = torch.randint(6, (2, 9), device=DEVICE)
    table = torch.randn(6, 10, device=DEVICE, requires_grad=True)
    slopes = torch.randn(2, 9, 10, device=DEVICE)
    rows = fast.embedding(ids, table, padding_id)
    expected = reference.embedding(ids, table, padding_id)
    assert torch.equal(rows, expected)
    (found,), (truth,) = (torch.autograd.grad(y, table, slopes) for y in (rows, expected))
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("by_kernel", [True, False], ids=["by kernel", "plain"])
@pytest.mark.parametrize("ops", ["reference", "fast", "fp8"])
def test_where_nobody_can_look_a_wrong_id_gives_nan_by_any_ops(monkeypatch, ops, by_kernel):
    monkeypatch.setattr(fast, "trains_by_kernel", lambda x: by_kernel)
    monkeypatch.setattr(ranges, "can_look", lambda index: False)
    ids = torch.tensor([[1, 6], [-1, 5]], device=DEVICE)
    table = torch.randn(6, 10, device=DEVICE, requires_grad=True)
    rows = OPS[ops].look_up(ids, table)
    assert rows.isnan().all(dim=-1).tolist() == [[False, True], [True, False]]
    assert torch.equal(rows[0, 0], table[1])
    assert torch.equal(rows[1, 1], table[5])
    own_kernel = by_kernel and ops != "reference"
    assert (rows.grad_fn.name() == "LookupBackward") == own_kernel


def test_the_table_of_a_low_lookup_has_a_gradient_in_its_own_dtype():
    ids = torch.randint(6, (2, 9), device=DEVICE)
    table = torch.randn(6, 10, device=DEVICE, requires_grad=True)
    rows = Lookup.apply(ids, table, None, torch.bfloat16)
    slopes = torch.randn(2, 9, 10, device=DEVICE)
    (found,) = torch.autograd.grad(rows, table, slopes.bfloat16())
    assert (rows.dtype, found.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(found.double(), exact(slopes.bfloat16(), ids, 6))


def test_a_low_residual_stream_begins_in_the_lookup(monkeypatch):
    """And what reaches the table has not been widened on the way: nobody casts."""
    monkeypatch.setattr(fast, "trains_by_kernel", lambda x: torch.is_grad_enabled())
    model = build(FAMILIES["plain"], dtype=torch.float32).to(DEVICE)
    apply_precision(model, "bf16-residual")
    tokens = torch.randint(model.config.vocab_size, (2, 6), device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16), monkeypatch.context() as patch:
        patch.setattr(fast, "low_dtype", lambda x: torch.get_autocast_dtype(DEVICE))
        x = model.token_embeddings(tokens)
    assert (x.dtype, x.grad_fn.name()) == (torch.bfloat16, "LookupBackward")
    truth = model.token_embeddings.weight[tokens].bfloat16()
    torch.testing.assert_close(x, truth)
    assert model.token_embeddings(tokens).dtype == torch.float32


@pytest.mark.parametrize("why", ["frozen", "by columns", "16-bit ids", "no gradients", "compiled"])
def test_torchs_own_is_kept_where_the_kernels_are_not_for_it(monkeypatch, why):
    monkeypatch.setattr(fast, "trains_by_kernel", lambda x: torch.is_grad_enabled())
    ids, table = torch.randint(6, (5,)), torch.randn(6, 10, requires_grad=True)
    assert fast.looks_up_by_kernel(ids, table)
    if why == "frozen":
        table.requires_grad_(False)
    elif why == "by columns":
        table = torch.randn(10, 6, requires_grad=True).T
    elif why == "16-bit ids":
        ids = ids.short()
    elif why == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.set_grad_enabled(why != "no gradients"):
        assert not fast.looks_up_by_kernel(ids, table)


def test_it_compiles_for_a_hopper_gpu_with_wide_loads():
    wide = {}
    for line in compiled_lines("compile_embedding.py"):
        name, *numbers = line.rsplit(" ", 5)
        wide[name] = [int(n) for n in numbers[:2]]
    # 8 columns a thread: of every row two loads of four numbers, or in bfloat16 one of eight.
    assert wide["look_up fp32"] == [2, 2]
    assert wide["look_up bf16"] == [2, 1]
    for key in ("i16", "i32"):
        assert wide[f"sum_in_chunk fp32 {key}"] == [2 * ROWS, 4]
        assert wide[f"sum_in_chunk bf16 {key}"] == [ROWS, 4]
        assert wide[f"join_shares {key}"][0] > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("vocab", [40, 50_257, 151_936])
def test_at_full_size_on_a_gpu(monkeypatch, vocab):
    monkeypatch.undo()  # the sizes it runs with
    ids = (torch.rand(4, 2048, device="cuda").pow(3) * vocab).long()  # some very often
    for above in (torch.bfloat16, torch.float32):
        assert_adds_up(ids, vocab, 768, above=above)
        assert_adds_up(torch.zeros_like(ids), vocab, 768, above=above)
