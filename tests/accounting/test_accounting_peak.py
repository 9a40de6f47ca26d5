"""The predicted peak against every allocation of real training steps, on the CPU.

The profiler tells each allocation; the largest running sum is the peak. The CPU's norm is not one
kernel, so a stand-in saves what the GPU's saves; its attention copies its output once more, which
is a few percent here.
"""

import dataclasses
import json
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from scratchlm.accounting import Execution, Setup, memory
from scratchlm.accounting.memory import WORKSPACE
from scratchlm.config import MLP, ModelConfig, MoE
from scratchlm.model import TransformerLM
from scratchlm.ops import OPS

pytestmark = pytest.mark.slow  # the profiler takes seconds for each


class FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x * rstd).mul_(weight)

    @staticmethod
    def backward(ctx, grad):  # its memory is what counts here, not its values
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight), None


def rms_norm(x, weight, eps=1e-5):
    return FusedNorm.apply(x.float(), weight.float(), eps).to(x.dtype)


def measured_peak(config, setup, trace):
    attention = setup.execution.attention
    ops = dataclasses.replace(
        OPS["fast"],
        rms_norm=rms_norm,
        attention=OPS["reference" if attention == "unfused" else "fast"].attention,
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        low = torch.bfloat16 if setup.precision == "bf16" else None
        model = TransformerLM(config, ops=ops, dtype=low)
        part = {"block": "", "attention": "attn", "ffn": "ffn"}.get(setup.execution.checkpointing)
        for layer in model.layers if part is not None else ():
            module = layer.get_submodule(part)
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        ids = torch.zeros(setup.batch, setup.context, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=setup.precision == "bf16-mixed"):
                loss = model.loss(ids, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    profiled.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]) for e in events if e.get("name") == "[memory]"]
    changes.sort(key=lambda change: change[0])
    before = changes[0][1]["Total Allocated"] - changes[0][1]["Bytes"]
    return max(args["Total Allocated"] for _, args in changes) - before


CASES = {
    "plain": ({}, {}),
    "one short row": ({}, {"batch": 1, "context": 32}),
    "fp32": ({}, {"precision": "fp32"}),
    "bf16": ({}, {"precision": "bf16"}),
    "block": ({}, {"execution": Execution(checkpointing="block")}),
    "block, few words": (
        {"vocab_size": 64},
        {"execution": Execution(checkpointing="block")},
    ),
    "attention": ({}, {"execution": Execution(checkpointing="attention")}),
    "ffn, few words": ({"vocab_size": 64}, {"execution": Execution(checkpointing="ffn")}),
    "mlp, tied, few words": (
        {"vocab_size": 64, "ffn": MLP("gelu"), "tie_embeddings": True},
        {},
    ),
    "experts": ({"ffn": MoE(8, 2), "d_ff": 176}, {}),
    "unfused": ({}, {"batch": 4, "execution": Execution(attention="unfused")}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_a_real_step_is_the_predicted_one(case, tmp_path):
    sizes, work = CASES[case]
    config = ModelConfig(
        **{"vocab_size": 1024, "context_length": 128, "d_model": 128}
        | {"num_layers": 3, "num_heads": 2, "d_ff": 352}
        | sizes
    )
    setup = Setup(**{"phase": "training", "batch": 8, "context": 128} | work)
    predicted = memory(config, setup).training.value - WORKSPACE
    measured = measured_peak(config, setup, tmp_path / "trace.json")
    assert predicted == pytest.approx(measured, rel=0.05)
