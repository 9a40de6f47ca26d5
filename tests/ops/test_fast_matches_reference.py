"""Every fast op against its definition: values, gradients, dtypes, odd shapes, odd masks."""

import dataclasses

import pytest
import torch

from scratchlm.ops import OP_NAMES, OPS, CausalMask, attention, experts
from scratchlm.ops.short_attention import SHORT


def draw(*shape):
    return torch.randn(*shape)


def some_mask(*shape):
    mask = torch.rand(*shape) > 0.4
    mask[..., 1, :] = False  # a query that sees nothing
    return mask


def qkv(batch=2, heads=4, kv_heads=4, queries=5, keys=5, d=8, d_v=8):
    return (
        draw(batch, heads, queries, d),
        draw(batch, kv_heads, keys, d),
        draw(batch, kv_heads, keys, d_v),
    )


def rope_tables(seq, half):
    angle = torch.randn(seq, half)
    return angle.cos(), angle.sin()


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


def activation_cases():
    return {
        "plain": lambda: ((draw(2, 3, 5),), (), {}),
        "large": lambda: ((30 * draw(4, 9),), (), {}),
        "zero": lambda: ((torch.zeros(3),), (), {}),
    }


ids = torch.tensor([[0, 3, 3], [5, 1, 0]])
targets = torch.tensor([[1, -100, 3], [0, 6, 2]])

# op -> case -> (differentiable arguments, other arguments, keywords)
CASES = {
    "linear": {
        "plain": lambda: ((draw(2, 3, 5), draw(7, 5)), (), {}),
        "bias": lambda: ((draw(3, 5), draw(7, 5), draw(7)), (), {}),
        "one vector": lambda: ((draw(5), draw(1, 5)), (), {}),
        "no rows": lambda: ((draw(0, 5), draw(2, 5)), (), {}),
    },
    "grouped_linear": {
        "plain": lambda: ((draw(7, 8), draw(3, 16, 8)), (ends(2, 6, 7),), {}),
        "odd widths": lambda: ((draw(7, 5), draw(3, 3, 5)), (ends(2, 6, 7),), {}),
        "empty groups": lambda: ((draw(4, 8), draw(5, 8, 8)), (ends(0, 3, 3, 4, 4),), {}),
        "empty groups, odd widths": lambda: ((draw(4, 5), draw(4, 2, 5)), (ends(0, 3, 3, 4),), {}),
        "one group": lambda: ((draw(4, 8), draw(1, 4, 8)), (ends(4),), {}),
        "no rows": lambda: ((draw(0, 5), draw(2, 3, 5)), (ends(0, 0),), {}),
    },
    "embedding": {
        "plain": lambda: ((draw(7, 4),), (ids,), {}),
        "padding": lambda: ((draw(7, 4),), (ids,), {"padding_id": 3}),
    },
    "rms_norm": {
        "plain": lambda: ((3 * draw(2, 3, 7), draw(7)), (1e-5,), {}),
        "tiny": lambda: ((1e-4 * draw(4, 6), draw(6)), (1e-5,), {}),
        "width 1": lambda: ((draw(4, 1), draw(1)), (1e-6,), {}),
    },
    "layer_norm": {
        "plain": lambda: ((3 * draw(2, 3, 7), draw(7), draw(7)), (1e-5,), {}),
        "no bias": lambda: ((3 * draw(2, 3, 7), draw(7)), (None, 1e-5), {}),
    },
    **{name: activation_cases() for name in ("silu", "gelu", "gelu_tanh", "relu")},
    "rope": {
        "interleaved": lambda: ((draw(2, 3, 5, 8),), (*rope_tables(5, 4), "interleaved"), {}),
        "half": lambda: ((draw(2, 3, 5, 8),), (*rope_tables(5, 4), "half"), {}),
        "width 2": lambda: ((draw(5, 2),), (*rope_tables(5, 1), "interleaved"), {}),
    },
    "scaled_dot_product_attention": {
        "no mask": lambda: (qkv(keys=7), (None,), {}),
        "causal": lambda: (qkv(), (CausalMask(),), {}),
        "causal, long": lambda: (qkv(1, 2, 2, 2 * SHORT, 2 * SHORT), (CausalMask(),), {}),
        "without heads": lambda: ((draw(2, 5, 4), draw(2, 7, 4), draw(2, 7, 3)), (None,), {}),
        "one matrix, a mask": lambda: (
            (draw(5, 4), draw(7, 4), draw(7, 3)),
            (some_mask(5, 7),),
            {},
        ),
        "a mask of one's own": lambda: (qkv(queries=5, keys=7), (some_mask(2, 1, 5, 7),), {}),
    },
    "attention": {
        "no mask": lambda: (qkv(), (None,), {}),
        "causal": lambda: (qkv(), (CausalMask(),), {}),
        "causal, long": lambda: (qkv(1, 2, 2, 2 * SHORT, 2 * SHORT), (CausalMask(),), {}),
        "causal, one token": lambda: (qkv(queries=1, keys=1), (CausalMask(),), {}),
        "decode": lambda: (qkv(queries=1, keys=9), (CausalMask(start=8),), {}),
        "chunk after a cache": lambda: (qkv(queries=3, keys=9), (CausalMask(start=6),), {}),
        "more keys than are visible": lambda: (
            qkv(queries=3, keys=9),
            (CausalMask(start=2),),
            {},
        ),
        "grouped heads": lambda: (qkv(kv_heads=2), (CausalMask(),), {}),
        "one key head": lambda: (qkv(kv_heads=1, queries=3, keys=6), (CausalMask(start=3),), {}),
        "causal, as long as is short": lambda: (qkv(1, 2, 2, SHORT, SHORT), (CausalMask(),), {}),
        "d_v differs": lambda: (qkv(d_v=3), (CausalMask(),), {}),
        "window": lambda: (qkv(queries=9, keys=9), (CausalMask(window=3),), {}),
        "documents": lambda: (
            qkv(queries=6, keys=6),
            (CausalMask(documents=torch.tensor([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 4, 4]])),),
            {},
        ),
        "left padding": lambda: (
            qkv(),
            (CausalMask(key_valid=torch.tensor([[0, 0, 1, 1, 1], [1] * 5]).bool()),),
            {},
        ),
        "ragged slots": lambda: (
            qkv(queries=2, keys=7),
            (CausalMask(slots=torch.tensor([[-1, 2], [5, 6]])),),
            {},
        ),
        "a mask of one's own": lambda: (qkv(queries=5, keys=7), (some_mask(2, 1, 5, 7),), {}),
    },
    "route": {
        "plain": lambda: ((3 * draw(6, 4),), (2, True), {}),
        "not renormalized": lambda: ((3 * draw(6, 4),), (2, False), {}),
        "one expert per token": lambda: ((3 * draw(6, 4),), (1, True), {}),
        "all experts": lambda: ((3 * draw(5, 3),), (3, False), {}),
    },
    "softmax": {
        "plain": lambda: ((9 * draw(3, 5),), (), {"dim": -1}),
        "another dimension": lambda: ((9 * draw(3, 5, 2),), (), {"dim": 1}),
    },
    "log_sum_exp": {
        "plain": lambda: ((9 * draw(3, 5),), (), {}),
        "another dimension": lambda: ((9 * draw(3, 5, 2),), (), {"dim": 1}),
        "large": lambda: ((1000 * draw(3, 5),), (), {}),
    },
    "cross_entropy": {
        "plain": lambda: ((9 * draw(2, 3, 7),), (targets,), {}),
        "z-loss": lambda: ((9 * draw(2, 3, 7),), (targets,), {"z_loss": 0.1}),
        "sum": lambda: ((9 * draw(2, 3, 7),), (targets,), {"reduction": "sum"}),
        "no target": lambda: ((draw(2, 3, 7),), (torch.full((2, 3), -100),), {}),
    },
}


# (absolute, relative) per dtype, in the terms of the float64 result
TOLERANCE = {
    torch.float64: (1e-12, 1e-10),
    torch.float32: (3e-5, 3e-5),
    torch.bfloat16: (4e-2, 4e-2),
}


def test_every_op_has_cases():
    assert CASES.keys() == set(OP_NAMES)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(
    ("op", "case"), [(op, case) for op, cases in CASES.items() for case in cases]
)
def test_fast_matches_reference(op, case, dtype):
    compare(op, case, dtype, "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(
    ("op", "case"), [(op, case) for op, cases in CASES.items() for case in cases]
)
def test_fast_matches_reference_on_cuda(op, case, dtype):
    compare(op, case, dtype, "cuda")


def move(x, device):
    """Carry an argument over: a tensor, a mask with tensors in it, or neither."""
    if isinstance(x, CausalMask):
        fields = {f.name: move(getattr(x, f.name), device) for f in dataclasses.fields(x)}
        return CausalMask(**fields)
    return x.to(device) if torch.is_tensor(x) else x


def compare(op, case, dtype, device):
    leaves, rest, keywords = CASES[op][case]()

    def apply(ops, inputs, others):
        given = [*others, *inputs] if op == "embedding" else [*inputs, *others]
        return getattr(OPS[ops], op)(*given, **keywords)

    compare_functions(apply, leaves, rest, dtype, device)


def compare_functions(apply, leaves, rest, dtype, device):
    """Hold `apply("fast", …)` in a dtype to `apply("reference", …)` in float64, with gradients."""
    leaves = [leaf.to(device, dtype) for leaf in leaves]
    rest = [move(x, device) for x in rest]
    results = []
    # The reference runs in float64 on the same (rounded) numbers: the truth for every dtype.
    for name, kind in (("reference", torch.float64), ("fast", dtype)):
        inputs = [leaf.to(kind).requires_grad_() for leaf in leaves]
        out = in_one_tensor(apply(name, inputs, rest))
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=device)
        weight = weight.view_as(out)
        gradients = torch.autograd.grad((out.to(torch.float64) * weight).sum(), inputs)
        results.append((out.detach(), *gradients))
    absolute, relative = TOLERANCE[dtype]
    for truth, ours in zip(*results, strict=True):
        assert ours.isfinite().all()
        scale = truth.abs().max().clamp(min=1) if truth.numel() else 1.0
        torch.testing.assert_close(
            ours.to(torch.float64), truth, atol=float(absolute * scale), rtol=relative
        )


def in_one_tensor(out):
    """Return an op's result; where it has several, all of them side by side."""
    if not isinstance(out, tuple):
        return out
    return torch.cat([part.to(torch.float64).flatten() for part in out])


@pytest.mark.parametrize("case", CASES["attention"])
def test_fast_attention_in_chunks_matches_reference(case, monkeypatch):
    """The same cases again, two queries at a time: the path that long sequences take."""
    monkeypatch.setattr(attention, "QUERY_CHUNK", 2)
    compare("attention", case, torch.float64, "cpu")


@pytest.mark.parametrize("case", CASES["grouped_linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_linear_matches_reference_where_sizes_cannot_be_read(case, dtype, monkeypatch):
    """As in a compiled graph, or on an accelerator: every matrix multiplies all rows."""
    monkeypatch.setattr(experts, "can_look", lambda x: False)
    compare("grouped_linear", case, dtype, "cpu")


def test_grouped_linear_runs_under_autocast():
    (x, weight), (groups,), _ = CASES["grouped_linear"]["plain"]()
    with torch.autocast("cpu", torch.bfloat16):
        low = OPS["fast"].grouped_linear(x, weight, groups)
    exact = OPS["reference"].grouped_linear(x, weight, groups)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), exact, atol=0.1, rtol=0.05)


def kept_bytes(seq, mask):
    """Bytes that autograd keeps for the backward pass, counted once per storage."""
    q, k, v = (torch.randn(1, 2, seq, 16, requires_grad=True) for _ in range(3))
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attention.attend(q, k, v, mask)
    return sum(kept.values())


@pytest.mark.parametrize(
    "mask",
    [
        CausalMask(),
        CausalMask(window=64),
        CausalMask(start=0, key_valid=torch.ones(1, 4096, dtype=torch.bool)),
    ],
    ids=["causal", "window", "padding"],
)
def test_attention_memory_grows_linearly_with_the_sequence(mask):
    def cut(seq):
        valid = mask.key_valid
        return dataclasses.replace(mask, key_valid=None if valid is None else valid[:, :seq])

    short, long = kept_bytes(1024, cut(1024)), kept_bytes(4096, cut(4096))
    assert long <= 4.2 * short


def test_attention_forms_no_table_over_all_queries():
    """The largest tensor of the padded path is a chunk's, not (query, key)."""
    seq, largest = 4096, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if torch.is_tensor(tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return out

    q, k, v = (torch.randn(1, 1, seq, 16) for _ in range(3))
    mask = CausalMask(key_valid=torch.ones(1, seq, dtype=torch.bool))
    with Watch(), torch.no_grad():
        attention.attend(q, k, v, mask)
    assert largest <= 4 * attention.QUERY_CHUNK * seq  # a float32 table of one chunk
