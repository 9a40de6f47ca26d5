"""Predict the training time from a few steps of the same model, which are discarded.

A model this small is not bound by its matmuls alone, so the machine's matmul rate alone gives
only a lower bound; the trial gives the forecast.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from scratchlm.accounting import count_parameters, memory, training_flops_per_token
from scratchlm.accounting.setup import Setup
from scratchlm.cli.demo.corpus import World
from scratchlm.data import TokenFile
from scratchlm.data.documents import DocumentBatches, DocumentValidationBatches
from scratchlm.training import Learner, build_model, evaluate, measure_matmul_rate, take_step

TRIAL_STEPS = 8


@dataclass(frozen=True)
class Forecast:
    """The predicted cost of training, computed and measured beforehand."""

    parameters: int
    flops_per_step: float
    memory_bytes: float
    matmul_rate: float  # FLOP/s
    step_seconds: float
    evaluation_seconds: float
    steps: int
    evaluations: int

    @property
    def least_seconds(self) -> float:
        """The time if there were only matmuls, at the machine's rate."""
        return self.steps * self.flops_per_step / self.matmul_rate

    @property
    def seconds(self) -> float:
        """The time to expect."""
        return self.steps * self.step_seconds + self.evaluations * self.evaluation_seconds


def trial(world: World, device: torch.device) -> Forecast:
    """Compute the costs, and time a few steps."""
    assert world.plan.data.val is not None
    model, settings = world.plan.model, world.plan.train.resolved(device.type)
    learner = Learner(build_model(model, settings.seed, device), settings)
    times = []
    with TokenFile(world.plan.data.train) as file, TokenFile(world.plan.data.val) as held_out:
        batches = DocumentBatches(file, model.context_length, settings.batch_size, settings.seed)
        for step in range(TRIAL_STEPS):
            began = time.perf_counter()
            take_step(learner, batches.batch(step), step + 1, settings.lr / 100)
            times.append(time.perf_counter() - began)
        val = DocumentValidationBatches(held_out, model.context_length, settings.batch_size)
        began = time.perf_counter()
        evaluate(learner.model, [val.batch(0), val.batch(0)])
        one = (time.perf_counter() - began) / 2
        evaluation = one * len(val)
    tokens = settings.tokens_per_step(model)
    setup = Setup(phase="training", batch=settings.batch_size, precision="fp32")
    return Forecast(
        parameters=count_parameters(model).unique,
        flops_per_step=float(training_flops_per_token(model, model.context_length)) * tokens,
        memory_bytes=float(memory(model, setup).training.value),
        matmul_rate=measure_matmul_rate(device, "fp32"),
        step_seconds=sorted(times)[TRIAL_STEPS // 2],
        evaluation_seconds=evaluation,
        steps=settings.steps,
        evaluations=1 + settings.steps // (settings.eval_every or settings.steps),
    )
