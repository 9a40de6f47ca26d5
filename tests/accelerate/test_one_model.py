"""What you read is what runs: every module is called, on every path, whatever was done to it.

For every entry of `named_modules()`: a hook on it fires, and replacing it, patching it, making a
subclass of it or parametrising it changes the result; in forward, loss, backward, cached forward
and generation, on the plain and on the accelerated model.

Two exceptions, which are no calls: `layers` is a list; and the model itself is called by `forward`
only, not by `loss` and `generate`, which stop at the hidden states before the head.
"""

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from accelerate.paths import (
    CALLS,
    CHANGES,
    MODELS,
    PATHS,
    called_modules,
    differs,
    generated,
    hooked,
    make,
    tokens_for,
)
from scratchlm.accelerate import accelerate, plain
from scratchlm.inference import GREEDY, stream

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
            if differs(got, expected):
                missed.append(f"{where}: listening changed the result")
    assert not missed, "\n".join(missed)


@modes
@models
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_module_changes_the_result(name, mode, change):
    model, missed = build(name, mode), []
    names = [n for n in called_modules(model) if applies(change, model, n)]
    assert names
    expected = {path: run(model) for path, run in paths_of("any", mode)}
    for module_name in names:
        with CHANGES[change](model, module_name):
            for path, run in paths_of(module_name, mode):
                if not differs(run(model), expected[path]):
                    missed.append(f"{module_name or 'the model'} in {path}: nothing changed")
    assert not missed, "\n".join(missed)
    for path, run in paths_of("any", mode):  # and it was taken back
        assert not differs(run(model), expected[path]), path


def applies(change, model, name):
    module = model.get_submodule(name)
    if change == "replacement":
        return bool(name)  # the model itself stands nowhere
    if change == "parametrization":
        return isinstance(getattr(module, "weight", None), nn.Parameter)
    if change == "pre-hook that changes the input":
        return bool(name) and "embeddings" not in name  # their inputs are ids
    return True


@models
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_changed_before_acceleration_stays_changed(name, change):
    for module_name in called_modules(make(name)):
        model = make(name)
        if not applies(change, model, module_name):
            continue
        with CHANGES[change](model, module_name):
            path = "forward" if not module_name else "backward"
            changed = PATHS[path](model)
            accelerate(model)
            got = {"first": PATHS[path](model), "generate": generated(model, accelerate=True)}
            plain(model)
        assert not differs(got["first"], changed), f"{change} of {module_name} was taken back"
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


# Compiled


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_blocks(model, backend):
    for layer in model.layers:
        layer.compile(backend=backend)


def in_blocks(model):
    return [n for n in called_modules(model) if n.startswith("layers.")]


@modes
@models
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.usefixtures("_fresh_compiler")
def test_hooks_put_on_before_compilation_fire(name, mode, backend):
    model = build(name, mode, num_layers=1)
    listeners = {n: Listener(model.get_submodule(n)) for n in in_blocks(model)}
    compile_blocks(model, backend)
    for path in ("forward", "backward"):
        PATHS[path](model)
        for module_name, listener in listeners.items():
            assert listener.after, f"{module_name} in {path}"
            assert listener.before, f"{module_name} in {path}"
            listener.before = listener.after = 0
