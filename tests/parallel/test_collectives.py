"""What the account predicts is what ranks send: one of a group whose collectives do nothing."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from scratchlm import acceleration
from scratchlm.accelerate.table import is_class_patched
from scratchlm.accounting import Setup, collectives
from scratchlm.config import Attention, ModelConfig, MoE
from scratchlm.data import Batch
from scratchlm.errors import ScratchLMError
from scratchlm.parallel import rows
from scratchlm.parallel.ranks import Ranks
from scratchlm.parallel.zero1 import Zero1
from scratchlm.training import Learner, TrainConfig, build_model
from scratchlm.training.step import backward

TINY = ModelConfig(96, 32, d_model=32, num_layers=3, num_heads=4, num_kv_heads=2, d_ff=64)
MODELS = {
    "plain": TINY,
    "tied": TINY.replace(tie_embeddings=True),
    "normed heads": TINY.replace(attention=Attention(qk_norm=True)),
    "experts": TINY.replace(ffn=MoE(8, 2)),
}
ROWS = 128


class CollectiveCounter(TorchDispatchMode):
    """Lists the payloads that are handed to collectives, before they are cut to pieces."""

    def __init__(self):
        super().__init__()
        self.payloads = {"all-gather": [], "reduce-scatter": [], "all-reduce": []}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            kind, whole = {
                "c10d::_allgather_base_": ("all-gather", args[0]),
                "c10d::_reduce_scatter_base_": ("reduce-scatter", args[1]),
                "c10d::allreduce_": ("all-reduce", args[0]),
            }[func._schema.name]
            tensors = whole if isinstance(whole, list) else [whole]
            self.payloads[kind].append(sum(tensor.nbytes for tensor in tensors))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake(request):
    """Return the first of some ranks, (data, tensor), on machines of 8."""
    grid = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=grid[0] * grid[1])
    mesh = dist.init_device_mesh("cpu", grid, mesh_dim_names=("data", "tensor"))
    device = torch.device("cpu")
    yield Ranks(0, mesh.size(), device, mesh, dist.group.WORLD, dist.HashStore(), 1.0, 8)
    dist.destroy_process_group()


def sent(ranks, config, settings, seq):
    """Return what one update sends, without scalars and the gradients of norms."""
    learner = Learner(build_model(config, 0, "cpu"), settings, ranks=ranks)
    ids = torch.arange(ROWS * seq).reshape(ROWS, seq) % config.vocab_size
    mine = ids[: ROWS // ranks.data_size]
    with CollectiveCounter() as counter:
        backward(learner, Batch(mine, mine))
        learner.layout.reduce_gradients()
        learner.layout.share_weights()
    least = 4 * 8 * config.d_model  # bytes of a router's gradient, which is not counted
    return {kind: [n for n in sizes if n > least] for kind, sizes in counter.payloads.items()}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("fake", "kind", "micro", "seq"),
    [
        ((4, 1), "zero1", 1, 32),
        ((4, 1), "fsdp", 1, 32),
        ((4, 1), "fsdp", 2, 32),
        ((1, 2), "tp", 1, 32),
        ((1, 2), "tp", 2, 31),
        ((2, 2), "fsdp", 1, 32),
        ((16, 1), "hsdp", 2, 32),
        ((8, 2), "hsdp", 1, 32),
    ],
    indirect=["fake"],
)
def test_the_account_predicts_what_ranks_send(fake, kind, micro, seq, model, monkeypatch):
    monkeypatch.setattr(rows, "UNIT", 32)  # shares as even as they are in large models
    config, (data, tensor) = MODELS[model], fake.mesh.shape
    rows_each = ROWS // data
    settings = TrainConfig(
        batch_size=ROWS,
        micro_batch_size=rows_each // micro,
        parallel=kind if kind in ("fsdp", "hsdp") else None,
        tp=tensor,
    )
    found = sent(fake, config, settings, seq)
    setup = Setup(
        phase="training",
        parallel=kind,
        gpus=data * tensor,
        tp=tensor,
        batch=rows_each // micro,
        micro_batches=micro,
        context=seq,
        precision="fp32",
    )
    predicted = collectives(config, setup)
    for what, sizes in found.items():
        expected = [made for made in predicted if made.kind == what]
        if kind != "zero1":  # whose buckets are as many as it takes
            assert len(sizes) == sum(made.count for made in expected), what
        # what ranks hold is padded to the longest share
        assert sum(sizes) == pytest.approx(sum(made.bytes for made in expected), rel=0.02), what


@pytest.mark.parametrize("fake", [(4, 1)], indirect=True)
def test_ranks_that_share_sequences_send_keys_and_values_once_a_layer(fake):
    batch, seq = 6, 32
    settings = TrainConfig(batch_size=2 * batch, cp=2)
    ranks = replace(fake, context_size=2)  # two rows of two
    learner = Learner(build_model(TINY, 0, "cpu"), settings, ranks=ranks)
    ids = torch.arange(batch * seq).reshape(batch, seq) % TINY.vocab_size
    with CollectiveCounter() as counter:
        backward(learner, Batch(ids, ids))
    whole = 2 * 4 * batch * seq * TINY.num_kv_heads * TINY.d_head  # K and V, float32
    assert counter.payloads["all-gather"] == [whole] * TINY.num_layers
    assert counter.payloads["reduce-scatter"] == [whole] * TINY.num_layers
    with pytest.raises(ScratchLMError, match=r"train\.cp does not go with experts"):
        Learner(build_model(MODELS["experts"], 0, "cpu"), settings, ranks=ranks)


@pytest.mark.parametrize("fake", [(2, 1)], indirect=True)
def test_the_kernel_that_sees_addresses_is_not_given_what_torch_has_cut(fake, monkeypatch):
    monkeypatch.setattr(acceleration, "launches_for", lambda x: True)  # as on a GPU
    settings = TrainConfig(batch_size=2, parallel="fsdp")
    learner = Learner(build_model(TINY, 0, "cpu"), settings, ranks=fake)
    cut = learner.layout.updated["lm_head.weight"]
    assert cut.data_ptr() == 0  # what a kernel would write to
    assert [type(optimizer) for optimizer in learner.optimizers] == [torch.optim.AdamW]


@pytest.mark.parametrize("fake", [(2, 1)], indirect=True)
def test_what_fsdp_makes_of_a_class_is_not_taken_for_a_patch(fake):
    """Fused layers and the chunked loss would stand aside."""
    learner = Learner(
        build_model(TINY, 0, "cpu"), TrainConfig(batch_size=2, parallel="fsdp"), ranks=fake
    )
    cut = {type(module) for module in learner.model.modules() if isinstance(module, FSDPModule)}
    assert len(cut) == 2  # the model, its blocks
    assert not any(map(is_class_patched, cut))


@pytest.mark.parametrize("fake", [(1, 1)], indirect=True)
def test_micro_batches_of_bfloat16_gradients_are_added_up_in_float32(fake):
    parameters = {name: torch.nn.Parameter(torch.randn(8, 16)) for name in ("low", "wide", "idle")}
    zero1 = Zero1(parameters, fake.data_group, low=frozenset({"low"}))
    sums = dict.fromkeys(("low", "wide"), 0.0)
    for number in range(20):
        for name in sums:
            parameters[name].grad = torch.randn(8, 16).to(parameters[name].dtype)
            sums[name] = sums[name] + parameters[name].grad.float()
        if number < 19:
            zero1.keep_gradients()
    zero1.reduce_gradients()
    for name, p in zero1.updated.items():
        assert torch.equal(p.grad, sums.get(name, torch.zeros(8, 16))), name
