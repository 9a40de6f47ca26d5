"""Compare the account with the real model: parameters, FLOPs, and memory where there is a GPU.

Parameters: `numel()` of a model built on `meta`, exactly. FLOPs: `FlopCounterMode` around the
reference path on `meta`, exactly under `full`, forward and backward, component by component. The
counter adds up calls of known matmul functions, and `CANNOT_SEE` lists what that misses; that is
why the reference path is compared, whose every product is a plain matmul.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from scratchlm.accounting.expr import Number
from scratchlm.accounting.flops import flops_tree
from scratchlm.accounting.items import Item, evaluate
from scratchlm.accounting.machines import Machine
from scratchlm.accounting.memory import memory
from scratchlm.accounting.parameters import count_parameters
from scratchlm.accounting.setup import Setup, bindings
from scratchlm.config import ModelConfig
from scratchlm.model import ForwardContext, TransformerBlock, TransformerLM
from scratchlm.ops import OPS, Ops

CANNOT_SEE = {
    "fused attention on a CPU": "its operator has no formula in the counter: QKᵀ and AV count 0",
    "fused attention on a GPU": "counted as S×S forward and 2.5 × that backward (it recomputes "
    "QKᵀ), though masked blocks are skipped",
    "grouped matmuls of experts": "sizes depend on the routing, which the counter does not read",
    "hand-written kernels": "opaque: whatever they multiply counts 0",
    "a contracted dimension of 1": "einsum multiplies instead of calling a matmul: counts 0",
    "checkpointing": "recomputation is counted as backward work: compare with `hardware`",
    "norms, softmax, RoPE, activations, biases": "not matmuls: not counted by it, nor by us",
    "the embedding": "a lookup, and a scattered sum in the backward pass: 0 for both",
}


@dataclass(frozen=True)
class Check:
    """One comparison."""

    what: str
    predicted: Number
    measured: Number
    unit: str
    tolerance: float = 0.0  # relative

    @property
    def error(self) -> float:
        """The relative difference."""
        return abs(self.predicted - self.measured) / max(abs(self.measured), 1)

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.error <= self.tolerance


def verify(config: ModelConfig, setup: Setup | None = None) -> list[Check]:
    """Compare parameters, FLOPs and, where a CUDA device is there, memory."""
    setup = setup or Setup()
    checks = [*verify_parameters(config), *verify_flops(config, setup)]
    if torch.cuda.is_available():
        checks.append(verify_memory(config, setup))
    return checks


def verify_parameters(config: ModelConfig) -> list[Check]:
    """Compare with the parameters of a model built on `meta`, part by part."""
    counts = count_parameters(config)
    with torch.device("meta"):
        model = TransformerLM(config, ops="reference")
    parts = {"token embeddings": "token_embeddings.", "layers": "layers.", "LM head": "lm_head."}
    parts |= {"position embeddings": "position_embeddings.", "final norm": "ln_final."}
    checks = []
    for item in counts.tree.children:
        named = (p for name, p in model.named_parameters() if name.startswith(parts[item.name]))
        checks.append(Check(item.name, item.value, sum(p.numel() for p in named), "parameters"))
    everything = sum(p.numel() for p in model.parameters())
    return [*checks, Check("all parameters", counts.unique, everything, "parameters")]


def verify_flops(config: ModelConfig, setup: Setup) -> list[Check]:
    """Compare with `FlopCounterMode` on the reference path, forward and backward."""
    env = bindings(config, setup)
    batch, seq = int(env["B"]), int(env["S"])
    config = config if seq <= config.context_length else config.replace(context_length=seq)
    with torch.device("meta"):
        model = TransformerLM(config, ops=_countable())
        ids = torch.zeros(batch, seq, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        loss = model.loss(ids, ids)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    ours = evaluate(flops_tree(config, "training", "full"), env)
    return [
        *_by_component(ours.children[0], forward, config),
        Check("forward", ours.children[0].value, forward.get_total_flops(), "FLOP"),
        Check("backward", ours.children[1].value, backward.get_total_flops(), "FLOP"),
    ]


def _by_component(ours: Item, counter: FlopCounterMode, config: ModelConfig) -> list[Check]:
    """Split the counter's sums along the modules; what is left in `attn` is QKᵀ and AV."""
    sums = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}

    def measured(suffix: str) -> int:
        return sum(n for name, n in sums.items() if name.endswith(suffix))

    letters = {"Q": "q_proj", "K": "k_proj", "V": "v_proj", "output": "output_proj"}
    counted = {f"{name} projection": measured(f"attn.{proj}") for name, proj in letters.items()}
    counted["attention"] = measured(".attn") - sum(counted.values())
    counted["feed-forward"] = measured(".ffn")
    layers = config.num_layers
    checks = [Check(n, layers * ours[n].value, m, "FLOP") for n, m in counted.items()]
    head = counter.get_total_flops() - sums[TransformerBlock.__name__]
    return [*checks, Check("LM head", ours["LM head"].value, head, "FLOP")]


def _countable() -> Ops:
    """Return the reference ops, with all experts given an even share: on `meta` nobody chooses."""

    def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        groups = x.tensor_split(len(weight))
        plain = OPS["reference"].linear
        return torch.cat([plain(rows, matrix) for rows, matrix in zip(groups, weight, strict=True)])

    return OPS["reference"].replace(grouped_linear=grouped_linear)


def verify_memory(config: ModelConfig, setup: Setup) -> Check:
    """Compare with the peak of two real training steps on the CUDA device."""
    predicted = memory(config, on_this_gpu(config, setup)).training.value
    return Check("training peak", predicted, measure_peak(config, setup), "bytes", 0.05)


def on_this_gpu(config: ModelConfig, setup: Setup) -> Setup:
    """Return the setup as this machine's GPU executes it: the table of fusions says how."""
    from scratchlm.accelerate import accelerate
    from scratchlm.accelerate.attention import QKV_ROPE_ATTENTION

    env, low = bindings(config, setup), torch.bfloat16
    batch, seq, device = int(env["B"]), int(env["S"]), _device()
    dtype = low if setup.precision == "bf16" else None
    model = TransformerLM(config.replace(num_layers=1), device="meta", dtype=dtype)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),  # tensors of that device, without memory
        torch.autocast(device, low, enabled=setup.precision == "bf16-mixed"),
    ):
        attention = accelerate(model.to_empty(device=device)).layers[0].get_submodule("attn")
        x = torch.empty(batch, seq, config.d_model, device=device, dtype=dtype)
        fused = QKV_ROPE_ATTENTION.runs(attention, x, ForwardContext(positions=range(seq)))
    execution = dataclasses.replace(setup.execution, rope_epilogue=fused)
    return dataclasses.replace(setup, execution=execution)


def measure_peak(config: ModelConfig, setup: Setup) -> int:
    """Run two training steps and return the most bytes that were allocated at once."""
    from scratchlm.accelerate import accelerate

    env = bindings(config, setup)
    low = torch.bfloat16 if setup.precision == "bf16" else None
    ops, without = OPS["fast"], []
    if setup.execution.attention == "unfused":
        ops = ops.replace(attention=OPS["reference"].attention)
    if setup.execution.loss == "unfused":
        without = ["chunked_lm_head_loss"]
    with torch.device("cuda"):
        model = accelerate(TransformerLM(config, ops=ops, dtype=low), without)
        ids = torch.zeros(int(env["B"]), int(env["S"]), dtype=torch.long)
    parts = {"block": "", "attention": "attn", "ffn": "ffn"}
    recomputed = [parts[p] for p in parts if p == setup.execution.checkpointing]
    for module in (layer.get_submodule(part) for layer in model.layers for part in recomputed):
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16, enabled=setup.precision == "bf16-mixed"):
            loss = model.loss(ids, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def measure_machine() -> Machine:
    """Measure this machine: its matmul rate in float32 and bfloat16, and its copy bandwidth."""
    device = _device()
    if device == "cuda":
        memory_bytes = torch.cuda.mem_get_info()[1]
        name = torch.cuda.get_device_name()
    else:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        name = f"this machine ({torch.get_num_threads()} threads)"
    size, small = (8192, 8192) if device == "cuda" else (1024, 256)
    single = _matmul_rate(size, torch.float32, device)
    half: float | None = _matmul_rate(small, torch.bfloat16, device)
    if half is not None and half < single:
        half = None  # many CPUs only imitate bfloat16: nobody would compute in it there
    copied = torch.empty(2**30 if device == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(copied)
    seconds = _fastest(lambda: target.copy_(copied), device)
    return Machine(
        name=name,
        memory=memory_bytes,
        bandwidth=2 * copied.nbytes / seconds,
        bf16=half,
        fp16=half,
        fp32=single,
        measured=True,
    )


def _matmul_rate(size: int, dtype: torch.dtype, device: str) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _fastest(lambda: a @ b, device)


def _fastest(run: Callable[[], object], device: str) -> float:
    """Return the seconds of the fastest of a few runs, after one to warm up."""
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
