"""Every fast op against its definition: values, gradients, dtypes, odd shapes, odd masks."""

import dataclasses

import pytest
import torch

from scratchlm.ops import OPS, CausalMask, Ops, attention, experts, reference
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
    "linears": {
        "plain": lambda: ((draw(2, 3, 5), draw(7, 5), draw(1, 5), draw(4, 5)), (), {}),
        "bias": lambda: ((draw(3, 5), draw(7, 5), draw(4, 5), draw(7), draw(4)), (), {}),
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
    "rope": {
        "interleaved": lambda: ((draw(2, 3, 5, 8),), (*rope_tables(5, 4), "interleaved"), {}),
        "half": lambda: ((draw(2, 3, 5, 8),), (*rope_tables(5, 4), "half"), {}),
        "width 2": lambda: ((draw(5, 2),), (*rope_tables(5, 1), "interleaved"), {}),
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
    "swiglu": {
        "plain": lambda: ((draw(2, 3, 5), draw(7, 5), draw(5, 7), draw(7, 5)), (), {}),
        "bias": lambda: (
            (draw(3, 5), draw(7, 5), draw(5, 7), draw(7, 5), draw(7), draw(5), draw(7)),
            (),
            {},
        ),
    },
    "mlp": {
        name: lambda name=name: (
            (draw(3, 5), draw(7, 5), draw(5, 7), draw(7), draw(5)),
            (name,),
            {},
        )
        for name in reference.ACTIVATIONS
    },
    "moe": {
        "plain": lambda: (
            (draw(2, 6, 8), draw(4, 8), draw(4, 16, 8), draw(4, 8, 16), draw(4, 16, 8)),
            (2, True),
            {},
        ),
        "an expert nobody chose, odd widths": lambda: (
            (draw(1, 5), draw(4, 5), draw(4, 7, 5), draw(4, 5, 7), draw(4, 7, 5)),
            (1, False),
            {},
        ),
        "all experts": lambda: (
            (draw(3, 8), draw(3, 8), draw(3, 4, 8), draw(3, 8, 4), draw(3, 4, 8)),
            (3, True),
            {},
        ),
    },
    "softmax": {"plain": lambda: ((9 * draw(3, 5),), (), {"dim": -1})},
    "cross_entropy": {
        "plain": lambda: ((9 * draw(2, 3, 7),), (targets,), {}),
        "z-loss": lambda: ((9 * draw(2, 3, 7),), (targets,), {"z_loss": 0.1}),
        "sum": lambda: ((9 * draw(2, 3, 7),), (targets,), {"reduction": "sum"}),
        "no target": lambda: ((draw(2, 3, 7),), (torch.full((2, 3), -100),), {}),
    },
    "linear_cross_entropy": {
        "plain": lambda: ((draw(2, 3, 5), draw(7, 5)), (targets,), {}),
        "z-loss": lambda: ((draw(2, 3, 5), draw(7, 5)), (targets,), {"z_loss": 0.1}),
        "sum": lambda: ((draw(2, 3, 5), draw(7, 5)), (targets,), {"reduction": "sum"}),
        "no target": lambda: ((draw(2, 3, 5), draw(7, 5)), (torch.full((2, 3), -100),), {}),
        "slices": lambda: (
            (draw(300, 8), draw(20_000, 8)),
            (torch.arange(300).masked_fill(torch.arange(300) % 7 == 0, -100),),
            {},
        ),
    },
}


def call(function, op, arguments, keywords):
    """Call an op with its tensors in a row; several results come back as one."""
    if op != "linears":
        return function(*arguments, **keywords)
    x, *rest = arguments
    weights, biases = [w for w in rest if w.ndim == 2], [b for b in rest if b.ndim == 1]
    return torch.cat(list(function(x, weights, biases or [None] * len(weights))), dim=-1)


# (absolute, relative) per dtype, in the terms of the float64 result
TOLERANCE = {
    torch.float64: (1e-12, 1e-10),
    torch.float32: (3e-5, 3e-5),
    torch.bfloat16: (4e-2, 4e-2),
}


def test_every_op_has_cases():
    assert CASES.keys() == {field.name for field in dataclasses.fields(Ops)}


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
    leaves = [leaf.to(device, dtype) for leaf in leaves]
    rest = [move(x, device) for x in rest]
    results = []
    # The reference runs in float64 on the same (rounded) numbers: the truth for every dtype.
    for name, kind in (("reference", torch.float64), ("fast", dtype)):
        inputs = [leaf.to(kind).requires_grad_() for leaf in leaves]
        given = [*rest, *inputs] if op == "embedding" else [*inputs, *rest]
        out = call(getattr(OPS[name], op), op, given, keywords)
        out = getattr(out, "output", out)
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


@pytest.mark.parametrize("case", CASES["attention"])
def test_fast_attention_in_chunks_matches_reference(case, monkeypatch):
    """The same cases again, two queries at a time: the path that long sequences take."""
    monkeypatch.setattr(attention, "QUERY_CHUNK", 2)
    compare("attention", case, torch.float64, "cpu")


def test_moe_tells_the_same_routing_as_the_reference():
    leaves, rest, _ = CASES["moe"]["plain"]()
    slow, quick = reference.moe(*leaves, *rest), experts.moe(*leaves, *rest)
    assert torch.equal(slow.experts, quick.experts)
    torch.testing.assert_close(slow.probabilities, quick.probabilities)


def test_fast_ops_run_under_autocast():
    leaves, rest, _ = CASES["moe"]["plain"]()
    with torch.autocast("cpu", torch.bfloat16):
        output = experts.moe(*leaves, *rest).output
    exact = reference.moe(*leaves, *rest).output
    torch.testing.assert_close(output.float(), exact, atol=0.3, rtol=0.1)


def kept_bytes(seq, mask):
    """Bytes that autograd keeps for the backward pass, counted once per storage."""
    q, k, v = (torch.randn(1, 2, seq, 16, requires_grad=True) for _ in range(3))
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attention.attention(q, k, v, mask)
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
        attention.attention(q, k, v, mask)
    assert largest <= 4 * attention.QUERY_CHUNK * seq  # a float32 table of one chunk
