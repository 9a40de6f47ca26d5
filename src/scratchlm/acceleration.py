"""The door to `accelerate/`: what the rest of the package asks of it.

Where the room is missing, everything works, slower: each function here has the plain answer.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from scratchlm.errors import ScratchLMError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from scratchlm.accelerate.shadow_weights import ShadowWeights
    from scratchlm.model import TransformerLM
    from scratchlm.paged import PagedCache, Runner

M = TypeVar("M", bound="nn.Module")


def is_available() -> bool:
    """Whether the room is there."""
    try:
        return find_spec("scratchlm.accelerate") is not None
    except (ImportError, ValueError):  # blocked
        return False


def accelerate(model: M) -> M:
    """Apply the table of fusions to a model, in place."""
    if not is_available():
        return model
    from scratchlm.accelerate import accelerate

    return accelerate(model)


def plain(model: M) -> M:
    """Take acceleration back from a model, in place."""
    if not is_available():
        return model
    from scratchlm.accelerate import plain

    return plain(model)


def make_runner(
    model: TransformerLM, cache: PagedCache, *, max_rows: int, exact: bool
) -> Runner | None:
    """Return what reads steps of many requests in one forward, if anything does.

    With `exact` no sum depends on what else is in the step; on a CPU it never does.
    """
    if not is_available():
        return None
    from scratchlm.accelerate.decoding import make_runner

    return make_runner(model, cache, max_rows=max_rows, exact=exact)


MAX_FUSED_K = 128


def choose_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    numbers: Tensor | None,
    slots: Tensor,
    last: Tensor,
) -> Tensor | None:
    """Choose every row's token in one kernel and write it to `last`, where a kernel does that.

    `top_k` is at most `MAX_FUSED_K`, or the vocabulary's size with a `top_p` of 1.
    """
    if not launches_for(logits):
        return None
    from scratchlm.accelerate.kernels.triton.choose_token import choose_tokens

    return choose_tokens(logits, temperature, top_k, top_p, numbers, slots, last)


def join_weights(model: TransformerLM) -> None:
    """Lay weights that multiply one input side by side in memory."""
    if is_available():
        from scratchlm.accelerate.joined_weights import join_weights

        join_weights(model)


def lay_out(model: TransformerLM, device: torch.device) -> None:
    """Put quantised weights in the order in which this device's kernels read them."""
    if is_available():
        from scratchlm.accelerate.quantized import lay_out

        lay_out(model, device)


def shadow_weights(model: nn.Module, low_gradients: bool) -> ShadowWeights | None:
    """Return bf16 copies of an accelerated model's matrices, for training in low precision."""
    if not is_available():
        return None
    from scratchlm.accelerate.shadow_weights import ShadowWeights

    return ShadowWeights(model, low_gradients=low_gradients)


def enable_fp8(model: nn.Module) -> None:
    """Let the layers' products run in 8 bits where the model trains."""
    if not is_available():
        raise ScratchLMError("precision fp8 needs scratchlm.accelerate, which is not there")
    from scratchlm.accelerate.fp8 import enable_fp8

    enable_fp8(model)


def saved_operators() -> set[str]:
    """Return the custom operators whose results selective checkpointing keeps."""
    if not is_available():
        return set()
    from scratchlm.accelerate import FUSIONS

    return {name for fusion in FUSIONS for name in fusion.saved}


def register_class(made: type[nn.Module], of: type[nn.Module]) -> None:
    """Let a class made from one of ours count as ours: its forward is computed again, no more."""
    if is_available():
        from scratchlm.accelerate.table import PLAIN_TYPES

        if of in PLAIN_TYPES and made not in PLAIN_TYPES:
            PLAIN_TYPES.append(made)


def register_adapted(made: type[nn.Module]) -> None:
    """Let the fusions that add adapters to their products know a class of adapted layers."""
    if is_available():
        from scratchlm.accelerate.table import ADAPTED_TYPES

        if made not in ADAPTED_TYPES:
            ADAPTED_TYPES.append(made)


def launches_for(x: Tensor) -> bool:
    """Whether our kernels can be launched for this tensor."""
    if not is_available():
        return False
    from scratchlm.accelerate.kernels import launches_for

    return launches_for(x)
