"""`account(config, …)`: parameters, FLOPs, memory, roofline and cost, as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scratchlm.accounting.flops import CONVENTIONS, flops_tree
from scratchlm.accounting.items import Item, evaluate
from scratchlm.accounting.machines import Machine
from scratchlm.accounting.machines import machine as find_machine
from scratchlm.accounting.memory import Memory, memory
from scratchlm.accounting.money import DEFAULT_MFU, Training, training_run
from scratchlm.accounting.parameters import Parameters, count_parameters
from scratchlm.accounting.projection import Projection, project
from scratchlm.accounting.roofline import Roofline, roofline
from scratchlm.accounting.setup import Setup, bindings
from scratchlm.config import ModelConfig


@dataclass(frozen=True)
class Account:
    """The account of a model."""

    config: ModelConfig
    setup: Setup
    seq: int  # tokens in a sequence
    parameters: Parameters
    flops: dict[str, Item]  # by convention
    memory: Memory
    roofline: Roofline | None  # where a machine is named
    training: Training | None
    projection: Projection | None  # of several GPUs, where their links are known


def account(
    config: ModelConfig,
    setup: Setup | None = None,
    *,
    machine: str | Machine | None = None,
    tokens: int | None = None,
    mfu: float = DEFAULT_MFU,
    price: float | None = None,
    convention: str = "full",
    link: float | None = None,
    **work: Any,
) -> Account:
    """Account for a model; `work` are fields of `Setup`: `account(config, batch=8, phase=…)`."""
    if setup is not None and work:
        raise TypeError(f"give a Setup or its fields, not both; got {', '.join(work)}")
    setup = setup or Setup(**work)
    env = bindings(config, setup)
    seq = int(env["S"])
    packed = bool(setup.documents)
    if isinstance(machine, str):
        machine = find_machine(machine)
    training = None
    if machine is not None:
        training = training_run(
            config, machine, seq, tokens, mfu, setup.gpus, price, convention, setup.precision
        )
    projection = None
    if machine is not None and setup.gpus > 1:
        projection = project(config, setup, machine, mfu, link)
    return Account(
        config=config,
        setup=setup,
        seq=seq,
        parameters=count_parameters(config),
        flops={
            name: evaluate(flops_tree(config, setup.phase, name, setup.execution, packed), env)
            for name in CONVENTIONS
        },
        memory=memory(config, setup),
        roofline=roofline(config, setup, machine) if machine is not None else None,
        training=training,
        projection=projection,
    )
