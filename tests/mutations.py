"""Mistakes people make when they write a Transformer, each as a patch of the code.

`test_mutations.py` runs part of the suite with one of them in place and expects red. To see one
with your own eyes: `PYTHONPATH=tests pytest -p mutations --mutation "missing 1/√d_k" tests/ops`.
"""

import dataclasses
import math

import torch
from einops import einsum


def _sdpa(query, key, value, mask=None, *, scale=True, shift=0, masked_to=-math.inf):
    """Attention written once more, with knobs that break it."""
    from scratchlm.ops import CausalMask, reference

    if isinstance(mask, CausalMask):
        if shift:
            mask = dataclasses.replace(
                mask,
                start=mask.start + shift,
                slots=None if mask.slots is None else mask.slots + shift,
            )
        mask = mask.table(range(query.shape[-2]), range(key.shape[-2]), query.device)
    scores = einsum(query, key, "... q d, ... k d -> ... q k")
    if scale:
        scores = scores / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, masked_to)
    return einsum(reference.softmax(scores), value, "... q k, ... k d -> ... q d")


def no_scale(q, k, v, mask=None):
    return _sdpa(q, k, v, mask, scale=False)


def sees_the_next_token(q, k, v, mask=None):
    return _sdpa(q, k, v, mask, shift=1)


def does_not_see_itself(q, k, v, mask=None):
    return _sdpa(q, k, v, mask, shift=-1)


def soft_mask(q, k, v, mask=None):
    return _sdpa(q, k, v, mask, masked_to=-10.0)


def masked_row_is_average(q, k, v, mask=None):
    return _sdpa(q, k, v, mask, masked_to=-1e30)


def unshifted_softmax(x, dim=-1):
    weights = x.exp()
    return weights / weights.sum(dim=dim, keepdim=True)


def softmax_over_the_wrong_axis(x, dim=-1):
    return torch.softmax(x, dim=0)


def norm_by_sum(x, weight, eps=1e-5):
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + eps) * weight


def norm_eps_outside(x, weight, eps=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + eps) * weight


def norm_in_low_precision(x, weight, eps=1e-5):
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope_backwards(x, cos, sin, layout="interleaved"):
    return _original["rope"](x, cos, -sin, layout)


def rope_ignores_layout(x, cos, sin, layout="interleaved"):
    return _original["rope"](x, cos, sin, "half")


def swiglu_gates_the_other_branch(x, w1, w2, w3, b1=None, b2=None, b3=None):
    return _original["swiglu"](x, w3, w2, w1, b3, b2, b1)


def cross_entropy_counts_ignored(
    logits, targets, *, ignore_index=-100, z_loss=0.0, reduction="mean"
):
    total = _original["cross_entropy"](
        logits, targets, ignore_index=ignore_index, z_loss=z_loss, reduction="sum"
    )
    return total if reduction == "sum" else total / targets.numel()


def top_k_discarded(x, router, experts_per_token, renormalize):
    return _original["route"](x, router, router.shape[0], renormalize)


def router_never_renormalises(x, router, experts_per_token, renormalize):
    return _original["route"](x, router, experts_per_token, False)


# name -> (module, attribute, replacement, the tests that must notice)
OPS_TESTS = ["tests/ops/test_reference.py"]
PROPERTIES = "tests/model/test_properties.py"
MUTATIONS = {
    "missing 1/√d_k": ("ops.reference", "scaled_dot_product_attention", no_scale, OPS_TESTS),
    "mask off by one, forward": (
        "ops.reference",
        "scaled_dot_product_attention",
        sees_the_next_token,
        [f"{PROPERTIES}::test_changing_the_future_leaves_the_past_untouched"],
    ),
    "mask off by one, back": (
        "ops.reference",
        "scaled_dot_product_attention",
        does_not_see_itself,
        [f"{PROPERTIES}::test_the_whole_model_fast_equals_reference"],
    ),
    "mask by a finite number": (
        "ops.reference",
        "scaled_dot_product_attention",
        soft_mask,
        OPS_TESTS,
    ),
    "a fully masked row averages": (
        "ops.reference",
        "scaled_dot_product_attention",
        masked_row_is_average,
        OPS_TESTS,
    ),
    "un-shifted softmax": ("ops.reference", "softmax", unshifted_softmax, OPS_TESTS),
    "softmax over the wrong axis": (
        "ops.reference",
        "softmax",
        softmax_over_the_wrong_axis,
        OPS_TESTS,
    ),
    "RMS of the sum": ("ops.reference", "rms_norm", norm_by_sum, OPS_TESTS),
    "ε outside the root": (
        "ops.reference",
        "rms_norm",
        norm_eps_outside,
        ["tests/ops/test_fast_matches_reference.py"],
    ),
    "norm in bfloat16": ("ops.reference", "rms_norm", norm_in_low_precision, OPS_TESTS),
    "RoPE turns backwards": ("ops.reference", "rope", rope_backwards, OPS_TESTS),
    "RoPE ignores its layout": ("ops.reference", "rope", rope_ignores_layout, OPS_TESTS),
    "SwiGLU gates the other branch": (
        "ops.reference",
        "swiglu",
        swiglu_gates_the_other_branch,
        OPS_TESTS,
    ),
    "ignored targets count": (
        "ops.reference",
        "cross_entropy",
        cross_entropy_counts_ignored,
        OPS_TESTS,
    ),
    "top-k is discarded": ("ops.reference", "route", top_k_discarded, OPS_TESTS),
    "router weights not renormalised": (
        "ops.reference",
        "route",
        router_never_renormalises,
        OPS_TESTS,
    ),
    "cache forgets to advance": (
        "model.cache.KVCache",
        "advance",
        lambda self: None,
        [f"{PROPERTIES}::test_cached_token_by_token_equals_the_full_forward"],
    ),
    "positions start at zero after a cache": (
        "model.rotary.RotaryEmbedding",
        "at",
        lambda self, places: _original["at"](
            self, slice(0, places.stop - places.start) if isinstance(places, slice) else places
        ),
        [f"{PROPERTIES}::test_cached_token_by_token_equals_the_full_forward"],
    ),
    "documents see each other": (
        "ops.masks.CausalMask",
        "documents",
        property(lambda self: None, lambda self, value: None),
        [f"{PROPERTIES}::test_packed_documents_equal_separate_documents"],
    ),
    "final norm left out": (
        "model.transformer.Transformer",
        "hidden",
        lambda self, *a, **kw: _without_final_norm(self, *a, **kw),
        ["tests/model/test_parity_transformers.py"],
    ),
}
_original = {}


def _without_final_norm(model, *arguments, **keywords):
    kept, model.ln_final = model.ln_final, torch.nn.Identity()
    try:
        return _original["hidden"](model, *arguments, **keywords)
    finally:
        model.ln_final = kept


def apply(name):
    """Put a mistake in place, everywhere the function is used."""
    import importlib

    from scratchlm import ops

    path, attribute, wrong, _ = MUTATIONS[name]
    parts = path.split(".")
    is_class = parts[-1][0].isupper()
    module = importlib.import_module("scratchlm." + ".".join(parts[:-1] if is_class else parts))
    home = getattr(module, parts[-1]) if is_class else module
    if attribute != "documents":
        _original[attribute] = getattr(home, attribute)
    setattr(home, attribute, wrong)
    if hasattr(ops.OPS["reference"], attribute):
        changed = dataclasses.replace(ops.OPS["reference"], **{attribute: wrong})
        ops.OPS["reference"] = changed


def pytest_addoption(parser):
    parser.addoption("--mutation", choices=list(MUTATIONS))


def pytest_configure(config):
    if config.getoption("--mutation"):
        apply(config.getoption("--mutation"))
