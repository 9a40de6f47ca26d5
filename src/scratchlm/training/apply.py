"""Precision, recomputation and compilation, applied to a model from outside: its names stay."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from scratchlm import acceleration
from scratchlm.model import TransformerLM
from scratchlm.training.settings import TrainConfig


def apply_precision(model: TransformerLM, precision: str | None) -> None:
    """Let the residual stream, or also the layers' products, run lower than autocast has them."""
    if precision in ("bf16-residual", "fp8"):
        embeddings = model.token_embeddings
        if hasattr(embeddings, "low_precision"):  # accelerated: rows are written so
            embeddings.low_precision = True  # type: ignore[assignment]
        else:
            embeddings.register_forward_hook(_in_bfloat16)
    if precision == "fp8":
        acceleration.enable_fp8(model)


def _in_bfloat16(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Start the residual stream in bfloat16, where products run so; nothing after widens it."""
    return output.bfloat16() if torch.is_autocast_enabled(output.device.type) else output


class _Recomputed(torch.nn.Module):
    """A module whose forward is computed again in the backward pass instead of being kept."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the module's own forward, keeping its inputs alone."""
        return checkpoint(super().forward, *inputs, use_reentrant=False, **options)


class _SelectivelyRecomputed(torch.nn.Module):
    """The same, but results of matrix products and attention are kept."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the module's own forward, keeping its inputs and the results of `SAVED_OPS`."""
        kept = partial(create_selective_checkpoint_contexts, _save_products)
        return checkpoint(super().forward, *inputs, use_reentrant=False, context_fn=kept, **options)


_aten = torch.ops.aten
SAVED_OPS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


# By name: they are there only where they have run.
@cache
def saved_custom_ops() -> frozenset[str]:
    """Return the custom operators whose results are kept: CPU attention's, and the fusions'."""
    return frozenset({"scratchlm::causal_attention", *acceleration.saved_operators()})


def _save_products(ctx: Any, op: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
    if op in SAVED_OPS or op.name() in saved_custom_ops():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _recomputed(kind: type, how: type) -> type:
    made = type(f"{how.__name__}{kind.__name__}", (how, kind), {})
    acceleration.register_class(made, kind)
    return made


# policy -> the parts of a layer it recomputes, and how
_CHECKPOINTING: dict[str, dict[str, type]] = {
    "none": {},
    "attention": {"attn": _Recomputed},
    "ffn": {"ffn": _Recomputed},
    "selective": {"attn": _SelectivelyRecomputed, "ffn": _Recomputed},
    "block": {"": _Recomputed},
}
# the same for the layers past `checkpointed_layers`
_BEYOND: dict[str, dict[str, type]] = {
    "selective": {"attn": _SelectivelyRecomputed, "ffn": _SelectivelyRecomputed}
}


def apply_checkpointing(model: TransformerLM, policy: str, layers: int | None = None) -> None:
    """Recompute a part of the first layers, or of all, in the backward pass instead of keeping it.

    What memory allows to keep need not be computed twice: as many layers as it takes, no more. With
    `selective` the other layers recompute too, but no matrix product.
    """
    for number, layer in enumerate(model.layers):
        within = layers is None or number < layers
        for part, how in (_CHECKPOINTING if within else _BEYOND).get(policy, {}).items():
            module = layer.get_submodule(part)
            # By its class, not by a wrapper of its own: all layers then share one compiled graph.
            module.__class__ = _recomputed(type(module), how)  # type: ignore[arg-type]


def apply_compile(model: TransformerLM, how: str | None) -> Callable[..., Tensor]:
    """Return the loss, compiled whole or layer by layer; names in the state dict stay.

    Every shape has a graph of its own: one with symbolic sizes may sum in another order, and which
    of the two a run gets would depend on the shapes it has seen, and so on whether it was resumed.
    """
    if how != "off":  # or a hook put on a layer after the first step would be ignored
        torch._dynamo.config.skip_nnmodule_hook_guards = False
    if how == "model":
        return torch.compile(model.loss, dynamic=False)
    if how == "block":
        for layer in model.layers:
            layer.compile(dynamic=False)
    return model.loss


def remove_compile(model: TransformerLM) -> None:
    """Take back what `apply_compile` has done to the layers."""
    for layer in model.layers:
        layer._compiled_call_impl = None


# Read when cuBLAS starts. With a workspace, cuBLAS clears part of it before every GEMM: in a CUDA
# graph of small kernels that costs about 1 %, and without one the GEMMs are as fast.
WORKSPACE, NO_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":0:0"


def disable_cublas_workspace(settings: TrainConfig) -> None:
    """Run the GEMMs of CUDA graphs without a workspace, unless the user has set the variable."""
    if settings.cuda_graph and not settings.deterministic:
        os.environ.setdefault(WORKSPACE, NO_WORKSPACE)
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")  # shares that workspace, or warns
