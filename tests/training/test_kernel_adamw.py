"""KernelAdamW matches our plain AdamW, in Triton's interpreter or on a GPU."""

import copy

import pytest
import torch
from torch import nn

from acceleration.gpu import compiled_lines
from scratchlm.accelerate.kernels.triton import adamw as kernel
from scratchlm.accelerate.shadow_weights import ShadowWeights
from scratchlm.training import AdamW, TrainConfig, make_optimizers, take_step
from scratchlm.training.kernel_adamw import KernelAdamW
from scratchlm.training.optimizers import clip_grad_norm
from scratchlm.training.session import deterministic_kernels
from tiny_models import FAMILIES, build, ids
from training.test_step import make_batch
from training.tiny import assert_same_state, make_learner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = kernel.Tiling(block=64, blocks_per_program=2, warps=1)  # chunks of 128
CHUNK = 128
SIZES = [(1,), (), (CHUNK - 1,), (CHUNK,), (CHUNK + 1,), (3, CHUNK), (7, 61), (63,), (65,), (2, 0)]
# A GPU fuses multiply-add, which changes the last bits where terms nearly cancel.
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


def take_steps(params, optimizer, steps, **more):
    for step in steps:
        set_gradients(params, step)
        optimizer.step(**more)
    return [p.detach() for p in params]


def assert_all_close(ours, theirs, **close):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **{**CLOSE, **close})


def pair():
    """Yield the same parameters under KernelAdamW and under AdamW."""
    for kind in (KernelAdamW, AdamW):
        params = make_params()
        yield params, kind(groups_of(params))


@pytest.mark.parametrize("scale", [None, 0.37])
def test_matches_adamw_for_tensors_of_any_size_and_any_param_groups(scale):
    factor = None if scale is None else torch.tensor(scale, device=DEVICE)
    found = [
        (take_steps(params, optimizer, range(6), scale=factor), optimizer, params)
        for params, optimizer in pair()
    ]
    assert_all_close(found[0][0], found[1][0])
    for key in ("exp_avg", "exp_avg_sq", "step"):
        states = [[o.state[p][key] for p in params] for _, o, params in found]
        assert_all_close(*states)


def test_tiling_does_not_change_the_result():
    results = []
    for tiling in (SMALL, kernel.Tiling(), kernel.Tiling(32, 1, 1, "")):
        params = make_params()
        optimizer = KernelAdamW(groups_of(params))
        optimizer.tiling = tiling
        results.append(take_steps(params, optimizer, range(3)))
    for other in results[1:]:
        assert_all_close(other, results[0], rtol=0, atol=0)


def test_bfloat16_gradients_are_read_directly():
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch requires gradients to have the parameter's dtype")
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


def test_first_moment_may_be_bfloat16():
    found = []
    for kind in (KernelAdamW, AdamW):
        params = make_params()
        optimizer = kind(groups_of(params), moment=torch.bfloat16)
        params_after = take_steps(params, optimizer, range(4))
        moments = [optimizer.state[p]["exp_avg"] for p in params]
        assert {m.dtype for m in moments} == {torch.bfloat16}
        found.append((params_after, [m.float() for m in moments]))
    # The interpreter truncates where a GPU rounds: up to one bit of m per step.
    assert_all_close(found[0][1], found[1][1], rtol=4 * 2**-8, atol=4 * 2**-8)
    assert_all_close(found[0][0], found[1][0], rtol=0, atol=0.02)


def test_shadow_weights_are_written_with_their_parameters():
    model = build(FAMILIES["plain"], dtype=torch.float32).to(DEVICE)
    optimizer = KernelAdamW(model.parameters(), lr=0.1)
    shadow_weights = ShadowWeights(model, low_gradients=True)
    optimizer.write_shadow_weights(shadow_weights)
    before = {p: shadow.clone() for p, shadow in shadow_weights.parts.items()}
    for p in model.parameters():
        p.grad_dtype = None
        dtype = torch.bfloat16 if p in shadow_weights.parts else torch.float32
        p.grad = torch.randn_like(p, dtype=dtype)
    optimizer.step()
    for p, shadow in shadow_weights.parts.items():
        # A GPU rounds to nearest, the interpreter truncates.
        steps = {"rtol": 0 if p.is_cuda else 2**-7, "atol": 0}
        torch.testing.assert_close(shadow, p.detach().to(torch.bfloat16), **steps)
        assert not torch.equal(shadow, before[p])
        shadow.zero_()
    shadow_weights.refresh()  # does nothing: the optimizer has marked them as equal
    assert not any(shadow.any() for shadow in shadow_weights.parts.values())


def test_scale_is_equivalent_to_clipping():
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
def test_a_non_finite_gradient_affects_only_its_element():
    params = make_params()
    optimizer = KernelAdamW(groups_of(params))
    set_gradients(params, 0)
    params[4].grad[CHUNK] = torch.nan  # alone in its chunk
    params[5].grad[1, 2] = torch.inf
    optimizer.step()
    bad = [(~p.detach().isfinite()).nonzero().tolist() for p in params]
    assert bad == [[], [], [], [], [[CHUNK]], [[1, 2]], [], [], [], []]


def test_missing_gradients_are_skipped_and_steps_are_counted_per_parameter():
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


def test_strided_gradients_and_unaligned_parameters_match_adamw():
    """A transposed gradient; parameters that are not aligned to 16 bytes."""
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


def test_sparse_gradients_and_unsupported_parameters_are_rejected():
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


def test_closure_is_called_with_gradients_enabled():
    p = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = KernelAdamW([p])

    def closure():
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert (p < 1).all()


def test_update_increments_the_version_of_the_parameters():
    p = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = KernelAdamW([p])
    loss = p.square().sum()
    p.grad = torch.ones(3, device=DEVICE)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Changed addresses


def test_table_is_rebuilt_only_when_an_address_changes():
    params = make_params()
    optimizer = KernelAdamW(groups_of(params))
    set_gradients(params, 0)
    optimizer.step()
    tables = list(optimizer._tables)
    lists = [table.device_grads for table in tables]
    optimizer.step()
    assert all(a is b for a, b in zip(optimizer._tables, tables, strict=True))
    assert all(t.device_grads is old for t, old in zip(tables, lists, strict=True))
    params[0].grad = params[0].grad.clone()  # at a new address
    optimizer.step()
    assert optimizer._tables[0] is tables[0]
    assert tables[0].device_grads is not lists[0]
    assert tables[1].device_grads is lists[1]
    optimizer.state[params[1]]["exp_avg"] = optimizer.state[params[1]]["exp_avg"].clone()
    optimizer.step()
    assert optimizer._tables[0] is tables[0]
    assert optimizer._tables[1] is not tables[1]


def test_changed_addresses_still_match_adamw():
    """New gradients, a loaded state, parameters with new storage."""
    found = []
    for params, optimizer in pair():
        take_steps(params, optimizer, range(2))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        take_steps(params, optimizer, range(2, 4))
        with torch.no_grad():
            for p in params:
                p.data = p.data.clone()
        found.append(take_steps(params, optimizer, range(4, 6)))
    assert_all_close(*found)


# State


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("first", ["torch", "kernel"])
def test_state_is_interchangeable_with_torch(first, fused):
    def torch_adamw(params):
        return torch.optim.AdamW(groups_of(params), fused=fused)

    def kernel_adamw(params):
        return KernelAdamW(groups_of(params))

    kinds = (torch_adamw, kernel_adamw)
    if first == "kernel":
        kinds = kinds[::-1]
    params = make_params()
    before, after = (kind(params) for kind in kinds)
    take_steps(params, before, range(3))
    set_gradients(params, 3)
    params[0].grad = None  # it takes one step less
    before.step()
    table = copy.deepcopy(before.state_dict())
    table["param_groups"] = after.state_dict()["param_groups"]
    after.load_state_dict(table)
    changed = take_steps(params, after, range(4, 7))

    params = make_params()
    whole = torch_adamw(params)
    take_steps(params, whole, range(3))
    set_gradients(params, 3)
    params[0].grad = None
    whole.step()
    assert_all_close(changed, take_steps(params, whole, range(4, 7)))
    assert {key for values in after.state.values() for key in values} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }


def test_state_dict_has_a_step_tensor_per_parameter():
    params = make_params()
    optimizer = KernelAdamW(groups_of(params))
    take_steps(params, optimizer, range(2))
    steps = [values["step"] for values in optimizer.state_dict()["state"].values()]
    steps[0] += 1
    assert [step.item() for step in steps[1:]] == [2.0] * (len(SIZES) - 1)
    assert {optimizer.state[p]["step"].item() for p in params} == {2.0}


def learner_with(kind, settings):
    """Make a float32 learner, without shadow weights, that uses this class of AdamW."""
    learner = make_learner(settings, device=DEVICE)
    groups = [
        {key: group[key] for key in ("params", "weight_decay")}
        for group in learner.optimizers[0].param_groups
    ]
    learner.optimizers = [kind(groups, betas=settings.betas)]
    return learner


def test_resume_is_bit_identical():
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
def test_clipping_is_the_same_with_every_adamw(clip):
    settings = TrainConfig(batch_size=6, clip=clip, precision="fp32")
    found = []
    for kind in (torch.optim.AdamW, AdamW, KernelAdamW):
        learner = learner_with(kind, settings)
        norms = [take_step(learner, make_batch(seed=s), s, 1e-2).grad_norm for s in range(1, 4)]
        assert min(norms) > 0.5  # so that clipping has an effect
        found.append([torch.tensor(norms), *(p.detach() for p in learner.parameters.values())])
    for ours in found[1:]:
        assert_all_close(ours, found[0], rtol=1e-4, atol=1e-6)


# Compilation


def test_new_hyperparameters_do_not_recompile(monkeypatch):
    """Triton compiles anew when an integer or a constexpr changes, not for floats."""
    seen = set()

    class Recorder:
        def __getitem__(self, grid):
            def launch(*args, **constants):
                kinds = tuple(
                    (a.dtype, a.shape) if isinstance(a, torch.Tensor) else type(a) for a in args
                )
                seen.add((grid, kinds, tuple(constants.items())))

            return launch

    monkeypatch.setattr(kernel, "_adamw_kernel", Recorder())
    params = make_params()
    optimizer = KernelAdamW([{"params": params}])
    for step in range(4):
        group = optimizer.param_groups[0]
        group["lr"] = group["eps"] = [1, 1.0, 0, 0.5][step]  # integers too
        group["betas"] = [(0.9, 0.95), (0, 0.5), (0.5, 0), (0.0, 0.0)][step]
        set_gradients(params, step)
        optimizer.step()
    assert len(seen) == 1


def test_kernel_compiles_for_hopper_with_vectorized_loads_and_no_shared_memory():
    # 8 elements per thread: two loads of four each for θ, g, m, v; half as wide in bfloat16.
    assert compiled_lines("compile_adamw.py")[:2] == ["fp32 8 0 6 0 0", "bf16 4 4 4 4 0"]


# On a GPU

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_torch_adamw_is_chosen_on_a_cpu():
    model = build(FAMILIES["plain"], dtype=torch.float32)
    assert type(make_optimizers(model)[0]) is torch.optim.AdamW


@pytest.mark.cuda
@needs_cuda
def test_kernel_adamw_is_chosen_on_a_gpu_and_matches_torch_without_synchronizing(monkeypatch):
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
            torch.cuda.set_sync_debug_mode("error")  # a synchronization raises
        try:
            optimizer.step(scale=scale)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        fused.step()
        variants = sum(len(caches[0]) for caches in kernel._adamw_kernel.device_caches.values())
        assert compiled in (None, variants)
        compiled = variants
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
@needs_cuda
def test_float64_or_transposed_parameters_fall_back_to_torch_on_a_gpu():
    model = build(FAMILIES["plain"], dtype=torch.float64).cuda()
    assert type(make_optimizers(model)[0]) is torch.optim.AdamW
    model = nn.Linear(4, 4, device="cuda")
    model.weight = nn.Parameter(torch.ones(4, 3, device="cuda").T)
    assert type(make_optimizers(model)[0]) is torch.optim.AdamW
