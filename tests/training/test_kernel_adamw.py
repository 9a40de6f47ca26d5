"""AdamW's kernel moves what the class written out moves, in the interpreter or on a GPU."""

import copy

import pytest
import torch
from torch import nn

from accelerate.gpu import compiled_lines
from scratchlm.accelerate.kernels.triton import adamw as kernel
from scratchlm.training import AdamW, TrainConfig, make_optimizers, take_step
from scratchlm.training.kernel_adamw import KernelAdamW
from scratchlm.training.optimizers import clip_grad_norm
from scratchlm.training.session import deterministic_kernels
from scratchlm.training.twins import Twins
from tiny_models import FAMILIES, build, ids
from training.test_step import make_batch
from training.tiny import assert_same_state, make_learner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = kernel.Tiling(block=64, rounds=2, warps=1)  # chunks of 128
CHUNK = 128
SIZES = [(1,), (), (CHUNK - 1,), (CHUNK,), (CHUNK + 1,), (3, CHUNK), (7, 61), (63,), (65,), (2, 0)]
# A GPU rounds a product and a sum at once, which moves the last bits of what nearly cancels.
CLOSE = {"rtol": 2e-5, "atol": 2e-6} if DEVICE == "cuda" else {"rtol": 2e-6, "atol": 2e-7}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(KernelAdamW, "tiling", SMALL)


def make_params(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(DEVICE)) for s in SIZES]


def groups_of(params):
    return [
        {"params": params[::2], "weight_decay": 0.3, "lr": 0.1},
        {"params": params[1::2], "weight_decay": 0.0, "betas": (0.8, 0.9), "eps": 1e-3},
    ]


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(DEVICE)


def follow(params, optimizer, steps, **more):
    for step in steps:
        set_gradients(params, step)
        optimizer.step(**more)
    return [p.detach() for p in params]


def assert_all_close(ours, theirs, **close):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **{**CLOSE, **close})


def pair():
    """Return the same parameters under the kernel and under the class written out."""
    for kind in (KernelAdamW, AdamW):
        params = make_params()
        yield params, kind(groups_of(params))


@pytest.mark.parametrize("scale", [None, 0.37])
def test_it_equals_the_formula_for_tensors_of_any_size_and_groups_of_any_choice(scale):
    factor = None if scale is None else torch.tensor(scale, device=DEVICE)
    found = [
        (follow(params, optimizer, range(6), scale=factor), optimizer, params)
        for params, optimizer in pair()
    ]
    assert_all_close(found[0][0], found[1][0])
    for key in ("exp_avg", "exp_avg_sq", "step"):
        states = [[o.state[p][key] for p in params] for _, o, params in found]
        assert_all_close(*states)


def test_the_tiling_changes_nothing():
    results = []
    for tiling in (SMALL, kernel.Tiling(), kernel.Tiling(32, 1, 1, "")):
        params = make_params()
        optimizer = KernelAdamW(groups_of(params))
        optimizer.tiling = tiling
        results.append(follow(params, optimizer, range(3)))
    for other in results[1:]:
        assert_all_close(other, results[0], rtol=0, atol=0)


def test_gradients_in_bfloat16_are_read_as_they_are():
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("in this torch a gradient has its parameter's type")
    found = []
    for params, optimizer in pair():
        for step in range(4):
            set_gradients(params, step)
            for p in params:
                low = p.grad.bfloat16()
                if isinstance(optimizer, KernelAdamW):
                    p.grad_dtype = None
                    p.grad = low
                else:
                    p.grad = low.float()
            optimizer.step()
        found.append([p.detach() for p in params])
    assert_all_close(*found)


def test_a_first_moment_in_bfloat16_is_kept_and_read_so():
    found = []
    for kind in (KernelAdamW, AdamW):
        params = make_params()
        optimizer = kind(groups_of(params), moment=torch.bfloat16)
        moved = follow(params, optimizer, range(4))
        moments = [optimizer.state[p]["exp_avg"] for p in params]
        assert {m.dtype for m in moments} == {torch.bfloat16}
        found.append((moved, [m.float() for m in moments]))
    # The interpreter cuts off where a GPU rounds: each step by up to a bit of m.
    assert_all_close(found[0][1], found[1][1], rtol=4 * 2**-8, atol=4 * 2**-8)
    assert_all_close(found[0][0], found[1][0], rtol=0, atol=0.02)


def test_twins_are_written_with_what_they_are_of():
    model = build(FAMILIES["plain"], dtype=torch.float32).to(DEVICE)
    optimizer, twins = KernelAdamW(model.parameters(), lr=0.1), Twins(model, low_gradients=True)
    optimizer.write_twins(twins)
    before = {p: low.clone() for p, low in twins.parts.items()}
    for p in model.parameters():
        p.grad_dtype = None
        p.grad = torch.randn_like(p, dtype=torch.bfloat16 if p in twins.parts else torch.float32)
    optimizer.step()
    for p, low in twins.parts.items():
        # A GPU rounds to the nearest; the interpreter cuts off, half a step further.
        steps = {"rtol": 0 if p.is_cuda else 2**-7, "atol": 0}
        torch.testing.assert_close(low, p.detach().to(torch.bfloat16), **steps)
        assert not torch.equal(low, before[p])
        low.zero_()
    twins.refresh()  # does nothing: the optimizer has said that they are equal
    assert not any(low.any() for low in twins.parts.values())


def test_the_scale_is_the_clipping():
    clipped, scaled = (make_params() for _ in range(2))
    one, two = KernelAdamW(groups_of(clipped)), KernelAdamW(groups_of(scaled))
    set_gradients(clipped, 0)
    set_gradients(scaled, 0)
    before = [p.grad.clone() for p in scaled]
    norm = clip_grad_norm(clipped, 1.0)
    assert norm > 2
    one.step()
    two.step(scale=(1.0 / (norm + 1e-6)).clamp(max=1.0))
    assert_all_close(clipped, scaled, rtol=0, atol=0)
    assert all(torch.equal(p.grad, g) for p, g in zip(scaled, before, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # ∞/∞ in the interpreter
def test_a_gradient_that_is_not_a_number_shows_where_it_was_and_nowhere_else():
    params = make_params()
    optimizer = KernelAdamW(groups_of(params))
    set_gradients(params, 0)
    params[4].grad[CHUNK] = torch.nan  # alone in its chunk
    params[5].grad[1, 2] = torch.inf
    optimizer.step()
    bad = [(~p.detach().isfinite()).nonzero().tolist() for p in params]
    assert bad == [[], [], [], [], [[CHUNK]], [[1, 2]], [], [], [], []]


def test_missing_gradients_are_skipped_and_steps_are_counted_each_for_itself():
    found = []
    for params, optimizer in pair():
        for step in range(5):
            set_gradients(params, step)
            params[step].grad = None
            params[-4].grad = None
            optimizer.step()
        assert params[-4] not in optimizer.state or not optimizer.state[params[-4]]
        counts = [optimizer.state[p]["step"].item() for p in params if optimizer.state[p]]
        found.append([*(p.detach() for p in params), torch.tensor(counts)])
    assert found[0][-1].tolist() == [4, 4, 4, 4, 4, 5, 5, 5, 5]
    assert_all_close(*found)


def test_gradients_may_lie_anyhow_and_tensors_anywhere():
    """By columns, or off the addresses from which four numbers at once are loaded."""
    found = []
    for kind in (KernelAdamW, AdamW):
        store = torch.linspace(-1, 1, 1000).to(DEVICE)
        params = [
            nn.Parameter(store[1:201].view(10, 20)),
            nn.Parameter(store[204:404].view(20, 10)),
        ]
        optimizer = kind(params, lr=0.1)
        for step in range(3):
            g = torch.randn(20, 10, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            params[0].grad, params[1].grad = g.T, g
            optimizer.step()
        found.append([store])
    assert_all_close(*found)


def test_sparse_gradients_and_other_parameters_are_refused():
    p = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = KernelAdamW([p])
    p.grad = torch.ones(3, device=DEVICE).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    for wrong in (torch.ones(3).double(), torch.ones(3, 2).T, torch.ones(3).bfloat16()):
        with pytest.raises(ValueError, match="contiguous float32 tensors on one device"):
            KernelAdamW([p, nn.Parameter(wrong.to(DEVICE))])
    p.grad = torch.ones(3, device=DEVICE)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = torch.zeros(2, device=DEVICE)
    with pytest.raises(ValueError, match=r"shape \(2,\).* for a parameter of shape \(3,\)"):
        optimizer.step()


def test_a_closure_is_called_with_gradients_on():
    p = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = KernelAdamW([p])

    def closure():
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert (p < 1).all()


def test_autograd_notices_the_update():
    p = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = KernelAdamW([p])
    loss = p.square().sum()
    p.grad = torch.ones(3, device=DEVICE)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# What lies elsewhere


def test_the_table_is_made_again_only_where_something_has_moved():
    params = make_params()
    optimizer = KernelAdamW(groups_of(params))
    set_gradients(params, 0)
    optimizer.step()
    tables = list(optimizer._tables)
    lists = [table.gradient_list for table in tables]
    optimizer.step()
    assert all(a is b for a, b in zip(optimizer._tables, tables, strict=True))
    assert all(t.gradient_list is old for t, old in zip(tables, lists, strict=True))
    params[0].grad = params[0].grad.clone()  # the old one lives on in nobody's hands
    optimizer.step()
    assert optimizer._tables[0] is tables[0]
    assert tables[0].gradient_list is not lists[0]
    assert tables[1].gradient_list is lists[1]
    optimizer.state[params[1]]["exp_avg"] = optimizer.state[params[1]]["exp_avg"].clone()
    optimizer.step()
    assert optimizer._tables[0] is tables[0]
    assert optimizer._tables[1] is not tables[1]


def test_what_has_moved_is_followed():
    """New gradients, state loaded, parameters given other storage: always the formula."""
    found = []
    for params, optimizer in pair():
        follow(params, optimizer, range(2))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        follow(params, optimizer, range(2, 4))
        with torch.no_grad():
            for p in params:
                p.data = p.data.clone()
        found.append(follow(params, optimizer, range(4, 6)))
    assert_all_close(*found)


# Exchange


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("first", ["torch", "kernel"])
def test_a_run_may_change_between_torchs_and_the_kernel(first, fused):
    def torchs(params):
        return torch.optim.AdamW(groups_of(params), fused=fused)

    def ours(params):
        return KernelAdamW(groups_of(params))

    kinds = (torchs, ours) if first == "torch" else (ours, torchs)
    params = make_params()
    before, after = (kind(params) for kind in kinds)
    follow(params, before, range(3))
    set_gradients(params, 3)
    params[0].grad = None  # one that has taken a step less
    before.step()
    table = copy.deepcopy(before.state_dict())
    table["param_groups"] = after.state_dict()["param_groups"]
    after.load_state_dict(table)
    changed = follow(params, after, range(4, 7))

    params = make_params()
    whole = torchs(params)
    follow(params, whole, range(3))
    set_gradients(params, 3)
    params[0].grad = None
    whole.step()
    assert_all_close(changed, follow(params, whole, range(4, 7)))
    assert {key for values in after.state.values() for key in values} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }


def test_a_state_dict_gives_every_parameter_a_count_of_its_own():
    params = make_params()
    optimizer = KernelAdamW(groups_of(params))
    follow(params, optimizer, range(2))
    steps = [values["step"] for values in optimizer.state_dict()["state"].values()]
    steps[0] += 1
    assert [step.item() for step in steps[1:]] == [2.0] * (len(SIZES) - 1)
    assert {optimizer.state[p]["step"].item() for p in params} == {2.0}


def learner_with(kind, settings):
    """Make a learner whose parameters this kind of AdamW moves, in float32: it writes no twins."""
    learner = make_learner(settings, device=DEVICE)
    groups = [
        {key: group[key] for key in ("params", "weight_decay")}
        for group in learner.optimizers[0].param_groups
    ]
    learner.optimizers = [kind(groups, betas=settings.betas)]
    return learner


def test_a_resumed_learner_continues_bit_identically_and_counts_on():
    settings = TrainConfig(batch_size=6, clip=0.5, precision="fp32")
    whole, resumed = (learner_with(KernelAdamW, settings) for _ in range(2))
    with deterministic_kernels(True):
        resume_halfway(whole, resumed)
    assert_same_state(whole, resumed)


def resume_halfway(whole, resumed):
    for step in range(1, 5):
        take_step(whole, make_batch(seed=step), step, 1e-2)
        if step == 2:
            resumed.load(
                {name: tensor.clone() for name, tensor in whole.model_tensors().items()},
                {name: tensor.clone() for name, tensor in whole.training_state().items()},
            )
        elif step > 2:
            take_step(resumed, make_batch(seed=step), step, 1e-2)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_step_clips_alike_whether_the_optimizer_multiplies_or_not(clip):
    settings = TrainConfig(batch_size=6, clip=clip, precision="fp32")
    found = []
    for kind in (torch.optim.AdamW, AdamW, KernelAdamW):
        learner = learner_with(kind, settings)
        norms = [take_step(learner, make_batch(seed=s), s, 1e-2).grad_norm for s in range(1, 4)]
        assert min(norms) > 0.5  # so that there is something to clip
        found.append([torch.tensor(norms), *(p.detach() for p in learner.parameters.values())])
    for ours in found[1:]:
        assert_all_close(ours, found[0], rtol=1e-4, atol=1e-6)


# Compilation


def test_from_step_to_step_only_floats_and_addresses_change(monkeypatch):
    """A whole number or a constant that changed would be compiled for."""
    seen = set()

    class Recorder:
        def __getitem__(self, grid):
            def launch(*args, **constants):
                kinds = tuple(
                    (a.dtype, a.shape) if isinstance(a, torch.Tensor) else type(a) for a in args
                )
                seen.add((grid, kinds, tuple(constants.items())))

            return launch

    monkeypatch.setattr(kernel, "_adamw", Recorder())
    params = make_params()
    optimizer = KernelAdamW([{"params": params}])
    for step in range(4):
        group = optimizer.param_groups[0]
        group["lr"] = group["eps"] = [1, 1.0, 0, 0.5][step]  # whole ones too
        group["betas"] = [(0.9, 0.95), (0, 0.5), (0.5, 0), (0.0, 0.0)][step]
        set_gradients(params, step)
        optimizer.step()
    assert len(seen) == 1


def test_it_compiles_for_a_hopper_gpu_with_wide_loads_and_no_shared_memory():
    # 8 numbers a thread: of θ, g, m and v two loads each of four; in bfloat16 half as wide.
    assert compiled_lines("compile_adamw.py")[:2] == ["fp32 8 0 6 0 0", "bf16 4 4 4 4 0"]


# On a GPU

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_on_a_cpu_torchs_own_is_chosen():
    model = build(FAMILIES["plain"], dtype=torch.float32)
    assert type(make_optimizers(model)[0]) is torch.optim.AdamW


@pytest.mark.cuda
@needs_cuda
def test_on_a_gpu_it_is_chosen_and_equals_torchs_fused_without_a_wait(monkeypatch):
    monkeypatch.setattr(KernelAdamW, "tiling", kernel.Tiling())
    model = build(FAMILIES["plain"], dtype=torch.float32).cuda()
    other = copy.deepcopy(model)
    (optimizer,) = make_optimizers(model, lr=1e-2)
    assert type(optimizer) is KernelAdamW
    keys = ("weight_decay", "lr", "betas", "eps")
    named = {id(p): name for name, p in model.named_parameters()}
    theirs = dict(other.named_parameters())
    groups = [
        {"params": [theirs[named[id(p)]] for p in group["params"]], **{k: group[k] for k in keys}}
        for group in optimizer.param_groups
    ]
    fused = torch.optim.AdamW(groups, fused=True)
    tokens = ids(2, 8).cuda()
    scale = torch.tensor(0.5, device="cuda")
    compiled = None
    for step in range(5):
        model.zero_grad()
        model.loss(tokens, tokens).backward()
        for name, p in model.named_parameters():
            theirs[name].grad = p.grad * 0.5
        torch.cuda.synchronize()
        if step:
            torch.cuda.set_sync_debug_mode("error")  # from here on, whatever waits raises
        try:
            optimizer.step(scale=scale)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        fused.step()
        variants = sum(len(caches[0]) for caches in kernel._adamw.device_caches.values())
        assert compiled in (None, variants)
        compiled = variants
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
@needs_cuda
def test_on_a_gpu_a_double_or_a_turned_parameter_goes_to_torchs():
    model = build(FAMILIES["plain"], dtype=torch.float64).cuda()
    assert type(make_optimizers(model)[0]) is torch.optim.AdamW
    model = nn.Linear(4, 4, device="cuda")
    model.weight = nn.Parameter(torch.ones(4, 3, device="cuda").T)
    assert type(make_optimizers(model)[0]) is torch.optim.AdamW
