"""A model and all that trains it: what one step changes, and what a checkpoint must hold.

Acceleration, compilation, checkpointing and precision are applied here, from outside; the state
dict keeps its names. The training state, beside the weights, is

    KEY.PARAMETER    the optimizer's tensors, such as exp_avg.layers.0.ln1.weight
    raw.PARAMETER    where an average is kept: the weights it is the average of

With an average, `model.safetensors` holds the average: it is the model one wants to use. Where part
of a model does not learn (an adapter on its base), it holds the part that does.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from scratchlm import acceleration
from scratchlm.config import ModelConfig
from scratchlm.data import Batch
from scratchlm.data.permutation import derive_key
from scratchlm.errors import ScratchLMError
from scratchlm.model import TransformerLM
from scratchlm.ops import Ops
from scratchlm.threads import share_cores
from scratchlm.training.optimizers import ScalesGradients, WritesShadowWeights, make_optimizers
from scratchlm.training.recording import RecordedBackward
from scratchlm.training.settings import TrainConfig
from scratchlm.training.shares import Shares

DROPOUT = 6  # the purpose a key is derived for


class Learner:
    """A model on a device, its optimizers, and its moving average if there is one."""

    def __init__(
        self,
        model: TransformerLM,
        settings: TrainConfig,
        *,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.model, self.warn = model, warn
        self.device = next(model.parameters()).device
        if self.device.type == "cpu":
            share_cores()
        self.settings = settings = settings.resolved(self.device.type)
        check_applicable(settings, self.device.type)
        disable_cublas_workspace(settings)
        if settings.accelerate:
            acceleration.accelerate(model)
        else:
            acceleration.plain(model)
        self.optimizers = make_optimizers(
            model,
            settings.optimizer,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            moment=torch.bfloat16 if settings.moment == "bf16" else None,
            fast=settings.fast_optimizer,
        )
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        adapted = [getattr(module, "adapters", {}) for module in model.modules()]
        self.is_partial = any(adapted)  # a checkpoint holds the adapters, not their base
        self.draws = any(config.dropout for each in adapted for config in each.values())
        if self.draws and settings.shares > 1:
            raise ScratchLMError("train.shares does not go with dropout: threads draw in any order")
        self.average: dict[str, Tensor] | None = None
        if settings.ema:
            self.average = {name: p.detach().clone() for name, p in self.parameters.items()}
        apply_checkpointing(model, settings.checkpointing, settings.checkpointed_layers)
        apply_precision(model, settings.precision)
        self.loss: Callable[..., Tensor] = apply_compile(model, settings.compile)
        self._compiled_once = settings.compile == "off"
        self.shadow = None
        if settings.accelerate and settings.precision != "fp32" and self.device.type == "cuda":
            low = all(isinstance(optimizer, ScalesGradients) for optimizer in self.optimizers)
            self.shadow = acceleration.shadow_weights(model, low_gradients=low)
            for optimizer in self.optimizers:
                if isinstance(optimizer, WritesShadowWeights):
                    optimizer.write_shadow_weights(self.shadow)
        self.shares: Shares | None = None
        if settings.shares > 1:
            self.shares = Shares(settings.shares)
        self.recorded: RecordedBackward | None = None
        if settings.cuda_graph:
            self.recorded = RecordedBackward(
                self.backward,
                list(self.parameters.values()),
                accumulates=settings.micro_batch_size != settings.batch_size,
                warn=warn,
            )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Run matmuls in bfloat16 where the settings say so."""
        mixed = self.settings.precision != "fp32"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=mixed)

    def without_compile(self) -> contextlib.AbstractContextManager[Any]:
        """Run layers as they are: what evaluation and samples gain is less than compiling costs."""
        if self.settings.compile == "off":
            return contextlib.nullcontext()
        return torch.compiler.set_stance("force_eager")

    def backward(self, batch: Batch, weight: Tensor) -> Tensor:
        """Add to the gradients those of the batch's mean loss × weight; return that."""
        if self.shares is not None:
            return self._backward_in_shares(self.shares, batch, weight)
        if self._compiled_once:
            return self._backward(batch, weight)
        try:
            loss = self._backward(batch, weight)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler fails in many ways; ours fail again without it
            self._give_up_compiling(error)
            loss = self._backward(batch, weight)
        self._compiled_once = True
        return loss

    def _give_up_compiling(self, error: Exception) -> None:
        """Go on with the layers as they are, as if the first step had not been tried."""
        remove_compile(self.model)
        self.loss = self.model.loss
        for p in self.parameters.values():
            p.grad = None
        if self.shadow is not None:
            self.shadow.forget_gradients()
        why = " ".join(str(error).split())[:200]
        self.warn(f"train.compile: compiling failed, layers run as they are: {why}")

    def _backward(self, batch: Batch, weight: Tensor) -> Tensor:
        batch = batch.to(self.device, non_blocking=True)
        with contextlib.nullcontext() if self.shadow is None else self.shadow.visible():
            share = self._weighed_loss(batch, weight)
            share.backward()
        return share.detach()

    def _weighed_loss(self, batch: Batch, weight: Tensor) -> Tensor:
        with self.autocast():
            mean = self.loss(
                batch.inputs,
                batch.targets,
                document_ids=batch.document_ids,
                z_loss=self.settings.z_loss,
            )
        return mean * weight.to(mean, non_blocking=True)

    def _backward_in_shares(self, shares: Shares, batch: Batch, weight: Tensor) -> Tensor:
        parameters, total = list(self.parameters.values()), max(1, batch.num_targets())

        def work(part: Batch) -> tuple[Tensor, tuple[Tensor | None, ...]]:
            loss = self._weighed_loss(part, weight * (part.num_targets() / total))
            return loss.detach(), torch.autograd.grad(loss, parameters, allow_unused=True)

        losses, gradients = zip(*shares.each(work, batch), strict=True)
        for p, *parts in zip(parameters, *gradients, strict=True):
            found = [part for part in (p.grad, *parts) if part is not None]
            if len(found) == 1:  # two parameters may have been given one tensor
                p.grad = found[0].clone()
            elif found:
                p.grad = reduce(torch.add, found)
        return torch.stack(losses).sum()

    def begin_step(self, step: int) -> None:
        """Make what a step draws a function of seed and step."""
        if self.draws:
            torch.manual_seed(derive_key(self.settings.seed, step, DROPOUT) >> 1)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the model be as it is used: without dropout."""
        if not self.draws:
            yield
            return
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    def set_lr(self, lr: float) -> None:
        """Give every optimizer the step's learning rate."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    @torch.no_grad()
    def update_average(self, step: int) -> None:
        """Move the average towards the weights; early in a run, faster."""
        if self.average is None:
            return
        decay = min(self.settings.ema, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.average.values()), list(self.parameters.values()), 1 - decay)

    @contextlib.contextmanager
    def best_weights(self) -> Iterator[TransformerLM]:
        """Lend the model with its averaged weights, where there is an average."""
        if self.average is None:
            yield self.model
            return
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._put(self.average)
        try:
            yield self.model
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, tensors: dict[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.copy_(tensors[name])

    # What a checkpoint holds

    def model_tensors(self) -> dict[str, Tensor]:
        """Return the weights to use, under the names of the state dict."""
        learnt = {name: p.detach() for name, p in self.parameters.items()}
        return {**(learnt if self.is_partial else self.model.state_dict()), **(self.average or {})}

    def training_state(self) -> dict[str, Tensor]:
        """Return what else the next step depends on."""
        tensors: dict[str, Tensor] = {}
        if self.average is not None:
            tensors = {f"raw.{name}": p.detach() for name, p in self.parameters.items()}
        for optimizer in self.optimizers:
            for name, p in self.parameters.items():
                for key, value in optimizer.state.get(p, {}).items():
                    tensors[f"{key}.{name}"] = value
        return tensors

    def load(self, model: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        """Take up what `model_tensors` and `training_state` returned."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for full_name, tensor in state.items():
            key, _, name = full_name.partition(".")
            by_name.setdefault(name, {})[key] = tensor
        try:
            if self.is_partial and model.keys() != self.parameters.keys():
                raise KeyError("the tensors are not those of the part that learns")
            self.model.load_state_dict(model, strict=not self.is_partial)
            if self.average is not None:
                self.average = {name: model[name].to(self.device) for name in self.average}
                self._put({name: by_name[name].pop("raw") for name in self.parameters})
            for optimizer in self.optimizers:
                _load_optimizer(optimizer, self.parameters, by_name)
        except (KeyError, RuntimeError) as error:
            what = " ".join(str(error).split())[:200]
            raise ScratchLMError(
                f"the checkpoint does not fit this model and optimizer: {what}"
            ) from None


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, torch.nn.Parameter],
    by_name: dict[str, dict[str, Tensor]],
) -> None:
    names = {id(p): name for name, p in parameters.items()}
    table = optimizer.state_dict()  # for its groups; their parameters are numbered in order
    order = [p for group in optimizer.param_groups for p in group["params"]]
    table["state"] = {
        index: {key: tensor.clone() for key, tensor in by_name[names[id(p)]].items()}
        for index, p in enumerate(order)
        if names[id(p)] in by_name
    }
    optimizer.load_state_dict(table)


def build_model(
    config: ModelConfig, seed: int, device: torch.device | str, ops: str | Ops = "fast"
) -> TransformerLM:
    """Make a model whose first weights are a function of the seed alone, whatever the device."""
    model = TransformerLM(config, ops)
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model.to(device)


# Means applied from outside


def check_applicable(settings: TrainConfig, device: str) -> None:
    """Refuse by name a setting that cannot apply to a model on such a device."""
    if settings.cuda_graph and device != "cuda":
        raise ScratchLMError(f"train.cuda_graph needs a CUDA device; the model is on {device}")
    if settings.shares > 1 and device != "cpu":
        raise ScratchLMError(f"train.shares is for a CPU; the model is on {device}")
    if settings.precision == "fp8" and device != "cuda":
        raise ScratchLMError(f"train.precision=fp8 needs a CUDA device; the model is on {device}")
    if settings.precision == "fp8" and not settings.accelerate:
        raise ScratchLMError("train.precision=fp8 needs train.accelerate")
    if settings.accelerate and not acceleration.is_available():
        raise ScratchLMError("train.accelerate needs scratchlm.accelerate, which is not there")
    if settings.checkpointed_layers is not None and settings.checkpointing == "none":
        raise ScratchLMError("train.checkpointed_layers needs train.checkpointing")


def check_overrides(values: dict[str, Any], device: str) -> None:
    """Refuse settings that cannot apply before anything is made, as `check_applicable` does."""
    about = {"cuda_graph", "shares", "precision", "accelerate"}
    about |= {"checkpointing", "checkpointed_layers"}
    given = {name: values[name] for name in about if name in values}
    check_applicable(TrainConfig.from_dict(given).resolved(device), device)


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
