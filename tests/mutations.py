"""Mistakes people make when they write a Transformer, each as a patch of the code.

`test_mutations.py` runs part of the suite with one of them in place and expects red. To see one
with your own eyes: `PYTHONPATH=tests pytest -p mutations --mutation "missing 1/√d_k" tests/ops`.
"""

import dataclasses
import math

import torch
from einops import einsum
from hypothesis import Phase, settings


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


def no_scale(self, q, k, v, mask=None):
    return _sdpa(q, k, v, mask, scale=False)


def sees_the_next_token(self, q, k, v, mask=None):
    return _sdpa(q, k, v, mask, shift=1)


def does_not_see_itself(self, q, k, v, mask=None):
    return _sdpa(q, k, v, mask, shift=-1)


def soft_mask(self, q, k, v, mask=None):
    return _sdpa(q, k, v, mask, masked_to=-10.0)


def masked_row_is_average(self, q, k, v, mask=None):
    return _sdpa(q, k, v, mask, masked_to=-1e30)


def unshifted_softmax(self, x, dim=-1):
    weights = x.exp()
    return weights / weights.sum(dim=dim, keepdim=True)


def softmax_over_the_wrong_axis(self, x, dim=-1):
    return torch.softmax(x, dim=0)


def norm_by_sum(self, x, weight, eps=1e-5):
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + eps) * weight


def norm_eps_outside(self, x, weight, eps=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + eps) * weight


def norm_in_low_precision(self, x, weight, eps=1e-5):
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope_backwards(self, x, cos, sin, layout="interleaved"):
    return _original["rope"](self, x, cos, -sin, layout)


def rope_ignores_layout(self, x, cos, sin, layout="interleaved"):
    return _original["rope"](self, x, cos, sin, "half")


def swiglu_gates_the_other_branch(self, x):
    return self.w2(self.ops.silu(self.w3(x)) * self.w1(x))


def swiglu_formula_gates_the_other_branch(x, w1, w2, w3, b1=None, b2=None, b3=None):
    return _original["swiglu"](x, w3, w2, w1, b3, b2, b1)


def experts_take_each_others_rows(self, x, weight, ends):
    return _original["grouped_linear"](self, x, weight.roll(1, 0), ends)


def cross_entropy_counts_ignored(
    self, logits, targets, *, ignore_index=-100, z_loss=0.0, reduction="mean"
):
    total = _original["cross_entropy"](
        self, logits, targets, ignore_index=ignore_index, z_loss=z_loss, reduction="sum"
    )
    return total if reduction == "sum" else total / targets.numel()


def top_k_discarded(self, logits, experts_per_token, renormalize):
    return _original["route"](self, logits, logits.shape[-1], renormalize)


def router_never_renormalises(self, logits, experts_per_token, renormalize):
    return _original["route"](self, logits, experts_per_token, False)


def positions_start_at_zero(self, positions):
    if isinstance(positions, range):
        positions = range(len(positions))
    return _original["tables"](self, positions)


# name -> (module or class, attribute, replacement, the tests that must notice)
FORMULAS = "ops.reference.ReferenceOps"  # FastOps, which has its own, stays right beside it
OPS = "tests/ops/test_reference.py"
MODULES = ["tests/model/test_modules_match_reference.py"]
PROPERTIES = "tests/model/test_properties.py"
MUTATIONS = {
    "missing 1/√d_k": (
        FORMULAS,
        "scaled_dot_product_attention",
        no_scale,
        [f"{OPS}::test_reference_equals_torch"],
    ),
    "mask off by one, forward": (
        FORMULAS,
        "scaled_dot_product_attention",
        sees_the_next_token,
        [f"{PROPERTIES}::test_changing_the_future_leaves_the_past_untouched"],
    ),
    "mask off by one, back": (
        FORMULAS,
        "scaled_dot_product_attention",
        does_not_see_itself,
        [f"{PROPERTIES}::test_the_whole_model_fast_equals_reference"],
    ),
    "mask by a finite number": (
        FORMULAS,
        "scaled_dot_product_attention",
        soft_mask,
        [f"{OPS}::test_low_precision_is_computed_in_float32"],
    ),
    "a fully masked row averages": (
        FORMULAS,
        "scaled_dot_product_attention",
        masked_row_is_average,
        [f"{OPS}::test_low_precision_is_computed_in_float32"],
    ),
    "un-shifted softmax": (
        FORMULAS,
        "softmax",
        unshifted_softmax,
        [f"{OPS}::test_low_precision_is_computed_in_float32"],
    ),
    "softmax over the wrong axis": (
        FORMULAS,
        "softmax",
        softmax_over_the_wrong_axis,
        [f"{OPS}::test_reference_equals_torch"],
    ),
    "RMS of the sum": (FORMULAS, "rms_norm", norm_by_sum, [f"{OPS}::test_reference_equals_torch"]),
    "ε outside the root": (
        FORMULAS,
        "rms_norm",
        norm_eps_outside,
        ["tests/ops/test_fast_matches_reference.py::test_fast_matches_reference"],
    ),
    "norm in bfloat16": (
        FORMULAS,
        "rms_norm",
        norm_in_low_precision,
        [f"{OPS}::test_low_precision_is_computed_in_float32"],
    ),
    "RoPE rotates backwards": (
        FORMULAS,
        "rope",
        rope_backwards,
        [f"{OPS}::test_rope_rotates_each_pair_as_a_complex_number"],
    ),
    "RoPE ignores its layout": (
        FORMULAS,
        "rope",
        rope_ignores_layout,
        [f"{OPS}::test_rope_rotates_each_pair_as_a_complex_number"],
    ),
    "SwiGLU gates the other branch": (
        "model.layers.SwiGLU",
        "forward",
        swiglu_gates_the_other_branch,
        MODULES,
    ),
    "the formula of SwiGLU gates the other branch": (
        "ops.reference",
        "swiglu",
        swiglu_formula_gates_the_other_branch,
        [f"{OPS}::test_reference_equals_torch"],
    ),
    "experts take each other's rows": (
        FORMULAS,
        "grouped_linear",
        experts_take_each_others_rows,
        [f"{PROPERTIES}::test_the_whole_model_fast_equals_reference"],
    ),
    "ignored targets count": (
        FORMULAS,
        "cross_entropy",
        cross_entropy_counts_ignored,
        [f"{OPS}::test_cross_entropy_equals_torch"],
    ),
    "top-k is discarded": (
        FORMULAS,
        "route",
        top_k_discarded,
        [f"{OPS}::test_moe_equals_the_naive_loop"],
    ),
    "router weights not renormalised": (
        FORMULAS,
        "route",
        router_never_renormalises,
        [f"{OPS}::test_moe_equals_the_naive_loop"],
    ),
    "cache forgets to advance": (
        "model.cache.KVCache",
        "advance",
        lambda self: None,
        [f"{PROPERTIES}::test_cached_token_by_token_equals_the_full_forward"],
    ),
    "positions start at zero after a cache": (
        "model.rotary.RotaryEmbedding",
        "tables",
        positions_start_at_zero,
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

    from scratchlm.ops import reference

    path, attribute, wrong, _ = MUTATIONS[name]
    parts = path.split(".")
    is_class = parts[-1][0].isupper()
    module = importlib.import_module("scratchlm." + ".".join(parts[:-1] if is_class else parts))
    home = getattr(module, parts[-1]) if is_class else module
    if attribute != "documents":
        _original[attribute] = getattr(home, attribute)
    setattr(home, attribute, wrong)
    of = getattr(getattr(reference, attribute, None), "__self__", None)
    if home is type(of):  # the formula as a function was taken from there
        setattr(reference, attribute, getattr(of, attribute))


def pytest_addoption(parser):
    parser.addoption("--mutation", choices=list(MUTATIONS))


def pytest_configure(config):
    if config.getoption("--mutation"):
        apply(config.getoption("--mutation"))
        found = (Phase.explicit, Phase.generate)  # any failure will do: no smallest one is sought
        settings.register_profile("mutated", settings.get_profile("suite"), phases=found)
        settings.load_profile("mutated")
