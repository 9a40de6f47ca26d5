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
import warnings
from collections.abc import Callable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scratchlm import acceleration
from scratchlm.config import ModelConfig
from scratchlm.data import IGNORE_INDEX, Batch
from scratchlm.data.permutation import derive_key
from scratchlm.errors import ScratchLMError
from scratchlm.model import TransformerLM
from scratchlm.ops import Ops
from scratchlm.threads import share_cores
from scratchlm.training.apply import (
    apply_checkpointing,
    apply_compile,
    apply_precision,
    disable_cublas_workspace,
    remove_compile,
)
from scratchlm.training.checks import check_applicable, check_loss, check_ranks
from scratchlm.training.optimizers import (
    ScalesGradients,
    WritesShadowWeights,
    is_hidden_matrix,
    make_optimizers,
)
from scratchlm.training.recording import RecordedBackward
from scratchlm.training.settings import TrainConfig
from scratchlm.training.shares import Shares

if TYPE_CHECKING:
    from scratchlm.parallel.layout import Layout
    from scratchlm.parallel.ranks import Ranks

DROPOUT = 6  # the purpose a key is derived for


class Learner:
    """A model on a device, its optimizers, and its moving average if there is one."""

    def __init__(
        self,
        model: TransformerLM,
        settings: TrainConfig,
        *,
        warn: Callable[[str], None] = warnings.warn,
        ranks: Ranks | None = None,
        loss: Callable[[Any, Batch], Tensor] | None = None,
    ) -> None:
        """Make a model learn; with `ranks`, together with theirs.

        `loss` gives the mean of a batch; None: that of the model's next tokens.
        Those may be given a model on `meta`: each makes room for its part (`parts.py` fills it).
        """
        self.model, self.warn, self.ranks = model, warn, ranks
        self.loss_of = loss
        self.config = model.config  # of the whole model
        self.device = next(model.parameters()).device if ranks is None else ranks.device
        share_cores(self.device)
        self.settings = settings = settings.resolved(self.device.type)
        check_applicable(settings, self.device.type)
        check_ranks(settings, ranks)
        check_loss(settings, loss is None)
        disable_cublas_workspace(settings)
        if settings.accelerate:
            acceleration.accelerate(model)
        else:
            acceleration.plain(model)
        apply_checkpointing(model, settings.checkpointing, settings.checkpointed_layers)
        apply_precision(model, settings.precision)
        self.layout: Layout | None = None
        if ranks is not None:
            self.layout = spread(model, settings, ranks)
        self.optimizers = make_optimizers(
            model if self.layout is None else self.layout.updated,
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
        self.loss: Callable[..., Tensor] = apply_compile(model, settings.compile)
        self._compiled_once = settings.compile == "off"
        self.shadow = None
        low = settings.precision != "fp32" and self.device.type == "cuda"
        if settings.accelerate and low and self.layout is None:
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
                accumulates=(settings.micro_batch_size or self.rows) < self.rows
                and not (self.layout is not None and self.layout.keeps_gradients),
                warn=warn,
            )
        elif self.layout is not None:
            self.layout.data.send_when_ready()

    @property
    def rows(self) -> int:
        """Sequences of an update that this process reads, or another one at most."""
        return -(-self.settings.batch_size // (1 if self.ranks is None else self.ranks.row_size))

    def own_part(self, batch: Batch) -> Batch:
        """Return what this rank computes of its rows: all of it, but where ranks share sequences.

        Padding goes to the end of a sequence, which nothing before it sees.
        """
        context = None if self.layout is None else self.layout.context
        if context is None:
            return batch
        documents = None if batch.document_ids is None else context.own(batch.document_ids, -1)
        targets = context.own(batch.targets, IGNORE_INDEX)
        return Batch(context.own(batch.inputs, 0), targets, documents)

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
            share = self._weighted_loss(batch, weight)
            share.backward()
        return share.detach()

    def _weighted_loss(self, batch: Batch, weight: Tensor) -> Tensor:
        with self.autocast():
            mean = self._mean_loss(batch)
        return mean * weight.to(mean, non_blocking=True)

    def _mean_loss(self, batch: Batch) -> Tensor:
        if self.loss_of is not None:
            return self.loss_of(self.model, batch)
        return self.loss(
            batch.inputs,
            batch.targets,
            document_ids=batch.document_ids,
            z_loss=self.settings.z_loss,
        )

    def _backward_in_shares(self, shares: Shares, batch: Batch, weight: Tensor) -> Tensor:
        parameters, total = list(self.parameters.values()), max(1, batch.num_targets())

        def work(part: Batch) -> tuple[Tensor, tuple[Tensor | None, ...]]:
            loss = self._weighted_loss(part, weight * (part.num_targets() / total))
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
        """Make what a step draws a function of seed, step and rank."""
        if self.draws:
            rank = () if self.ranks is None else (self.ranks.rank,)
            torch.manual_seed(derive_key(self.settings.seed, step, DROPOUT, *rank) >> 1)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the model be as it is used: without dropout."""
        if self.draws:
            self.model.eval()
        try:
            yield
        finally:
            if self.draws:
                self.model.train()
            if self.layout is not None:
                self.layout.after_evaluation()

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
                load_optimizer(optimizer, self.parameters, by_name)
        except (KeyError, RuntimeError) as error:
            what = " ".join(str(error).split())[:200]
            raise ScratchLMError(
                f"the checkpoint does not fit this model and optimizer: {what}"
            ) from None


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, torch.nn.Parameter],
    by_name: dict[str, dict[str, Tensor]],
) -> None:
    """Give an optimizer its state: parameter -> key -> tensor."""
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


def spread(model: TransformerLM, settings: TrainConfig, ranks: Ranks) -> Layout:
    """Lay a model over ranks."""
    from scratchlm.parallel.layout import Layout

    muon = settings.optimizer == "muon"
    return Layout(
        model,
        ranks,
        settings.parallel or "zero1",
        low=settings.precision != "fp32",
        whole=lambda name, p: muon and is_hidden_matrix(name, p),
    )
