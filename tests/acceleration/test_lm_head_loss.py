"""LM head and loss in one: no full logits, any chunks, kernels that equal their formulas."""

import pytest
import torch

from scratchlm.accelerate import accelerate, hopper, lm_head_loss, lm_head_loss_op, models
from scratchlm.accelerate.kernels.hopper import lm_head_exp as exp_kernel
from scratchlm.accelerate.kernels.triton import cross_entropy
from scratchlm.accelerate.lm_head_loss import chunked_lm_head_loss
from scratchlm.ops import reference
from tiny_models import FAMILIES, build, ids


def some(rows=40, width=6, vocab=23, dtype=torch.float64, device="cpu"):
    hidden = torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, device=device, requires_grad=True)
    targets = torch.randint(vocab, (rows,), device=device)
    targets[::5] = -100
    return hidden, weight, targets


def loss_and_gradients(function, hidden, weight, targets, **how):
    value = function(hidden, weight, targets, **how)
    return [value.detach(), *torch.autograd.grad(value, (hidden, weight))]


@pytest.mark.parametrize("size", [1, 7, 39, 40, 41])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_any_chunks_give_the_reference(size, z_loss, monkeypatch):
    monkeypatch.setattr(lm_head_loss, "_chunk_size", lambda rows, vocab, device: min(size, rows))
    given = some()
    ours = loss_and_gradients(chunked_lm_head_loss, *given, z_loss=z_loss)
    truth = loss_and_gradients(reference.linear_cross_entropy, *given, z_loss=z_loss)
    for got, expected in zip(ours, truth, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-10)


def test_chunks_are_equal_and_hold_no_more_than_they_may():
    for rows, vocab in ((16_384, 151_936), (8_192, 50_304), (4096, 4096), (100, 50), (1, 7)):
        for device, most in lm_head_loss.CHUNK_ELEMENTS.items():
            size = lm_head_loss._chunk_size(rows, vocab, device)
            assert 1 <= size <= rows
            assert size * vocab <= max(most + 128 * vocab, 128 * vocab)
            if rows > size:
                assert size >= 128


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Watch for the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if torch.is_tensor(tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_the_logits_never_exist_all_at_once():
    hidden, weight, targets = some(rows=4096, width=8, vocab=4096, dtype=torch.float32)
    with Largest() as chunked:
        chunked_lm_head_loss(hidden, weight, targets).backward()
    with Largest() as whole:
        reference.linear_cross_entropy(hidden, weight, targets).backward()
    assert whole.elements >= 4096 * 4096
    assert chunked.elements <= lm_head_loss.CHUNK_ELEMENTS["cpu"]


def test_only_the_gradients_asked_for_are_computed():
    hidden, weight, targets = some()
    alone = chunked_lm_head_loss(hidden.detach(), weight, targets)
    (gradient,) = torch.autograd.grad(alone, weight)
    torch.testing.assert_close(
        gradient, loss_and_gradients(reference.linear_cross_entropy, hidden, weight, targets)[2]
    )
    with torch.no_grad():
        value = chunked_lm_head_loss(hidden, weight, targets)
    torch.testing.assert_close(value, reference.linear_cross_entropy(hidden, weight, targets))


def test_a_second_backward_is_refused_not_wrong():
    hidden, weight, targets = some()
    value = chunked_lm_head_loss(hidden, weight, targets)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already given out"):
        value.backward()


def test_large_logits_overflow_nothing():
    hidden = torch.full((3, 2), 1e3, requires_grad=True)
    weight = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [0.5, 0.5]], requires_grad=True)
    targets = torch.tensor([0, 1, 2])
    ours = loss_and_gradients(chunked_lm_head_loss, hidden, weight, targets)
    truth = loss_and_gradients(reference.linear_cross_entropy, hidden, weight, targets)
    for got, expected in zip(ours, truth, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, expected)


def test_under_autocast_products_are_low_and_the_gradient_of_the_head_is_not():
    hidden, weight, targets = some(rows=64, width=16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = loss_and_gradients(chunked_lm_head_loss, hidden, weight, targets)
    truth = loss_and_gradients(reference.linear_cross_entropy, hidden, weight, targets)
    assert [part.dtype for part in ours] == [torch.float32] * 3
    for got, expected in zip(ours, truth, strict=True):
        error = (got - expected).norm() / expected.norm()
        assert 0 < error < 1e-2  # bfloat16's, and not none: it did run low


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("wanted", ["hidden", "weight", "both"])
def test_compiled_training_on_a_cpu_is_chunked_too(wanted, z_loss, monkeypatch):
    calls = []
    monkeypatch.setattr(
        lm_head_loss_op,
        "chunked_loss",
        lambda *given: (calls.append(given), lm_head_loss.chunked_loss(*given))[1],
    )
    monkeypatch.setattr(lm_head_loss, "_chunk_size", lambda rows, vocab, device: 7)
    hidden, weight, targets = some()
    hidden.requires_grad_(wanted != "weight")
    weight.requires_grad_(wanted != "hidden")
    asked = [leaf for leaf in (hidden, weight) if leaf.requires_grad]
    compiled = torch.compile(chunked_lm_head_loss, fullgraph=True, backend="aot_eager")
    ours = compiled(hidden, weight, targets, z_loss=z_loss)
    truth = reference.linear_cross_entropy(hidden, weight, targets, z_loss=z_loss)
    assert len(calls) == 1
    torch.testing.assert_close(ours, truth)
    for got, expected in zip(
        torch.autograd.grad(3 * ours, asked), torch.autograd.grad(3 * truth, asked), strict=True
    ):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-10)


def test_the_custom_op_is_what_it_tells_the_compiler():
    hidden, weight, targets = some(dtype=torch.float32)
    given = (hidden, weight, targets.clamp(min=-1), 0.1, True, True)
    torch.library.opcheck(lm_head_loss_op.loss_and_gradients, given)


def test_a_compiler_sees_plain_operations_where_nothing_trains(monkeypatch):
    monkeypatch.setattr(models, "chunked_lm_head_loss", None)  # whoever calls it fails
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    hidden, weight, targets = some(width=16, vocab=29)
    model = accelerate(build(FAMILIES["plain"]))
    with torch.no_grad():
        model.lm_head.weight.copy_(weight)
        ours = model.head_loss(hidden, targets)
    torch.testing.assert_close(ours, reference.linear_cross_entropy(hidden, weight, targets))


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_the_loss_of_an_accelerated_model_is_chunked(tied, monkeypatch):
    config = FAMILIES["plain"].replace(vocab_size=500, tie_embeddings=tied)
    tokens = ids(10, 20, config)
    monkeypatch.setitem(lm_head_loss.CHUNK_ELEMENTS, "cpu", 500 * 128)
    found = []
    for model in (build(config), accelerate(build(config))):
        with Largest() as made:
            value = model.loss(tokens, tokens, z_loss=0.1)
        found.append([value, *torch.autograd.grad(value, list(model.parameters()))])
        found[-1].append(made.elements)
    (*plain, all_logits), (*ours, most) = found
    assert all_logits == 10 * 20 * 500
    assert most < all_logits
    for got, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-10)


def test_a_head_with_a_bias_or_a_hook_is_called():
    model, called = accelerate(build(FAMILIES["plain"])), []
    tokens = ids(2, 5)
    expected = model.loss(tokens, tokens)
    model.lm_head.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(model.loss(tokens, tokens), expected)
    assert called == [1]
    biased = accelerate(build(FAMILIES["plain"]))
    biased.lm_head.bias = torch.nn.Parameter(torch.randn(29, dtype=torch.float64))
    logits = biased(tokens)
    torch.testing.assert_close(
        biased.loss(tokens, tokens),
        reference.cross_entropy(logits.flatten(0, 1), tokens.flatten()),
    )
    assert not torch.allclose(biased.loss(tokens, tokens), expected)


@pytest.mark.parametrize("custom_op", [False, True], ids=["eager", "custom op"])
def test_a_gradient_of_the_gradient_is_refused_not_wrong(custom_op):
    hidden, weight, targets = some()
    if custom_op:
        value = lm_head_loss_op.loss_and_gradients(
            hidden, weight, targets.clamp(min=-1), 0.0, True, True
        )[0]
    else:
        value = chunked_lm_head_loss(hidden, weight, targets)
    factor = torch.ones((), dtype=value.dtype, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|first derivatives only"):
        torch.autograd.grad(factor * value, hidden, create_graph=True)[0].sum().backward()


def test_a_target_of_probability_zero_still_has_its_loss():
    """Its probability is 0 in float32, the logarithm of which says nothing."""
    hidden = torch.tensor([[300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    value = chunked_lm_head_loss(hidden, weight, torch.tensor([1]))
    assert value.item() == 300.0


# The kernel, in Triton's interpreter or on a GPU
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def by_kernel(logits, targets, vocab, z_loss=0.0):
    """Return the losses, and the gradient that the kernel leaves in two parts."""
    losses, factors = cross_entropy.loss_and_dlogits_(logits, targets, vocab, z_loss, True)
    assert (logits[:, vocab:] == 0).all()
    return losses, logits[:, :vocab].double() * factors.double()[:, None]


def by_formula(logits, targets, vocab, z_loss=0.0):
    exact = logits[:, :vocab].double().requires_grad_()
    truth = reference.cross_entropy(exact, targets, ignore_index=-1, z_loss=z_loss, reduction="sum")
    return truth.detach(), torch.autograd.grad(truth, exact)[0]


@DTYPES
@pytest.mark.parametrize(("vocab", "padded"), [(23, 23), (23, 32), (16, 16), (9001, 9088)])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_the_kernel_writes_the_gradient_over_the_logits(dtype, vocab, padded, z_loss):
    logits = (4 * torch.randn(5, padded, device=DEVICE)).to(dtype)
    targets = torch.tensor([0, vocab - 1, -1, 3, vocab // 2], device=DEVICE)
    truth, exact = by_formula(logits, targets, vocab, z_loss)
    only, _ = cross_entropy.loss_and_dlogits_(logits.clone(), targets, vocab, z_loss, False)
    losses, gradient = by_kernel(logits, targets, vocab, z_loss)
    torch.testing.assert_close(losses.sum().double(), truth, atol=1e-4, rtol=1e-5)
    assert torch.equal(only, losses)
    torch.testing.assert_close(gradient, exact, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@DTYPES
@pytest.mark.parametrize("rises", [(50.0,), (300.0,), (50.0, 120.0), (-500.0,), (1e4, 3e4)])
def test_a_row_whose_maximum_comes_late_is_exact(dtype, rises):
    """Far above the first block lie later ones; or far below."""
    block, count = cross_entropy.BLOCK, len(rises) + 2
    vocab = count * block - 5
    logits = torch.randn(4, vocab, device=DEVICE)
    for number, rise in enumerate(rises, 1):
        logits[1:, number * block : (number + 1) * block] += rise
    logits = logits.to(dtype)
    targets = torch.tensor([3, 5, block + 7, vocab - 1], device=DEVICE)
    truth, exact = by_formula(logits, targets, vocab)
    losses, gradient = by_kernel(logits, targets, vocab)
    torch.testing.assert_close(losses.sum().double(), truth, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(gradient, exact, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def test_a_row_of_nothing_but_one_logit_and_a_row_with_nan():
    block = cross_entropy.BLOCK
    logits = torch.full((3, 2 * block), -torch.inf, device=DEVICE)
    logits[0, block + 1] = 2.0
    logits[1:, 0] = torch.nan
    targets = torch.tensor([block + 1, 0, -1], device=DEVICE)
    losses, gradient = by_kernel(logits, targets, 2 * block)
    assert losses[0] == 0
    assert (gradient[0] == 0).all()
    assert losses[1].isnan()
    assert gradient[1].isnan().any()
    assert losses[2] == 0
    assert (gradient[2] == 0).all()


@DTYPES
@pytest.mark.parametrize("wanted", ["hidden", "weight", "both", "both, transposed"])
def test_the_factors_a_kernel_leaves_reach_both_gradients(dtype, wanted, monkeypatch):
    """As on a GPU, chunk by chunk, with the kernel in between."""
    kernel = cross_entropy.loss_and_dlogits_
    monkeypatch.setattr(
        lm_head_loss,
        "_loss_and_dlogits",
        lambda x, *rest: lm_head_loss._DLogits(*_around(x, kernel(x, *rest))),
    )
    monkeypatch.setattr(lm_head_loss, "_chunk_size", lambda rows, vocab, device: 7)
    hidden, weight, targets = some(dtype=torch.float32, device=DEVICE)
    targets = targets.clamp(min=-1)
    asked = {"hidden": (True, False), "weight": (False, True)}.get(wanted, (True, True))
    low = hidden.detach().to(dtype)
    if "transposed" in wanted:  # the same numbers, column by column in memory
        low = low.t().contiguous().t()
    total, gradients = lm_head_loss.chunked_loss(low, weight, targets, 0.1, *asked)
    ours = gradients.scaled(torch.tensor(0.25, device=DEVICE))
    wide = low.double().requires_grad_(), weight.detach().to(dtype).double().requires_grad_()
    how = {"ignore_index": -1, "z_loss": 0.1, "reduction": "sum"}
    truth = loss_and_gradients(reference.linear_cross_entropy, *wide, targets, **how)
    torch.testing.assert_close(total.double(), truth[0], rtol=CLOSE[dtype], atol=0)
    for got, expected, was_asked in zip(ours, truth[1:], asked, strict=True):
        assert (got is not None) == was_asked
        if got is not None:
            error = (got.double() - 0.25 * expected).norm() / (0.25 * expected).norm()
            assert error < CLOSE[dtype]


def _around(logits, pair):
    return pair[0], logits, pair[1]


# A formula stands for the product that writes exp(x − r): nothing interprets that kernel


def exp_product(x, w, references, vocab, out):
    power = x.double() @ w.double().t() - references[:, None]
    e = power.clamp(max=exp_kernel.CAP).exp()
    e[:, vocab:] = 0
    out.copy_(e)
    return torch.stack([part.sum(dim=1) for part in e.split(128, dim=1)]).float()


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("rises", [0.0, 3.0])
@pytest.mark.parametrize(("rows", "vocab", "padded"), [(70, 300, 384), (33, 128, 128)])
def test_rows_are_finished_from_their_sums(monkeypatch, rows, vocab, padded, rises, z_loss):
    monkeypatch.setattr(exp_kernel, "lm_head_exp", exp_product)
    x = torch.randn(rows, 24, device=DEVICE)
    head = torch.zeros(padded, 24, device=DEVICE)
    head[:vocab] = torch.randn(vocab, 24, device=DEVICE)
    targets = torch.randint(vocab, (rows,), device=DEVICE)
    targets[::5] = -1
    x[3], targets[3] = 0, 1
    targets[2] = 0  # the lowest there is
    x[1::4] *= 1 + 10 * rises  # logits of some rows differ by hundreds: more than CAP
    out = torch.full((rows, padded), torch.nan, device=DEVICE)
    losses, factors = cross_entropy.lm_head_loss_and_dlogits(x, head, targets, vocab, z_loss, out)
    logits = (x.double() @ head[:vocab].double().t()).requires_grad_()
    chosen = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    lse = logits.logsumexp(1)
    truth = (lse - chosen + z_loss * lse**2).masked_fill(targets < 0, 0)
    torch.testing.assert_close(losses.double(), truth.detach(), atol=1e-4, rtol=1e-5)
    (gradient,) = torch.autograd.grad(truth.sum(), logits)
    got = out.double() * factors.double()[:, None]
    torch.testing.assert_close(got[:, :vocab], gradient, atol=1e-5, rtol=1e-4)
    assert (got[:, vocab:] == 0).all()
    again = (logits - chosen[:, None]).amax(1) > exp_kernel.CAP
    assert bool(again[targets >= 0].any()) == bool(rises)  # the case is what it is meant to be


def test_a_row_that_is_nan_is_nan_and_no_other(monkeypatch):
    monkeypatch.setattr(exp_kernel, "lm_head_exp", exp_product)
    x, head = torch.randn(40, 16, device=DEVICE), torch.randn(64, 16, device=DEVICE)
    x[7] = torch.nan
    out, targets = torch.empty(40, 64, device=DEVICE), torch.zeros(40, dtype=int, device=DEVICE)
    losses, factors = cross_entropy.lm_head_loss_and_dlogits(x, head, targets, 64, 0.0, out)
    bad = torch.arange(40, device=DEVICE) == 7
    assert torch.equal(losses.isnan(), bad)
    assert torch.equal((out * factors[:, None]).isnan().any(dim=1), bad)


def test_the_chunked_loss_uses_that_product_only_where_it_trains(monkeypatch):
    monkeypatch.setattr(exp_kernel, "lm_head_exp", exp_product)
    asked = []
    monkeypatch.setattr(
        hopper, "supports_lm_head_exp", lambda x, head: (asked.append((len(x), len(head))), True)[1]
    )
    monkeypatch.setattr(lm_head_loss, "_chunk_size", lambda rows, vocab, device: 32)
    hidden, weight, targets = some(dtype=torch.float32, device=DEVICE)
    ours = loss_and_gradients(chunked_lm_head_loss, hidden, weight, targets, z_loss=0.1)
    truth = loss_and_gradients(reference.linear_cross_entropy, hidden, weight, targets, z_loss=0.1)
    for got, expected in zip(ours, truth, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    columns = len(lm_head_loss._padded(weight, torch.float32))
    assert asked == [(32, columns), (8, columns)]
    with torch.no_grad():
        chunked_lm_head_loss(hidden, weight, targets)
    assert len(asked) == 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("vocab", [50_257, 4_096])
def test_on_a_gpu_the_padded_head_gives_the_reference(vocab):
    hidden, weight, targets = some(1000, 64, vocab, torch.float32, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        ours = loss_and_gradients(chunked_lm_head_loss, hidden, weight, targets)
    with torch.no_grad():
        wide = [x.double() for x in (hidden, weight)]
    truth = loss_and_gradients(
        reference.linear_cross_entropy, *(x.requires_grad_() for x in wide), targets
    )
    for got, expected in zip(ours, truth, strict=True):
        assert (got.double() - expected).norm() / expected.norm() < 2e-2
