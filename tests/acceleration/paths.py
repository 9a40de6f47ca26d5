"""Every way a model is used, as a function to one tensor; and what may be done to a module.

`PATHS` are the ways, `CHANGES` the things people do to a layer: each makes its output differ by
`perturb`, or only listens.
"""

import contextlib

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map_only

from scratchlm import config as c
from scratchlm.inference import GREEDY, generate
from scratchlm.model import Embedding
from tiny_models import FAMILIES, PLAIN, build, ids

# Together they have every module class.
MODELS = {
    "plain": FAMILIES["plain"],
    "qwen3": FAMILIES["qwen3"],
    "gpt2": FAMILIES["gpt2"],
    "mixtral": FAMILIES["mixtral"],
    "post-norm": PLAIN.replace(
        norm_placement="post", positions=c.Sinusoidal(), ffn=c.SwiGLU(bias=True)
    ),
}
SEQ, NEW_TOKENS = 7, 3


def make(name, ops="fast", device="cpu", dtype=torch.float32, **changes):
    return build(MODELS[name].replace(**changes), ops, dtype=dtype).to(device)


# Paths


def tokens_for(model, batch=2, seq=SEQ):
    return ids(batch, seq, model.config).to(model.token_embeddings.weight.device)


def forward(model):
    with torch.no_grad():
        return model(tokens_for(model))


def loss(model):
    """Each row's loss: a mean of many tells little of each."""
    with torch.no_grad():
        rows = tokens_for(model).split(1)
        return torch.stack([model.loss(row, row.roll(-1, 1)) for row in rows])


def backward(model, batch=2, seq=SEQ):
    """The size of every parameter's gradient, smallest first: names do not matter."""
    tokens = tokens_for(model, batch, seq)
    model.zero_grad()
    model.loss(tokens, tokens.roll(-1, 1)).backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    return torch.stack([g.norm() for g in gradients if g is not None]).sort().values


def cached_forward(model):
    """A prompt, then one token with its keys and values kept."""
    tokens = tokens_for(model)
    cache = model.new_cache(len(tokens))
    with torch.no_grad():
        model(tokens[:, :-1], cache=cache)
        return model(tokens[:, -1:], cache=cache)


def generated(model, accelerate=False, new_tokens=NEW_TOKENS):
    """The log-probabilities of all that was chosen."""
    rows = tokens_for(model).tolist()
    done = generate(
        model,
        [rows[0], rows[1][:4]],
        max_new_tokens=new_tokens,
        sampling=GREEDY,
        eos_ids=(),
        num_logprobs=0,
        accelerate=accelerate,
    )
    return torch.tensor([[said.logprob for said in row.logprobs] for row in done])


PATHS = {
    "forward": forward,
    "loss": loss,
    "backward": backward,
    "cached forward": cached_forward,
    "generate": generated,
}
# How often a path calls a module at least: once, unless said.
CALLS = {"loss": 2, "cached forward": 2, "generate": NEW_TOKENS}


# Changes


def perturb(output):
    """Change every tensor of real numbers, each channel by another factor.

    One factor for all would be lost in a norm or a softmax.
    """
    return tree_map_only(torch.Tensor, _perturb_tensor, output)


def _perturb_tensor(x):
    if not x.is_floating_point():
        return x
    width = x.shape[-1] if x.ndim else 1
    channel = torch.arange(1, width + 1, device=x.device)
    return x * (1 + 0.3 * torch.sin(channel)).to(x.dtype)


class Wrapped(nn.Module):
    """Another module in the place of one: calls it, and has no attribute of it but a table.

    The table of token embeddings is asked for: its device and dtype, and by a tied head.
    """

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        if isinstance(inner, Embedding):
            self.weight = inner.weight

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Perturbed(Wrapped):
    """A replacement whose output differs."""

    def forward(self, *args, **kwargs):
        return perturb(super().forward(*args, **kwargs))


class PerturbedWeight(nn.Module):
    def forward(self, weight):
        return perturb(weight)


@contextlib.contextmanager
def replaced(model, name, by=Perturbed):
    parent_name, _, child = name.rpartition(".")
    parent, module = model.get_submodule(parent_name), model.get_submodule(name)
    setattr(parent, child, by(module))
    yield
    setattr(parent, child, module)


@contextlib.contextmanager
def parametrized(model, name):
    module = model.get_submodule(name)
    parametrize.register_parametrization(module, "weight", PerturbedWeight())
    yield
    parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


@contextlib.contextmanager
def patched(model, name, method="forward"):
    module = model.get_submodule(name)
    run = getattr(module, method)
    setattr(module, method, lambda *args, **kwargs: perturb(run(*args, **kwargs)))
    yield
    delattr(module, method)


@contextlib.contextmanager
def subclassed(model, name):
    module = model.get_submodule(name)
    kind = type(module)

    class Own(kind):
        def forward(self, *args, **kwargs):
            return perturb(super().forward(*args, **kwargs))

    module.__class__ = Own
    yield
    module.__class__ = kind


@contextlib.contextmanager
def hooked(model, name):
    handle = model.get_submodule(name).register_forward_hook(lambda m, given, out: perturb(out))
    yield
    handle.remove()


@contextlib.contextmanager
def pre_hooked(model, name):
    """Inputs are changed before the call; ids and positions are not numbers to perturb."""
    handle = model.get_submodule(name).register_forward_pre_hook(lambda m, given: perturb(given))
    yield
    handle.remove()


CHANGES = {
    "hook that changes the output": hooked,
    "pre-hook that changes the input": pre_hooked,
    "replacement": replaced,
    "parametrization": parametrized,
    "patched forward": patched,
    "subclass": subclassed,
}


def called_modules(model):
    """The names of all modules but `layers`: a list is not called."""
    return [n for n, m in model.named_modules() if not isinstance(m, nn.ModuleList)]


def differs(one, other):
    """Whether two results differ by more than rounding."""
    return one.shape != other.shape or not torch.allclose(one, other, rtol=2e-5, atol=1e-6)


def alike(one, other):
    """Whether two results are the same up to rounding, in whatever order they were summed."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-5)
