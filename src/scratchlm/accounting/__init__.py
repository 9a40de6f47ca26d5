"""Accounting of a Transformer before it is run: parameters, FLOPs, memory, time, cost.

Arithmetic on a `ModelConfig`: nothing is allocated and nothing outside the standard library is
needed. Every number is a line of a tree with its formula; `scratchlm.accounting.verify` (which
needs torch) compares them with the real model.
"""

from scratchlm.accounting.account import Account, account
from scratchlm.accounting.collectives import Collective, collectives
from scratchlm.accounting.expr import Expr, Sym
from scratchlm.accounting.fits import Fits, fits, peak_bytes
from scratchlm.accounting.flops import (
    CHECKPOINTING,
    CONVENTIONS,
    Execution,
    flops_tree,
    training_flops_per_token,
)
from scratchlm.accounting.items import Item, Node, evaluate
from scratchlm.accounting.machines import MACHINES, PRICES_AS_OF, Machine, machine
from scratchlm.accounting.memory import Memory, memory, memory_bindings
from scratchlm.accounting.money import Mfu, Training, mfu, suggested_tokens, training_run
from scratchlm.accounting.parameters import Parameters, count_parameters, parameter_tree
from scratchlm.accounting.projection import Plan, Projection, plans, project
from scratchlm.accounting.roofline import Roofline, roofline
from scratchlm.accounting.scaling import Summary, component_shares, parse_sweep, summarize, sweep
from scratchlm.accounting.setup import OPTIMIZERS, PARALLEL, PRECISIONS, Setup, bindings
from scratchlm.accounting.symbols import SYMBOLS
from scratchlm.accounting.work import PHASES

__all__ = [
    "account",
    "Account",
    "Setup",
    "Execution",
    "bindings",
    "PHASES",
    "CONVENTIONS",
    "CHECKPOINTING",
    "PRECISIONS",
    "OPTIMIZERS",
    "PARALLEL",
    "Expr",
    "Sym",
    "SYMBOLS",
    "Node",
    "Item",
    "evaluate",
    "Parameters",
    "count_parameters",
    "parameter_tree",
    "flops_tree",
    "training_flops_per_token",
    "Memory",
    "memory",
    "memory_bindings",
    "peak_bytes",
    "Machine",
    "MACHINES",
    "PRICES_AS_OF",
    "machine",
    "Roofline",
    "roofline",
    "Mfu",
    "mfu",
    "Training",
    "training_run",
    "suggested_tokens",
    "Collective",
    "collectives",
    "Projection",
    "project",
    "Plan",
    "plans",
    "Fits",
    "fits",
    "Summary",
    "summarize",
    "sweep",
    "parse_sweep",
    "component_shares",
]
