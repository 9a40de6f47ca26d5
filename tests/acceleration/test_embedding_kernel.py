"""The embedding kernels: the lookup, and the gradient of the table, match the definition."""

import pytest
import torch

from acceleration.gpu import compiled_lines, use_kernels_on_cpu
from scratchlm.accelerate import accelerate, conditions
from scratchlm.accelerate.kernels.triton import embedding as kernel
from scratchlm.accelerate.kernels.triton.embedding import (
    embedding,
    embedding_backward,
    embedding_forward,
)
from scratchlm.accelerate.layers import EMBEDDING, AcceleratedEmbedding
from scratchlm.model import Embedding
from scratchlm.ops import ranges, reference
from scratchlm.training.apply import apply_precision
from tiny_models import FAMILIES, build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CHUNK = 4
ROWS = kernel.ROWS  # as compiled, before the fixture changes it


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch):
    """Let few tokens fill many chunks, and few columns several blocks."""
    sizes = {"CHUNK": CHUNK, "ROWS": 2, "BLOCK": 16, "COMBINE_ROWS": 2, "COMBINE_BLOCK": 8}
    for name, size in sizes.items():
        monkeypatch.setattr(kernel, name, size)


def exact(grad_output, ids, vocab, padding_id=None):
    """Return the gradient of the table, summed in float64."""
    rows = grad_output.reshape(-1, grad_output.shape[-1]).double()
    total = rows.new_zeros(vocab, rows.shape[1]).index_add_(0, ids.flatten(), rows)
    if padding_id is not None:
        total[padding_id] = 0
    return total


def assert_matches_exact(
    ids, vocab, width=10, dtype=torch.float32, table_dtype=torch.float32, padding=None
):
    ids = ids.to(DEVICE)
    grad_output = torch.randn(*ids.shape, width, device=DEVICE).to(dtype)
    found = embedding_backward(grad_output, ids, vocab, padding, table_dtype)
    assert (found.dtype, found.shape) == (table_dtype, (vocab, width))
    expected = exact(grad_output, ids, vocab, padding)
    size = exact(grad_output.abs(), ids, vocab) + 1e-30  # what rounding is relative to
    assert float(((found.double() - expected).abs() / size).max()) < TOLERANCE[table_dtype]
    return found


def ids_of_runs(*lengths):
    """Return shuffled ids, each as often as this; sorted, they are runs of these lengths."""
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return ids[torch.randperm(len(ids))]


RUNS = {
    "one": (1,),
    "all different": (1,) * 11,
    "one id everywhere": (50,),
    "one id fills a chunk": (CHUNK,),
    "one id fills chunks": (6 * CHUNK,),
    "whole chunks": (CHUNK, 2 * CHUNK, CHUNK, 5 * CHUNK, CHUNK),
    "ends and begins at a chunk border": (3, 1, 2, 2, 1, 7, 1, 3),
    "crosses one border": (3, 2, 3, 1, 1, 3, 4, 3),
    "crosses many borders": (2, 23, 3, 17, 1, 9),
    "a chunk plus or minus one": (CHUNK + 1, CHUNK - 1, 2 * CHUNK - 1, CHUNK + 2),
}


@pytest.mark.parametrize("runs", RUNS)
def test_gradient_of_a_row_is_the_sum_over_its_positions(runs):
    ids = ids_of_runs(*RUNS[runs])
    assert_matches_exact(ids, len(RUNS[runs]))


@pytest.mark.parametrize("draw", range(6))
def test_gradient_is_exact_for_random_runs(draw):
    generator = torch.Generator().manual_seed(draw)
    lengths = torch.randint(1, [2, 4, 12][draw % 3], (7,), generator=generator)
    assert_matches_exact(ids_of_runs(*lengths.tolist()), 7, width=1 + 3 * draw)


@pytest.mark.parametrize(
    ("tokens", "vocab", "width"), [(17, 7, 10), (1, 3, 1), (25, 2, 33), (9, 4000, 5)]
)
def test_gradient_is_exact_for_sizes_that_fit_no_block(tokens, vocab, width):
    assert_matches_exact(torch.randint(vocab, (tokens,)), vocab, width)


def test_gradient_without_tokens_is_zero():
    ids = torch.empty(2, 0, dtype=torch.long, device=DEVICE)
    rows = embedding_forward(ids, torch.ones(5, 6, device=DEVICE), torch.float32)
    assert rows.shape == (2, 0, 6)
    found = embedding_backward(rows, ids, 5, None, torch.float32)
    assert torch.equal(found, torch.zeros(5, 6, device=DEVICE))


@pytest.mark.parametrize("vocab", [1 << 16, (1 << 16) + 1], ids=["int16 keys", "int32 keys"])
def test_ids_at_the_limits_of_16_bit_sort_keys_find_their_row(vocab):
    ids = torch.tensor([0, vocab - 1, 32_767, 32_768, vocab - 1, 0, 32_768, 1, 65_535])
    found = assert_matches_exact(ids, vocab, width=3)
    assert found.any(dim=1).nonzero().flatten().tolist() == sorted(set(ids.tolist()))


def test_rows_without_tokens_have_zero_gradient():
    ids = torch.tensor([5, 2, 5, 5, 5, 5, 9])
    found = assert_matches_exact(ids, 12)
    assert found.any(dim=1).nonzero().flatten().tolist() == [2, 5, 9]


@pytest.mark.parametrize("padding", range(4))
def test_padding_row_gets_no_gradient(padding):
    found = assert_matches_exact(ids_of_runs(3, 14, 2, 5), 4, padding=padding)
    assert found.any(dim=1).logical_not().nonzero().flatten().tolist() == [padding]


@pytest.mark.parametrize("table_dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
def test_low_precision_gradients_are_accumulated_in_float32(dtype, table_dtype):
    assert_matches_exact(ids_of_runs(14, 1, 3, 6), 4, dtype=dtype, table_dtype=table_dtype)


def test_partial_sums_are_float32_for_a_bfloat16_table():
    """4.004 − 4: rounded to bfloat16 before the subtraction, it would be 0."""
    grad_output = torch.tensor([[1.001]] * CHUNK + [[-1.0]] * CHUNK, device=DEVICE)
    ids = torch.zeros(2 * CHUNK, dtype=torch.long, device=DEVICE)
    found = embedding_backward(grad_output, ids, 1, None, torch.bfloat16)
    assert found.item() == pytest.approx(0.004, rel=1e-2)


def test_backward_is_deterministic_and_sums_in_order_of_position():
    ids = ids_of_runs(9, 1, 3, 14)
    grad_output = torch.randn(len(ids), 10, device=DEVICE)
    first, second = (
        embedding_backward(grad_output, ids.to(DEVICE), 4, None, torch.float32) for _ in range(2)
    )
    assert torch.equal(first, second)
    # The same as for gradients sorted by id, which is what the stable sort gives.
    order = torch.sort(ids, stable=True).indices
    sorted_grads, sorted_ids = grad_output[order.to(DEVICE)], ids[order].to(DEVICE)
    assert torch.equal(first, embedding_backward(sorted_grads, sorted_ids, 4, None, torch.float32))


def test_ids_and_gradients_need_not_be_contiguous():
    ids = torch.randint(5, (3, 4), device=DEVICE)
    grad_output = torch.randn(10, 4, 3, device=DEVICE).permute(2, 1, 0)
    strided = ids.T.contiguous().T
    found = embedding_backward(grad_output, strided, 5, None, torch.float32)
    torch.testing.assert_close(found.double(), exact(grad_output, ids, 5))
    assert torch.equal(embedding_forward(strided, found, torch.float32), found[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (2, 1, 3)], ids=str)
def test_forward_returns_the_requested_dtype(shape, dtype):
    table = torch.randn(6, 37, device=DEVICE)
    ids = torch.randint(6, shape, device=DEVICE, dtype=torch.int32)
    found = embedding_forward(ids, table, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, table[ids.long()].to(dtype))


def test_an_invalid_id_gives_nan_and_no_gradient():
    ids = torch.tensor([1, -1, 2, 5, 1 << 40], device=DEVICE)
    table = torch.randn(5, 10, device=DEVICE)
    found = embedding_forward(ids, table, torch.float32)
    assert found.isnan().all(dim=1).tolist() == [False, True, False, True, True]
    torch.testing.assert_close(found[[0, 2]], table[[1, 2]])
    ids = torch.tensor([1, -1, 2, 5, 6, 6], device=DEVICE)
    grad_output = torch.randn(6, 10, device=DEVICE)
    gradient = embedding_backward(grad_output, ids, 5, None, torch.float32)
    assert gradient.any(dim=1).tolist() == [False, True, True, False, False]


def layer_of(table, padding_id=None, kind=AcceleratedEmbedding, ops="fast"):
    layer = kind(*table.shape, padding_id, device=DEVICE, ops=ops)
    layer.weight = torch.nn.Parameter(table)
    return layer


@pytest.mark.parametrize("padding_id", [None, 3])
def test_an_accelerated_embedding_matches_the_reference(monkeypatch, padding_id):
    use_kernels_on_cpu(monkeypatch)
    monkeypatch.setattr(torch.nn.functional, "embedding", None)  # so that the kernel must be used
    ids = torch.randint(6, (2, 9), device=DEVICE)
    layer = layer_of(torch.randn(6, 10, device=DEVICE), padding_id)
    grad_output = torch.randn(2, 9, 10, device=DEVICE)
    rows = layer(ids)
    expected = reference.embedding(ids, layer.weight, padding_id)
    assert torch.equal(rows, expected)
    pairs = (torch.autograd.grad(y, layer.weight, grad_output) for y in (rows, expected))
    (found,), (wanted,) = pairs
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("ops", ["reference", "fast"])
@pytest.mark.parametrize("kind", [Embedding, AcceleratedEmbedding], ids=["plain", "accelerated"])
def test_an_unchecked_invalid_id_gives_nan_with_any_ops(monkeypatch, kind, ops, kernels):
    monkeypatch.setattr(conditions, "trains_by_kernel", lambda x: kernels)
    monkeypatch.setattr(ranges, "can_look", lambda index: False)
    ids = torch.tensor([[1, 6], [-1, 5]], device=DEVICE)
    layer = layer_of(torch.randn(6, 10, device=DEVICE), None, kind, ops)
    rows = layer(ids)
    assert rows.isnan().all(dim=-1).tolist() == [[False, True], [True, False]]
    assert torch.equal(rows[0, 0], layer.weight[1])
    assert torch.equal(rows[1, 1], layer.weight[5])
    uses_kernel = kernels and ops == "fast" and kind is AcceleratedEmbedding
    assert (rows.grad_fn.name() == "_EmbeddingKernelBackward") == uses_kernel


@pytest.mark.parametrize("kernels", [True, False], ids=["kernel", "torch"])
def test_a_checked_invalid_id_is_refused(monkeypatch, kernels):
    monkeypatch.setattr(conditions, "trains_by_kernel", lambda x: kernels)
    monkeypatch.setattr(ranges, "can_look", lambda index: True)
    layer = layer_of(torch.randn(6, 10, device=DEVICE))
    with pytest.raises(ValueError, match=r"token id must lie in \[0, 6\); got 6"):
        layer(torch.tensor([1, 6], device=DEVICE))


def test_gradient_of_a_low_precision_lookup_has_the_dtype_of_the_table():
    ids = torch.randint(6, (2, 9), device=DEVICE)
    table = torch.randn(6, 10, device=DEVICE, requires_grad=True)
    rows = embedding(ids, table, None, torch.bfloat16)
    grad_output = torch.randn(2, 9, 10, device=DEVICE)
    (found,) = torch.autograd.grad(rows, table, grad_output.bfloat16())
    assert (rows.dtype, found.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(found.double(), exact(grad_output.bfloat16(), ids, 6))


@pytest.mark.parametrize("kernels", [True, False], ids=["kernel", "torch"])
def test_bf16_residual_stream_starts_at_the_embedding(monkeypatch, kernels):
    """The kernel writes it in bfloat16 and reads its gradient in bfloat16: there is no cast."""
    monkeypatch.setattr(conditions, "trains_by_kernel", lambda x: kernels)
    model = accelerate(build(FAMILIES["plain"], dtype=torch.float32)).to(DEVICE)
    apply_precision(model, "bf16-residual")
    tokens = torch.randint(model.config.vocab_size, (2, 6), device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        x = model.token_embeddings(tokens)
    assert x.dtype == torch.bfloat16
    assert (x.grad_fn.name() == "_EmbeddingKernelBackward") == kernels
    expected = model.token_embeddings.weight[tokens].bfloat16()
    torch.testing.assert_close(x, expected)
    assert model.token_embeddings(tokens).dtype == torch.float32


@pytest.mark.parametrize("why", ["frozen", "transposed", "16-bit ids", "no gradients", "compiled"])
def test_unsupported_inputs_fall_back_to_torch(monkeypatch, why):
    use_kernels_on_cpu(monkeypatch)
    ids, layer = torch.randint(6, (5,), device=DEVICE), layer_of(torch.randn(6, 10, device=DEVICE))
    assert EMBEDDING.runs(layer, ids)
    if why == "frozen":
        layer.weight.requires_grad_(False)
    elif why == "transposed":
        layer = layer_of(torch.randn(10, 6, device=DEVICE).T)
    elif why == "16-bit ids":
        ids = ids.short()
    elif why == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.set_grad_enabled(why != "no gradients"):
        assert not EMBEDDING.runs(layer, ids)


def test_kernels_compile_for_hopper_with_vectorized_loads():
    vectorized = {}
    for line in compiled_lines("compile_embedding.py"):
        name, *numbers = line.rsplit(" ", 5)
        vectorized[name] = [int(n) for n in numbers[:2]]
    # 8 columns per thread: two 16-byte loads per row in float32, one in bfloat16.
    assert vectorized["embedding fp32"] == [2, 2]
    assert vectorized["embedding bf16"] == [2, 1]
    for key in ("i16", "i32"):
        assert vectorized[f"embedding_backward fp32 {key}"] == [2 * ROWS, 4]
        assert vectorized[f"embedding_backward bf16 {key}"] == [ROWS, 4]
        assert vectorized[f"embedding_combine {key}"][0] > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("vocab", [40, 50_257, 151_936])
def test_gradient_is_exact_at_full_size_on_a_gpu(monkeypatch, vocab):
    monkeypatch.undo()  # real chunk and block sizes
    ids = (torch.rand(4, 2048, device="cuda").pow(3) * vocab).long()  # some ids are very frequent
    for dtype in (torch.bfloat16, torch.float32):
        assert_matches_exact(ids, vocab, 768, dtype=dtype)
        assert_matches_exact(torch.zeros_like(ids), vocab, 768, dtype=dtype)
