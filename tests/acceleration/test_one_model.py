"""What you read is what runs: every module is called, on every path, whatever was done to it.

For every entry of `named_modules()`: a hook on it fires, and replacing it, patching it, making a
subclass of it or parametrising it changes the result; in forward, loss, backward, cached forward
and generation, on the plain and on the accelerated model.

Two exceptions, which are no calls: `layers` is a list; and the model itself is called by `forward`
only, not by `loss` and `generate`, which stop at the hidden states before the head.
"""

import contextlib
from functools import partial, partialmethod, wraps
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from acceleration.as_gpu import DEVICE, take_for_a_gpu
from acceleration.paths import (
    CALLS,
    CHANGES,
    MODELS,
    PATHS,
    Wrapped,
    alike,
    backward,
    called_modules,
    differs,
    generated,
    make,
    patched,
    perturb,
    replaced,
    tokens_for,
)
from scratchlm.accelerate import accelerate, plain
from scratchlm.inference import GREEDY, stream
from scratchlm.model import (
    MLP,
    Embedding,
    LayerNorm,
    Linear,
    MultiHeadSelfAttention,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    TiedHead,
    TransformerBlock,
    TransformerLM,
)
from scratchlm.ops import FastOps
from scratchlm.training import Learner, TrainConfig

ROOT_IS_CALLED_BY = ("forward", "cached forward")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def build(name, mode, **more):
    model = make(name, **more)
    return accelerate(model) if mode == "accelerated" else model


def paths_of(name, mode):
    """The paths that call a module; a plain model generates without acceleration."""
    for path, run in PATHS.items():
        if name or path in ROOT_IS_CALLED_BY:
            if path == "generate":
                yield path, lambda model: generated(model, accelerate=mode == "accelerated")
            else:
                yield path, run


modes = pytest.mark.parametrize("mode", ["plain", "accelerated"])
models = pytest.mark.parametrize("name", MODELS)


class Listener:
    """Hooks on one module that only count: before and after the call, and in the backward pass."""

    def __init__(self, module):
        self.before = self.after = self.backward = 0
        self.handles = [
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after),
        ]
        if any(p.requires_grad for p in module.parameters()):
            self.handles.append(module.register_full_backward_hook(self._backward))

    def _before(self, module, given):
        self.before += 1

    def _after(self, module, given, output):
        self.after += 1

    def _backward(self, module, grad_input, grad_output):
        self.backward += 1

    def remove(self):
        for handle in self.handles:
            handle.remove()


@modes
@models
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # ids have no gradient
def test_every_hook_fires_on_every_path(name, mode):
    model, missed = build(name, mode), []
    for module_name in called_modules(model):
        for path, run in paths_of(module_name, mode):
            expected = run(model)
            listener = Listener(model.get_submodule(module_name))
            got = run(model)
            listener.remove()
            where = f"{module_name or 'the model'} in {path}"
            if listener.after < CALLS.get(path, 1):
                missed.append(f"{where}: {listener.after} calls of a forward hook")
            if listener.before < CALLS.get(path, 1):
                missed.append(f"{where}: {listener.before} calls of a pre-hook")
            if path == "backward" and len(listener.handles) == 3 and not listener.backward:
                missed.append(f"{where}: no call of a backward hook")
            if not alike(got, expected):
                missed.append(f"{where}: listening changed the result")
    assert not missed, "\n".join(missed)


@modes
@models
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layers", ["one", pytest.param("both", marks=pytest.mark.slow)])
def test_every_change_of_a_module_changes_the_result(name, mode, change, layers):
    """Of two layers that are alike, every other change is made to the first, or to the last."""
    model, missed = build(name, mode), []
    left_out = f"layers.{list(CHANGES).index(change) % 2}." if layers == "one" else "none"
    names = [n for n in called_modules(model) if applies(change, model, n)]
    names = [n for n in names if not n.startswith(left_out)]
    assert names
    expected = {path: run(model) for path, run in paths_of("any", mode)}
    for module_name in names:
        with CHANGES[change](model, module_name):
            for path, run in paths_of(module_name, mode):
                if not differs(run(model), expected[path]):
                    missed.append(f"{module_name or 'the model'} in {path}: nothing changed")
    assert not missed, "\n".join(missed)
    for path, run in paths_of("any", mode):  # and it was taken back
        assert alike(run(model), expected[path]), path


def applies(change, model, name):
    module = model.get_submodule(name)
    if change == "replacement":
        return bool(name)  # the model itself stands nowhere
    if change == "parametrization":
        return "weight" in module._parameters  # a tied head has none of its own
    if change == "pre-hook that changes the input":
        return bool(name) and "embeddings" not in name  # their inputs are ids
    return True


@models
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_changed_before_acceleration_stays_changed(name, change):
    for module_name in called_modules(make(name, num_layers=1)):
        model = make(name, num_layers=1)
        if not applies(change, model, module_name):
            continue
        with CHANGES[change](model, module_name):
            path = "forward" if not module_name else "backward"
            changed = PATHS[path](model)
            accelerate(model)
            got = {"first": PATHS[path](model), "generate": generated(model, accelerate=True)}
            plain(model)
        assert alike(got["first"], changed), f"{change} of {module_name} was taken back"
        if module_name:
            assert differs(got["generate"], generated(model)), f"{change} of {module_name}"


@modes
@models
def test_a_global_hook_sees_every_module_on_every_path(name, mode):
    model = build(name, mode)
    by_module = {module: n for n, module in model.named_modules()}
    for path, run in paths_of("any", mode):
        seen = set()
        handle = register_module_forward_hook(lambda m, *_, seen=seen: seen.add(by_module.get(m)))
        run(model)
        handle.remove()
        expected = {n for n in called_modules(model) if n or path in ROOT_IS_CALLED_BY}
        assert seen >= expected, f"{mode} {name} in {path}: never seen {sorted(expected - seen)}"


def test_a_call_of_modules_that_is_patched_sees_every_one_in_generation(monkeypatch):
    model, seen = build("qwen3", "accelerated"), set()
    call = nn.Module.__call__
    monkeypatch.setattr(
        nn.Module, "__call__", lambda m, *g, **n: (seen.add(m), call(m, *g, **n))[1]
    )
    generated(model, accelerate=True)
    missed = {n for n, m in model.named_modules() if n in called_modules(model) and m not in seen}
    assert missed == {""}


@modes
@models
def test_a_hook_put_on_in_the_middle_of_a_stream_fires_from_then_on(name, mode):
    model = build(name, mode)
    for module_name in filter(None, called_modules(model)):
        pieces = stream(
            model,
            [[1, 2, 3]],
            max_new_tokens=4,
            sampling=GREEDY,
            eos_ids=(),
            accelerate=mode == "accelerated",
        )
        next(pieces), next(pieces)
        listener = Listener(model.get_submodule(module_name))
        list(pieces)
        listener.remove()
        assert listener.after >= 2, f"{mode} {name}: {module_name}"


@modes
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_the_middle_of_a_stream_is_used_from_then_on(change, mode):
    model, missed = build("qwen3", mode), []

    def said(change=contextlib.nullcontext):
        pieces = stream(
            model,
            [[1, 2, 3]],
            max_new_tokens=4,
            sampling=GREEDY,
            eos_ids=(),
            num_logprobs=0,
            accelerate=mode == "accelerated",
        )
        next(pieces), next(pieces)
        with change():
            return torch.tensor([piece.logprob.logprob for piece in pieces])

    expected = said()
    for module_name in filter(None, called_modules(model)):
        if applies(change, model, module_name):
            got = said(partial(CHANGES[change], model, module_name))
            missed += [] if differs(got, expected) else [module_name]
    assert not missed, "\n".join(missed)
    assert alike(said(), expected)


@models
def test_a_wrapper_that_changes_nothing_changes_nothing(name):
    model, missed = make(name), []
    expected = {path: run(model) for path, run in PATHS.items()}
    for module_name in filter(None, called_modules(model)):
        with replaced(model, module_name, Wrapped):
            for path, run in PATHS.items():
                if not alike(run(model), expected[path]):
                    missed.append(f"{module_name} in {path}")
    assert not missed, "\n".join(missed)


# Methods patched in their class

METHODS = [
    *((cls, "forward") for cls in (Linear, Embedding, TiedHead, RMSNorm, LayerNorm, SwiGLU, MLP)),
    *((MultiHeadSelfAttention, n) for n in ("forward", "attend", "project", "qkv", "split_heads")),
    *((RotaryEmbedding, n) for n in ("forward", "tables")),
    *((TransformerBlock, n) for n in ("forward", "feed_forward")),
    *((TransformerLM, n) for n in ("head_loss", "hidden", "_embed")),
    *((FastOps, n) for n in ("linear", "rms_norm", "silu", "rope", "attention", "cross_entropy")),
]


def perturbed(method):
    return lambda self, *given, **named: perturb(method(self, *given, **named))


WAYS = {  # to put another function in the place of a method
    "a function": perturbed,
    "a function of the same name": lambda method: wraps(method)(perturbed(method)),
    "a partial method": lambda method: partialmethod(perturbed(method)),
    "a mock": lambda method: mock.create_autospec(method, side_effect=perturbed(method)),
}


def methods_of(model):
    for cls, name in METHODS:
        if cls is FastOps or any(isinstance(module, cls) for module in model.modules()):
            yield cls, name


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@pytest.mark.parametrize("way", WAYS)
def test_a_method_patched_in_its_class_is_called_on_every_path(name, way, monkeypatch):
    own, model, missed = make(name), build(name, "accelerated"), []
    for cls, method in methods_of(model):
        with monkeypatch.context() as patch:
            patch.setattr(cls, method, WAYS[way](getattr(cls, method)))
            for path, run in paths_of("any", "accelerated"):
                if not alike(run(model), PATHS[path](own)):
                    missed.append(f"{cls.__name__}.{method} in {path}")
    assert not missed, "\n".join(missed)
    for path, run in paths_of("any", "accelerated"):
        assert alike(run(model), PATHS[path](own)), path


# Functions of functions


@modes
@models
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's attention, by vmap
def test_a_model_can_be_transformed(name, mode):
    """`torch.func` finds the gradients of functions of the weights, also each row's by `vmap`."""
    model = build(name, mode, dtype=torch.float64, num_layers=1)
    weights, tokens = dict(model.named_parameters()), tokens_for(model)

    def loss_of(weights, tokens):
        with torch.nn.utils.stateless._reparametrize_module(model, weights):
            return model.loss(tokens, tokens.roll(-1, 1))

    expected = torch.autograd.grad(loss_of(weights, tokens), weights.values())
    got = torch.func.grad(loss_of)(weights, tokens)
    for n, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(got[n], gradient, msg=n)
    along = {n: torch.randn_like(weight) for n, weight in weights.items()}
    _, slope = torch.func.jvp(lambda w: loss_of(w, tokens), (weights,), (along,))
    torch.testing.assert_close(slope, sum((along[n] * got[n]).sum() for n in weights))
    if name == "mixtral":
        return  # its load-balancing loss is a statistic of all rows
    by_row = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(weights, tokens[:, None])
    for n, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(by_row[n].mean(0), gradient, msg=n)


@pytest.mark.parametrize("name", ["plain", "gpt2", "post-norm"])
def test_the_plain_model_has_second_derivatives(name):
    model, formulas = make(name, dtype=torch.float64), make(name, "reference", dtype=torch.float64)
    for m in (model, formulas):
        tokens = tokens_for(m)
        loss = m.loss(tokens, tokens.roll(-1, 1))
        first = torch.autograd.grad(loss, list(m.parameters()), create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()
    for (n, p), q in zip(model.named_parameters(), formulas.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=n)


# By kernels: a CPU taken for a GPU that trains


def few_gradients(model):
    return backward(model, batch=1, seq=3)  # the interpreter takes its time


@pytest.mark.parametrize("name", ["plain", "qwen3"])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_fire_beside_kernels(name, monkeypatch):
    take_for_a_gpu(monkeypatch)
    model, missed = build(name, "accelerated", device=DEVICE, num_layers=1), []
    expected = few_gradients(model)
    for module_name in filter(None, called_modules(model)):
        listener = Listener(model.get_submodule(module_name))
        got = few_gradients(model)
        listener.remove()
        if not (listener.before and listener.after):
            missed.append(f"{module_name}: no call of a forward hook")
        if len(listener.handles) == 3 and not listener.backward:
            missed.append(f"{module_name}: no call of a backward hook")
        if not alike(got, expected):
            missed.append(f"{module_name}: listening changed the result")
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_is_called_beside_kernels(change, monkeypatch):
    take_for_a_gpu(monkeypatch)
    model, missed = build("qwen3", "accelerated", device=DEVICE, num_layers=1), []
    expected = few_gradients(model)
    for module_name in filter(None, called_modules(model)):
        if applies(change, model, module_name):
            with CHANGES[change](model, module_name):
                if not differs(few_gradients(model), expected):
                    missed.append(module_name)
    assert not missed, "\n".join(missed)
    assert alike(few_gradients(model), expected)


def test_a_method_patched_in_its_class_is_called_beside_kernels(monkeypatch):
    take_for_a_gpu(monkeypatch)
    model, missed = build("qwen3", "accelerated", device=DEVICE, num_layers=1), []
    expected, way = few_gradients(model), WAYS["a function of the same name"]
    for cls, method in methods_of(model):
        with monkeypatch.context() as patch:
            patch.setattr(cls, method, way(getattr(cls, method)))
            if not differs(few_gradients(model), expected):
                missed.append(f"{cls.__name__}.{method}")
    assert not missed, "\n".join(missed)
    assert alike(few_gradients(model), expected)


@pytest.mark.parametrize("method", ["attend", "project", "qkv", "split_heads"])
def test_a_method_patched_in_its_module_is_called_beside_kernels(method, monkeypatch):
    take_for_a_gpu(monkeypatch)
    model = build("qwen3", "accelerated", device=DEVICE, num_layers=1)
    expected = few_gradients(model)
    with patched(model, "layers.0.attn", method):
        assert differs(few_gradients(model), expected)
    assert alike(few_gradients(model), expected)


def test_a_model_can_be_transformed_beside_kernels(monkeypatch):
    take_for_a_gpu(monkeypatch)
    model = build("qwen3", "accelerated", device=DEVICE, num_layers=1)
    weights, tokens = dict(model.named_parameters()), tokens_for(model, 1, 3)

    def loss_of(weights):
        with torch.nn.utils.stateless._reparametrize_module(model, weights):
            return model.loss(tokens, tokens.roll(-1, 1))

    expected = torch.autograd.grad(loss_of(weights), weights.values())
    got = torch.func.grad(loss_of)(weights)
    for n, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(got[n], gradient, msg=n, atol=1e-5, rtol=1e-4)


# Compiled


@pytest.fixture
def _compiler():
    """A compiler that has forgotten all, looks for hooks at every call, and may compile often.

    Looking for hooks is what training sets (`training/learner.py`): torch leaves it out unless
    told, and a hook put on a compiled block's layer would then be ignored.
    """
    torch._dynamo.reset()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, recompile_limit=64):
        yield
    torch._dynamo.reset()


def compiled(name, mode, backend, device="cpu"):
    model = build(name, mode, num_layers=1, device=device)
    for layer in model.layers:
        layer.compile(backend=backend)
    return model, [n for n in called_modules(model) if n.startswith("layers.")]


BACKENDS = [(name, "eager") for name in MODELS] + [("qwen3", "aot_eager")]


@modes
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
@pytest.mark.usefixtures("_compiler")
def test_hooks_put_on_before_compilation_fire(name, mode, backend):
    model, names = compiled(name, mode, backend)
    counts = {n: 0 for n in names}
    for n in names:

        def count(module, given, output, n=n):
            counts[n] += 1

        model.get_submodule(n).register_forward_hook(count)
    for path in ("forward", "backward"):
        counts.update(dict.fromkeys(names, 0))
        PATHS[path](model)
        assert all(counts.values()), f"in {path}: {counts}"


@modes
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("modules", ["some", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("_compiler")
def test_a_hook_put_on_a_compiled_block_fires(mode, backend, modules):
    model, names = compiled("qwen3", mode, backend)
    if modules == "some":  # each is compiled anew
        names = [n for n in names if n.endswith(("attn.q_proj", "ln2", "ffn.w1"))]
    expected = PATHS["backward"](model)
    missed = []
    for n in names:
        calls = []
        handle = model.get_submodule(n).register_forward_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        PATHS["backward"](model)
        handle.remove()
        missed += [n] if not calls else []
    assert not missed
    assert alike(PATHS["backward"](model), expected)


@modes
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("_compiler")
def test_a_change_of_a_compiled_block_is_used(mode, change):
    model, _ = compiled("qwen3", mode, "eager")
    expected = PATHS["backward"](model)
    for n in ("layers.0.attn.q_norm", "layers.0.ln2", "layers.0.ffn.w1"):
        with CHANGES[change](model, n):
            assert differs(PATHS["backward"](model), expected), n
        assert alike(PATHS["backward"](model), expected), n


FUSED = {"scratchlm.add_rms_norm.default", "scratchlm.swiglu_gate.default"}


@pytest.mark.usefixtures("_compiler")
def test_fusions_run_in_compiled_blocks(monkeypatch):
    take_for_a_gpu(monkeypatch)
    seen = set()

    def see(graph, inputs):
        seen.update(str(node.target) for node in graph.graph.nodes)
        return graph

    model, _ = compiled("qwen3", "accelerated", see, DEVICE)
    few_gradients(model)
    assert {"autograd_function_apply", *FUSED} <= seen  # the first is what splits and norms QKV


@pytest.mark.usefixtures("_compiler")
def test_a_method_patched_in_a_compiled_block_is_called_beside_kernels(monkeypatch):
    take_for_a_gpu(monkeypatch)
    model, _ = compiled("qwen3", "accelerated", "eager", DEVICE)
    expected = few_gradients(model)
    for n in ("attn.q_norm", "ln2", "ffn.w1"):
        with patched(model, f"layers.0.{n}"):
            assert differs(few_gradients(model), expected), n
    with patched(model, "layers.0.attn", "qkv"):
        assert differs(few_gradients(model), expected)
    assert alike(few_gradients(model), expected)


@modes
def test_training_compiles_blocks_that_look_for_hooks(mode, monkeypatch):
    compile_block = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda m, **more: compile_block(m, backend="eager"))
    torch._dynamo.reset()
    settings = TrainConfig(steps=1, batch_size=2, compile="block", accelerate=mode != "plain")
    learner = Learner(make("qwen3", num_layers=1), settings)
    tokens = tokens_for(learner.model)
    learner.loss(tokens, tokens).backward()
    for n in ("layers.0", "layers.0.attn", "layers.0.attn.q_proj", "layers.0.ffn.w1"):
        listener = Listener(learner.model.get_submodule(n))
        learner.loss(tokens, tokens).backward()
        listener.remove()
        assert (listener.before, listener.after, listener.backward) == (1, 1, 1), n


# On a GPU, with every decoder


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@models
def test_on_a_gpu_every_hook_fires_in_every_decoded_token(name, dtype):
    model, missed = build(name, "accelerated", device="cuda", dtype=dtype), []
    new_tokens = 17  # more than are worth a recording
    expected = generated(model, accelerate=True, new_tokens=new_tokens)
    for module_name in filter(None, called_modules(model)):
        listener = Listener(model.get_submodule(module_name))
        got = generated(model, accelerate=True, new_tokens=new_tokens)
        listener.remove()
        if min(listener.before, listener.after) < new_tokens:
            missed.append(f"{module_name}: {listener.after} calls in {new_tokens} tokens")
        if dtype == torch.float32 and not alike(got, expected):
            missed.append(f"{module_name}: listening changed the result")
    assert not missed, "\n".join(missed)


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("change", CHANGES)
@models
def test_on_a_gpu_every_change_reaches_every_path(name, change):
    model, missed = build(name, "accelerated", device="cuda"), []
    paths = {**PATHS, "generate": lambda m: generated(m, accelerate=True, new_tokens=17)}
    expected = {path: run(model) for path, run in paths.items()}
    for module_name in filter(None, called_modules(model)):
        if not applies(change, model, module_name):
            continue
        with CHANGES[change](model, module_name):
            for path, run in paths.items():
                if not differs(run(model), expected[path]):
                    missed.append(f"{module_name} in {path}")
    assert not missed, "\n".join(missed)


@needs_cuda
@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@models
def test_on_a_gpu_every_hook_fires_in_training(name):
    """Under autocast, as the kernels that train are used."""
    model, missed = build(name, "accelerated", device="cuda"), []
    for module_name in filter(None, called_modules(model)):
        listener = Listener(model.get_submodule(module_name))
        with torch.autocast("cuda", torch.bfloat16):
            PATHS["backward"](model)
        listener.remove()
        if not (listener.before and listener.after):
            missed.append(module_name)
    assert not missed, "\n".join(missed)


@needs_cuda
@pytest.mark.cuda
def test_on_a_gpu_a_recorded_step_is_dropped_when_a_hook_is_put_on():
    model = build("plain", "accelerated", device="cuda")
    pieces = stream(model, [[1, 2, 3]], max_new_tokens=20, sampling=GREEDY, eos_ids=())
    for _ in range(10):
        next(pieces)
    listener = Listener(model.layers[1].ffn.w2)
    list(pieces)
    listener.remove()
    assert listener.after == 9  # all but the step that was on its way
