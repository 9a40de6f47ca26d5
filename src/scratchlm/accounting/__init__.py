"""What a Transformer costs before it is run: parameters, FLOPs, memory, time, money.

Arithmetic on a `ModelConfig`: nothing is allocated and nothing outside the standard library is
needed. Every number is a line of a tree with its formula; `verify` (which needs torch) compares
them with the real model.
"""

from scratchlm.accounting.expr import Expr, Sym
from scratchlm.accounting.flops import (
    CHECKPOINTING,
    CONVENTIONS,
    Execution,
    flops_tree,
    training_flops_per_token,
)
from scratchlm.accounting.items import Item, Node, evaluate
from scratchlm.accounting.parameters import Parameters, count_parameters, parameter_tree
from scratchlm.accounting.setup import OPTIMIZERS, PARALLEL, PRECISIONS, Setup, bindings
from scratchlm.accounting.symbols import SYMBOLS
from scratchlm.accounting.work import PHASES

__all__ = [
    "Expr",
    "Sym",
    "SYMBOLS",
    "Node",
    "Item",
    "evaluate",
    "Setup",
    "bindings",
    "PHASES",
    "CONVENTIONS",
    "CHECKPOINTING",
    "PRECISIONS",
    "OPTIMIZERS",
    "PARALLEL",
    "Execution",
    "Parameters",
    "count_parameters",
    "parameter_tree",
    "flops_tree",
    "training_flops_per_token",
]
