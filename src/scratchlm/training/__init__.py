"""Training: optimizers and schedules, one step, one loop, and what a run leaves behind."""

from scratchlm.training.evaluation import Evaluation, evaluate
from scratchlm.training.interruption import Interruption, watch_signals
from scratchlm.training.learner import Learner, build_model
from scratchlm.training.loop import Data, Watcher, train
from scratchlm.training.metrics import read_metrics
from scratchlm.training.optimizers import AdamW, Muon, clip_grad_norm, make_optimizers
from scratchlm.training.plan import DataFiles, Plan, has_run, read_plan, write_plan
from scratchlm.training.report import Section, write_report
from scratchlm.training.run import Progress, Run, fingerprint, hold_run
from scratchlm.training.schedules import (
    constant_schedule,
    cosine_schedule,
    make_schedule,
    wsd_schedule,
)
from scratchlm.training.session import Outcome, Start, run_plan
from scratchlm.training.settings import TrainConfig
from scratchlm.training.step import StepResult, backward, take_step
from scratchlm.training.throughput import Throughput, make_throughput, measure_matmul_rate

__all__ = [
    "AdamW",
    "Muon",
    "make_optimizers",
    "clip_grad_norm",
    "cosine_schedule",
    "wsd_schedule",
    "constant_schedule",
    "make_schedule",
    "TrainConfig",
    "Learner",
    "build_model",
    "backward",
    "take_step",
    "StepResult",
    "Data",
    "Watcher",
    "train",
    "Evaluation",
    "evaluate",
    "Plan",
    "DataFiles",
    "read_plan",
    "write_plan",
    "has_run",
    "run_plan",
    "Outcome",
    "Start",
    "write_report",
    "Section",
    "Run",
    "Progress",
    "hold_run",
    "fingerprint",
    "Interruption",
    "watch_signals",
    "Throughput",
    "make_throughput",
    "measure_matmul_rate",
    "read_metrics",
]
