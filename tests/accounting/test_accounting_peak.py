"""The predicted peak against every allocation of real training steps, on the CPU.

The profiler tells each allocation; the largest running sum is the peak. `on_a_gpu` stands in for
the GPU's kernels: it holds what they hold. A slice of logits is made small, so that there are
several as there are in earnest.
"""

import gc
import json
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from accounting.on_a_gpu import accelerated_model, kernels_on_a_gpu
from scratchlm.accelerate import lm_head_loss
from scratchlm.accounting import Execution, Setup, activations, memory
from scratchlm.accounting.memory import WORKSPACE
from scratchlm.config import MLP, Attention, ModelConfig, MoE

pytestmark = pytest.mark.slow  # the profiler takes seconds for each


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setitem(lm_head_loss.CHUNK_ELEMENTS, "cpu", 2**18)
    monkeypatch.setattr(activations, "SLICE_ROWS", activations.slice_rows(2**18))


def measured_peak(config, setup, trace):
    gc.collect()  # the model of the case before is in a cycle: freed below, it would be taken off
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        low = torch.bfloat16 if setup.precision == "bf16" else None
        model = accelerated_model(config, setup.execution, low)
        part = {"block": "", "attention": "attn", "ffn": "ffn"}.get(setup.execution.checkpointing)
        for layer in model.layers if part is not None else ():
            module = layer.get_submodule(part)
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        ids = torch.zeros(setup.batch, setup.context, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=setup.precision == "bf16-mixed"):
                total = model.loss(ids, ids)
            total.backward()
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
    "tied, one short row": ({"tie_embeddings": True}, {"batch": 1, "context": 32}),
    "tied, block": (
        {"vocab_size": 2048, "tie_embeddings": True},
        {"execution": Execution(checkpointing="block")},
    ),
    "experts": ({"ffn": MoE(8, 2), "d_ff": 176}, {}),
    "unfused attention": ({}, {"batch": 4, "execution": Execution(attention="unfused")}),
    "unfused loss": ({}, {"execution": Execution(loss="unfused")}),
    "many words": ({"vocab_size": 4096}, {}),
    "RoPE in the product": ({}, {"execution": Execution(rope_epilogue=True)}),
    "RoPE in the product, block": (
        {},
        {"execution": Execution(checkpointing="block", rope_epilogue=True)},
    ),
    "norms on queries": ({"attention": Attention(qk_norm=True), "num_kv_heads": 1}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_a_real_step_is_the_predicted_one(case, tmp_path, monkeypatch):
    sizes, work = CASES[case]
    config = ModelConfig(
        **{"vocab_size": 1024, "context_length": 128, "d_model": 128}
        | {"num_layers": 3, "num_heads": 2, "d_ff": 352}
        | sizes
    )
    setup = Setup(**{"phase": "training", "batch": 8, "context": 128} | work)
    predicted = memory(config, setup).training.value - WORKSPACE
    kernels_on_a_gpu(monkeypatch, setup.execution, config.d_head)
    measured = measured_peak(config, setup, tmp_path / "trace.json")
    assert predicted == pytest.approx(measured, rel=0.05)
